"""Final quality by strategy at the same number of gradients, learners sharing one device, each at a
learning rate of its own.

    python benchmarks/quality.py --recipe acoustic --data AN4 --device cuda --jobs 4                               ACOUSTIC.md
    python benchmarks/quality.py --recipe vision --data CIFAR10 --learners 8 --device cuda --jobs 2                VISION.md
    (the same with --jobs 15 --virtual --output benchmarks/VISION-VIRTUAL.md)
    python benchmarks/quality.py --recipe vision --learners 8 --output benchmarks/DIGITS.md                        the digits

Every run is what `loosestep train` does with the same settings; with `--virtual`, what `loosestep
simulate` does: the mathematics of real learners in one process a run, so that many runs fit on one
machine and nothing depends on how busy it is. Each strategy's learning rate is the best of
`--rates` on the first seed. Every result is a line of JSON: with `--earlier FILES` the runs in them
are not made again, so the table can be collected in several calls (`--seconds` ends one), and
`--seconds 0` only writes it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from common import Spread, machine, table
from loosestep import Cluster, launch
from loosestep.recipes import find_recipe
from loosestep.runfolder.config import Config, read_config
from loosestep.runfolder.folder import RunFolder
from loosestep.training.on_virtual_ranks import simulate_run
from loosestep.training.rank import own_device

SYNCHRONOUS = "synchronous"
STRATEGIES = {
    SYNCHRONOUS: "allreduce",
    "AD-PSGD fixed ring": "adpsgd:slowdown=1.0",
    "AD-PSGD randomized ring": "adpsgd:graph=random-ring,slowdown=1.0",
    "delay-by-one": "delay-by-one",
    "DASO": "daso",
    "AD-PSGD pairs": "adpsgd:graph=pairs,slowdown=1.0",
    "fixed ring with momentum": "adpsgd:average_momentum=True,slowdown=1.0",
    "randomized ring with momentum": "adpsgd:graph=random-ring,average_momentum=True,slowdown=1.0",
}
# the last two average the momentum too
ON_REQUEST = (
    "AD-PSGD pairs",
    "fixed ring with momentum",
    "randomized ring with momentum",
)
FIRST_SEED = 0
VIRTUAL = {"bandwidth": "10gbit", "latency": "50us", "compute": "100ms", "jitter": 0.1}


class Judged(NamedTuple):
    """How a recipe is judged."""

    metric: str
    label: str
    lower_is_better: bool


JUDGED = {
    "acoustic": Judged("wer", "WER %", True),
    "vision": Judged("accuracy", "accuracy %", False),
}
Result = dict[str, Any]


class Trial(NamedTuple):
    """One run."""

    name: str
    lr: float
    seed: int
    epochs: float


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--recipe", choices=list(JUDGED), default="acoustic")
    parser.add_argument("--learners", type=int, default=4)
    parser.add_argument("--data", type=Path, help="without, what the recipe brings along")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time")
    parser.add_argument("--epochs", type=float, default=50.0)
    parser.add_argument(
        "--rates", default="0.004,0.006,0.008", help="learning rates tried on the first seed"
    )
    parser.add_argument(
        "--rates-of", action="append", default=[], help="of one strategy, as in DASO=0.004,0.006"
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--only",
        default="",
        help=f"names of strategies, separated by commas; {', '.join(ON_REQUEST)} only so",
    )
    parser.add_argument(
        "--seconds", type=float, default=1e9, help="begin no further run after so long"
    )
    parser.add_argument(
        "--set", action="append", default=[], help="options of the recipe, as in --set batch=8"
    )
    parser.add_argument(
        "--earlier",
        type=Path,
        nargs="*",
        default=[],
        help="files with result lines of earlier calls",
    )
    parser.add_argument(
        "--lines", type=Path, help="append result lines to this file, not only to the terminal"
    )
    parser.add_argument(
        "--virtual", action="store_true", help="virtual learners: one process a run"
    )
    # the run folder of one such run
    parser.add_argument("--simulate", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--note", default="", help="a sentence for the table's head")
    parser.add_argument("--output", type=Path)
    return parser.parse_args()


class Bench:
    """Runs what is not known yet, a few at a time, until the time is up."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.options = read_options(arguments.set)
        self.known = {_trial(result): result for result in read_results(arguments.earlier)}
        self.until = time.monotonic() + arguments.seconds
        self.root = Path(tempfile.mkdtemp(prefix="loosestep-quality-"))
        self._pen = threading.Lock()

    def results(self, trials: Sequence[Trial]) -> list[Result]:
        """Of those trials that are known or could still be made; in order."""
        with ThreadPoolExecutor(self.arguments.jobs) as pool:
            return [result for result in pool.map(self._result, trials) if result is not None]

    def _result(self, trial: Trial) -> Result | None:
        if trial not in self.known and time.monotonic() < self.until:
            self.known[trial] = result = self.train(trial)
            with self._pen:
                tell(result, self.arguments.lines)
        return self.known.get(trial)

    def train(self, trial: Trial) -> Result:
        """One run; its quality, its speed and what it waited."""
        chosen = self.arguments
        nodes, per_node = (
            (2, chosen.learners // 2) if trial.name == "DASO" else (chosen.learners, 1)
        )
        config = Config(
            recipe=chosen.recipe,
            strategy=STRATEGIES[trial.name],
            nodes=nodes,
            ranks_per_node=str(per_node),
            data=None if chosen.data is None else str(chosen.data.resolve()),
            epochs=trial.epochs,
            lr=trial.lr,
            seed=trial.seed,
            device=chosen.device,
            checkpoint_every=10**9,
            evaluate_every=10**9,
            options=self.options,
        )
        folder = RunFolder(
            self.root / f"{trial.name.replace(' ', '-')}-{trial.lr:g}-{trial.seed}-{trial.epochs:g}"
        )
        return {**trial._asdict(), **(simulate_apart if chosen.virtual else train)(config, folder)}


def train(config: Config, folder: RunFolder, env: dict[str, str] | None = None) -> Result:
    """One run of real processes."""
    _prepare(config, folder)
    command = [sys.executable, "-m", "loosestep.training.rank", str(folder.path)]
    begin = time.monotonic()
    with launch.start(command, nodes=config.nodes, ranks_per_node=config.counts(), env=env) as job:
        job.wait()
        tail = job.ranks[0].output[-3:]
    return {"wall": time.monotonic() - begin, **judge(folder, config, tail)}


def simulate_apart(config: Config, folder: RunFolder) -> Result:
    """One run on virtual learners, in a process of its own."""
    _prepare(config, folder)
    command = [sys.executable, __file__, "--simulate", str(folder.path)]
    begin = time.monotonic()
    tail = subprocess.run(command, capture_output=True, text=True).stderr.splitlines()[-3:]
    return {"wall": time.monotonic() - begin, **judge(folder, config, tail)}


def _prepare(config: Config, folder: RunFolder) -> None:
    folder.path.mkdir(parents=True)
    config.write(folder.config_file)


def judge(folder: RunFolder, config: Config, tail: Sequence[str]) -> Result:
    """What is worth keeping of a run; of one that failed, its last lines."""
    lines = folder.metrics()
    place = {"where": where(config.device)}
    final = next((line for line in lines if line["kind"] == "final"), None)
    if final is None:
        return {"quality": None, "problem": " ".join(tail)[-300:], **place}
    ends = [line for line in lines if line["kind"] == "end"]
    return {
        "quality": final["metrics"][JUDGED[config.recipe].metric],
        "seconds": final["seconds"],
        "gradients": final["gradients"],
        "waiting": statistics.mean(
            line["wait_seconds"] / max(line["seconds"], 1e-9) for line in ends
        ),
        "exchanges_a_gradient": sum(line["exchanges"] for line in ends) / final["gradients"],
        "folds_a_gradient": sum(line["folds"] for line in ends) / final["gradients"],
        "megabytes_a_step": sum(line["bytes_sent"] for line in ends) / final["gradients"] / 1e6,
        "staleness": statistics.mean(line["staleness_mean"] for line in ends),
        **place,
    }


def tell(result: Result, lines: Path | None) -> None:
    """Print a result as a line of JSON, and append it to a file."""
    line = json.dumps({k: round(v, 4) if isinstance(v, float) else v for k, v in result.items()})
    print(line, flush=True)
    if lines is not None:
        with lines.open("a") as file:
            file.write(line + "\n")


def simulate(folder: RunFolder) -> None:
    """One run on virtual learners, in this process."""
    config = read_config(folder.config_file)
    task = find_recipe(config.recipe).build(
        config.options,
        data=config.data_folder,
        seed=config.seed,
        device=own_device(config.device, 0),
    )
    simulate_run(folder, config, task, Cluster(**VIRTUAL, seed=config.seed), tell=lambda line: None)


def read_results(files: Iterable[Path]) -> list[Result]:
    """The result lines of earlier calls; the last of equal trials counts."""
    lines = (
        line for file in files for line in file.read_text().splitlines() if line.startswith("{")
    )
    return [json.loads(line) for line in lines]


def where(device: str) -> str:
    """The machine that a result was measured on."""
    text = machine()
    if device.startswith("cuda"):
        import torch

        text = text.replace(
            f"(gloo, {torch.cuda.get_device_name()})", f"(gloo), one {torch.cuda.get_device_name()}"
        )
    return text.partition(", load before")[0] + text[text.index("; Python") :]


def best_rate(tried: Sequence[Result], judged: Judged) -> float | None:
    """The rate of the best trial; None if every trial diverged, or none was made."""
    whole = [result for result in tried if result["quality"] is not None]
    sign = 1 if judged.lower_is_better else -1
    return min(whole, key=lambda result: sign * result["quality"])["lr"] if whole else None


def rates_to_try(chosen: argparse.Namespace, names: Sequence[str]) -> list[tuple[str, float]]:
    """Strategies with the rates to be tried, in the order given: the first of every strategy
    first.
    """
    own = dict(pair.split("=") for pair in chosen.rates_of)
    rates = {
        name: [float(rate) for rate in own.get(name, chosen.rates).split(",")] for name in names
    }
    return [
        (name, rates[name][at])
        for at in range(max(map(len, rates.values())))
        for name in names
        if at < len(rates[name])
    ]


def _trial(result: Result) -> Trial:
    return Trial(*(result[name] for name in Trial._fields))


def read_options(pairs: Iterable[str]) -> dict[str, Any]:
    """KEY=VALUE, values as JSON where they are."""
    return {key: _value(text) for key, _, text in (pair.partition("=") for pair in pairs)}


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


# The table ----------------------------------------------------------------------------------------


def table_of_seeds(results: Sequence[Result], names: Sequence[str], judged: Judged) -> str:
    """Final quality of every strategy, beside the synchronous one's."""
    rows: list[list[str]] = []
    base: float | None = None
    for name in names:
        runs = [
            result for result in results if result["name"] == name and result["quality"] is not None
        ]
        if not runs:
            continue
        quality = Spread(tuple(100 * result["quality"] for result in runs))
        base = quality.mean if name == SYNCHRONOUS else base
        speed = statistics.mean(result["gradients"] / result["seconds"] for result in runs)
        rows.append(
            [
                f"{name} (`{STRATEGIES[name]}`)",
                f"{runs[0]['lr']:g}",
                quality.text(".1f", centre="mean"),
                "" if base is None else f"{quality.mean - base:+.1f}",
                str(len(runs)),
                f"{speed:.0f}",
                f"{statistics.mean(result['waiting'] for result in runs):.0%}",
            ]
        )
    header = [
        "strategy",
        "learning rate",
        judged.label,
        "against synchronous",
        "runs",
        "gradients/s",
        "waiting",
    ]
    return table(header, rows)


def table_of_search(results: Sequence[Result], names: Sequence[str], judged: Judged) -> str:
    """What the learning rates gave on the first seed."""
    rates = sorted({result["lr"] for result in results})

    def cell(name: str, rate: float) -> str:
        found = [result for result in results if (result["name"], result["lr"]) == (name, rate)]
        if not found:
            return ""
        return "diverged" if found[0]["quality"] is None else f"{100 * found[0]['quality']:.1f}"

    rows = [[name, *(cell(name, rate) for rate in rates)] for name in names]
    return table([f"{judged.label} at learning rate", *(f"{rate:g}" for rate in rates)], rows)


VIRTUALLY = (
    "Gradients are computed and exchanged for real, time is that of a virtual cluster "
    "({bandwidth} between nodes, {compute} a step with a jitter of {jitter:.0%}): gradients per "
    "second and waiting are virtual too."
).format(**VIRTUAL)


def page(chosen: argparse.Namespace, seeds: str, search: str, machines: Sequence[str]) -> str:
    """The whole file."""
    data = "the data it brings along" if chosen.data is None else chosen.data.name
    return (
        f"# {chosen.recipe.capitalize()}: final quality by strategy\n\nWritten by "
        f"`benchmarks/quality.py`: {data}, {chosen.learners} "
        f"{'virtual ' * chosen.virtual}learners sharing one {chosen.device} device, "
        f"{chosen.epochs:g} epochs, options {' '.join(chosen.set) or 'none'}; the same number of "
        f"gradients for every strategy. {chosen.note}\n\n{seeds}\n\nMean (least-most) of the "
        "runs, each with a seed of its own. Every strategy at the best of the learning rates "
        "that were tried for it on the first seed (below), whose run is among those counted; "
        "where only one was tried, it was chosen beforehand. "
        + (
            VIRTUALLY
            if chosen.virtual
            else "Other work shared the machine, so gradients per second compare only roughly."
        )
        + "\n\n"
        f"{search}\n\n{'; '.join(machines)}.\n"
    )


def main() -> None:
    chosen = parse()
    if chosen.simulate is not None:
        simulate(RunFolder(chosen.simulate))
        return
    if chosen.data is not None and not chosen.data.is_dir():
        sys.exit(f"no data at {chosen.data}: they are not part of the project")
    judged = JUDGED[chosen.recipe]
    wanted = (
        chosen.only.split(",")
        if chosen.only
        else [name for name in STRATEGIES if name not in ON_REQUEST]
    )
    names = [name for name in STRATEGIES if name in wanted]
    bench = Bench(chosen)
    bench.results(
        [Trial(name, rate, FIRST_SEED, chosen.epochs) for name, rate in rates_to_try(chosen, names)]
    )
    tried = [
        result for trial, result in bench.known.items() if trial[2:] == (FIRST_SEED, chosen.epochs)
    ]
    best = {
        name: best_rate([result for result in tried if result["name"] == name], judged)
        for name in names
    }
    trials = [
        Trial(name, rate, seed, chosen.epochs)
        for seed in range(FIRST_SEED, FIRST_SEED + chosen.seeds)
        for name, rate in best.items()
        if rate is not None
    ]
    results = bench.results(trials)
    machines = sorted({result["where"] for result in (*tried, *results)})
    text = page(
        chosen,
        table_of_seeds(results, names, judged),
        table_of_search(tried, names, judged),
        machines,
    )
    print(text)
    (chosen.output or Path(__file__).with_name(f"{chosen.recipe.upper()}.md")).write_text(text)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
