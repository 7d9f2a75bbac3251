"""The `loosestep` command: one file a command."""

import typer

app = typer.Typer(no_args_is_help=True, help="Asynchronous, decentralised data-parallel training for PyTorch.")


def main() -> None:
    """The console entry point."""
    app()
