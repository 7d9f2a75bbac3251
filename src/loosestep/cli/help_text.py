"""What `--help` says below the options: strategies with their fields, layouts of data, recipes
of one's own.
"""

from __future__ import annotations

import dataclasses
import textwrap

from rich.markup import escape

from loosestep.strategies import STRATEGIES

WIDTH = 78  # of a terminal of 80 columns
INDENT = 16

MEANING = {
    "allreduce": "synchronous: gradients are averaged in every step",
    "localsgd": "parameters are averaged once a period",
    "daso": "nodes exchange in the background, once a period",
    "daso-paper": "daso as it was published",
    "adpsgd": "gossip: average with one neighbour at a time; nobody waits",
    "delay-by-one": "models are averaged while the next gradient is computed",
    "diloco": "as localsgd, and the averages have a momentum: rare exchanges",
}

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


def fields(name: str) -> str:
    """A strategy's fields with their defaults; of a variant of another one those that make the
    difference.
    """
    kind, make = STRATEGIES[name]
    values = {field.name: getattr(make(), field.name) for field in dataclasses.fields(kind)}
    if make is not kind:
        values = {
            field: value for field, value in values.items() if value != getattr(kind(), field)
        }
    return " ".join(f"{field}={value}" for field, value in values.items())


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
    for name, meaning in MEANING.items():
        parts += [item(name, meaning), item("", fields(name) or "no fields")]
    return escape("\n".join([*parts, "", DATA, OWN]))
