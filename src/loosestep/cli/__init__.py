"""The `loosestep` command: one file a command, registered here."""

import typer

from loosestep.cli import lab, launch
from loosestep.cli.compare import compare
from loosestep.cli.demo import demo
from loosestep.cli.help_text import Guided
from loosestep.cli.replay import replay
from loosestep.cli.report import report
from loosestep.cli.resume import resume
from loosestep.cli.simulate import simulate
from loosestep.cli.train import train

app = typer.Typer(
    no_args_is_help=True, help="Asynchronous, decentralised data-parallel training for PyTorch."
)

app.command("demo")(demo)
app.command("train", cls=Guided)(train)
app.command("compare", cls=Guided)(compare)
app.command("replay")(replay)
app.command("report")(report)
app.command("resume")(resume)
app.command("simulate", cls=Guided)(simulate)

# Everything after SCRIPT belongs to the script, also what looks like an option of ours.
passes_on = {"allow_interspersed_args": False}
app.command("launch", context_settings=passes_on)(launch.launch)
app.command("lab", context_settings=passes_on)(lab.lab)


def main() -> None:
    """The console entry point."""
    app()
