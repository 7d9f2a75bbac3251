"""The `loosestep` command: one file a command, imported when it is asked for."""

from __future__ import annotations

import sys
from collections.abc import Collection
from functools import cache
from importlib import import_module
from typing import Annotated, Any

import typer

from loosestep.version import __version__

DESCRIPTION = "Asynchronous, decentralised data-parallel training for PyTorch."
# What the list of commands says of each, without importing what it needs.
COMMANDS = {
    "demo": "A first look: speech recognition on two emulated nodes, with three strategies.",
    "train": "Train RECIPE with a strategy; everything about the run goes to runs/NAME.",
    "compare": "Train RECIPE with every strategy and seed, at the same budget; print a table.",
    "replay": "Train RUN again from its recording, bit for bit.",
    "report": "Write one self-contained HTML page about one run, or several side by side.",
    "resume": "Continue a run from its newest intact checkpoints, after a crash or a reboot.",
    "simulate": "Train RECIPE on virtual ranks in this process, on a virtual clock.",
    "launch": "Run SCRIPT once per rank on this machine, with torchrun's variables.",
    "lab": "Run SCRIPT on an emulated cluster: limited links, slow ranks, faults.",
}
# Everything after SCRIPT belongs to the script, also what looks like an option of ours.
PASSES_ON = {
    "launch": {"allow_interspersed_args": False},
    "lab": {"allow_interspersed_args": False},
}
GUIDED = ("train", "compare", "simulate")  # their help ends with strategies and data


def make_app(wanted: Collection[str]) -> typer.Typer:
    """The command line; only the `wanted` commands are there, of the others the line of help."""
    app = typer.Typer(no_args_is_help=True)
    app.callback(help=DESCRIPTION)(_version)
    for name, line in COMMANDS.items():
        if name not in wanted:
            app.command(name, help=line)(_absent)
            continue
        function = getattr(import_module(f"loosestep.cli.{name}"), name)
        more: dict[str, Any] = {}
        if name in GUIDED:
            more["cls"] = import_module("loosestep.cli.help_text").Guided
        app.command(name, short_help=line, context_settings=PASSES_ON.get(name), **more)(function)
    return app


def _absent() -> None:
    raise RuntimeError("this command was not asked for, so it has not been imported")


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"loosestep {__version__}")
        raise typer.Exit


def _version(
    version: Annotated[
        bool,
        typer.Option(
            "--version", is_eager=True, callback=_show_version, help="Show the version, and leave."
        ),
    ] = False,
) -> None:
    """Nothing to do before a command."""


@cache
def _whole() -> typer.Typer:
    return make_app(COMMANDS)


def __getattr__(name: str) -> Any:
    """`app`: the command line with all its commands."""
    if name != "app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _whole()


def main() -> None:
    """The console entry point."""
    first = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if first in COMMANDS:
        make_app([first])()
    elif first in ("--help", "--version"):
        make_app([])()
    else:
        _whole()()
