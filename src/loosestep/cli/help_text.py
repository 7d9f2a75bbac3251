"""What `--help` says below the options: strategies with their fields, layouts of data, recipes
of one's own.
"""

from __future__ import annotations

import textwrap

from rich.markup import escape
from typer.core import TyperCommand

from loosestep.strategies import STRATEGIES

WIDTH = 78  # of a terminal of 80 columns
INDENT = 16

DATA = """\
Data, a folder with what follows; what is not divided has a tenth held out:

  acoustic      transcripts.tsv, lines of FILE <tab> TEXT <tab> train or test,
                the last optional, and the wav files (16 bits, mono, 16 kHz)
                or Sphinx features: feat/ID.mfc and etc/NAME_train.fileids,
                etc/NAME_train.transcription, the same two of NAME_test
                beside either: labels/ID.npy, for --set loss=frames
  vision        train/CLASS/*.png and test/CLASS/*.png
                or CLASS/*.png
                or train.npz and test.npz (jpeg, offsets, labels, classes)
                or, instead of a folder, one such file
"""

OWN = """\
FILE.py:function is called in every rank and returns a loosestep.recipes.Task:

  def recipe(options, *, data, seed, device, progress):  # options: of --set
      return DatasetTask(make_model=..., dataset=..., loss=..., evaluate=...,
                         training=Training(lr=0.05), seed=seed, device=device)
"""


def item(name: str, text: str) -> str:
    """The name, and the text in a column beside it."""
    first = f"  {name}".ljust(INDENT)
    rest = " " * INDENT
    return textwrap.fill(
        text, WIDTH, initial_indent=first, subsequent_indent=rest, break_on_hyphens=False
    )


def guide() -> str:
    """The whole text, as rich markup."""
    parts = ["Strategies, with their fields and defaults, as in daso:period=8,delay=2:\n"]
    for name, entry in STRATEGIES.entries().items():
        fields = " ".join(f"{field}={value}" for field, value in entry.defaults().items())
        parts += [item(name, entry.summary), item("", fields or "no fields")]
    return escape("\n".join([*parts, "", DATA, OWN]))


class Guided(TyperCommand):
    """A command whose help ends with `guide`, of the strategies that there are by then."""

    @property
    def epilog(self) -> str:
        return guide()

    @epilog.setter
    def epilog(self, _: str | None) -> None:
        """Nothing is kept: what the base class sets is always None."""
