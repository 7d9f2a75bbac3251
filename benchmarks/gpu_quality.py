"""Speed and quality of the same runs: four ranks that share a GPU train a network to its end, over
gloo and the loopback.

    python benchmarks/gpu_quality.py --data CIFAR10 [--seeds 2] [--lines FILE] [--earlier FILES] [--seconds 500]
    python benchmarks/gpu_quality.py --recipe acoustic --data AN4
    python benchmarks/gpu_quality.py --data CIFAR10 --try "DASO, 4 nodes of 1 rank=daso:period=2,delay=2@0.8"    instead of all settings

Every run is what `loosestep train` does with the same settings: one process a rank, nothing beside
them. Round by round (a seed each) all settings run one after the other; speeds are compared within
a round. Every result is a line of JSON; with `--earlier` the runs in those files are not made
again, and `--seconds 0` only writes the section of GPU.md.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import quality
from common import Spread, ratios, table, write_section
from loosestep.runfolder.config import Config
from loosestep.runfolder.folder import RunFolder
from quality import JUDGED, Result, read_options, read_results, tell

GPU = Path(__file__).with_name("GPU.md")
FREE = "no communication"
SYNCHRONOUS = "synchronous"


class Setting(NamedTuple):
    """Four ranks, how they learn together, and at which learning rate."""

    strategy: str
    nodes: int
    ranks_per_node: int
    lr: float


class Trial(NamedTuple):
    """One run."""

    name: str
    setting: Setting
    seed: int


class Plan(NamedTuple):
    """What a recipe is trained with."""

    gradients: int  # of all ranks
    options: dict[str, Any]
    settings: dict[str, Setting]


FLAT = "DASO, 4 nodes of 1 rank"
NODES = "DASO, 2 nodes of 2 ranks"
RING = "AD-PSGD, randomized ring"
PLANS = {
    "vision": Plan(
        2512,
        {"model": "resnet20", "width": 4.0, "batch": 128, "schedule": "one-cycle"},
        {
            FREE: Setting("localsgd:period=1000000000", 4, 1, 0.4),
            SYNCHRONOUS: Setting("allreduce", 4, 1, 0.4),
            FLAT: Setting("daso:period=1,delay=1", 4, 1, 0.8),
            NODES: Setting("daso:period=8,delay=6", 2, 2, 0.8),
            RING: Setting("adpsgd:graph=random-ring,slowdown=1.0", 4, 1, 0.8),
        },
    ),
    "acoustic": Plan(  # the learning rates of ACOUSTIC.md
        5952,
        {"batch": 8},
        {
            FREE: Setting("localsgd:period=1000000000", 4, 1, 0.004),
            SYNCHRONOUS: Setting("allreduce", 4, 1, 0.004),
            FLAT: Setting("daso:period=4,delay=3", 4, 1, 0.004),
            NODES: Setting("daso:period=4,delay=3", 2, 2, 0.004),
            RING: Setting("adpsgd:graph=random-ring,slowdown=1.0", 4, 1, 0.005),
        },
    ),
}
WARM = 0.1  # the first part of every rank's steps does not count as speed


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--recipe", choices=list(PLANS), default="vision")
    parser.add_argument(
        "--data", type=Path, help="CIFAR-10 or AN4; without, what the recipe brings along"
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument(
        "--set", action="append", default=[], help="options of the recipe, as in --set batch=64"
    )
    parser.add_argument("--gradients", type=int, help="of all ranks")
    parser.add_argument(
        "--free",
        type=float,
        default=0.33,
        help="the part of them that the run without communication makes",
    )
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--only", help="settings, separated by semicolons")
    parser.add_argument(
        "--try",
        dest="tried",
        action="append",
        default=[],
        help="a setting otherwise: NAME=STRATEGY@RATE",
    )
    parser.add_argument(
        "--threads",
        type=int,
        default=max(1, len(os.sched_getaffinity(0)) // 4),
        help="of each rank",
    )
    parser.add_argument(
        "--seconds", type=float, default=1e9, help="begin no further run after so long"
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
    parser.add_argument("--note", default="", help="a sentence for below the table")
    parser.add_argument("--output", type=Path, help="the file with the section, instead of GPU.md")
    chosen = parser.parse_args()
    chosen.plan = PLANS[chosen.recipe]
    chosen.options = chosen.plan.options | read_options(chosen.set)
    chosen.gradients = chosen.gradients or chosen.plan.gradients
    return chosen


# Runs ---------------------------------------------------------------------------------------------


def train(trial: Trial, chosen: argparse.Namespace, folder: RunFolder) -> Result:
    """One run; its quality and its speed."""
    name, setting, seed = trial
    config = Config(
        recipe=chosen.recipe,
        strategy=setting.strategy,
        nodes=setting.nodes,
        ranks_per_node=str(setting.ranks_per_node),
        data=None if chosen.data is None else str(chosen.data.resolve()),
        gradients=max(4, round(chosen.gradients * (chosen.free if name == FREE else 1.0))),
        lr=setting.lr,
        seed=seed,
        device=chosen.device,
        checkpoint_every=10**9,
        evaluate_every=10**9,
        options=chosen.options,
    )
    # Idle threads of one rank must not spin on the cores that the others communicate with.
    env = {"OMP_NUM_THREADS": str(chosen.threads), "OMP_WAIT_POLICY": "passive"}
    result = {"name": name, "seed": seed, **setting._asdict(), **quality.train(config, folder, env)}
    if result["quality"] is not None:
        result["speed"] = gradients_per_second(folder.metrics())
    return result


def gradients_per_second(lines: Sequence[dict[str, Any]]) -> float:
    """Of all ranks, while all of them are past their first steps and none has made its last."""
    progress = [line for line in lines if line["kind"] == "progress"]
    ranks = {line["rank"] for line in progress}
    made = {
        rank: np.array(
            [(line["time"], line["step"]) for line in progress if line["rank"] == rank], dtype=float
        )
        for rank in ranks
    }
    begin = max(np.interp(WARM * steps[-1, 1], steps[:, 1], steps[:, 0]) for steps in made.values())
    end = min(steps[-1, 0] for steps in made.values())
    counted = sum(
        np.diff(np.interp([begin, end], steps[:, 0], steps[:, 1]))[0] for steps in made.values()
    )
    return float(counted / (end - begin))


def settings(chosen: argparse.Namespace) -> list[tuple[str, Setting]]:
    """Those to run in every round."""
    known = chosen.plan.settings
    names = (
        list(known) if chosen.only is None and not chosen.tried else (chosen.only or "").split(";")
    )
    found = [(name, known[name]) for name in names if name]
    for text in chosen.tried:
        name, _, other = text.partition("=")
        strategy, _, lr = other.rpartition("@")
        found.append((name, known[name]._replace(strategy=strategy, lr=float(lr))))
    return found


def trial_of(result: Result) -> Trial:
    return Trial(
        result["name"], Setting(*(result[field] for field in Setting._fields)), result["seed"]
    )


def collect(chosen: argparse.Namespace) -> list[Result]:
    """Round by round, as long as there is time; what is known already is not run again."""
    known = {trial_of(result): result for result in read_results(chosen.earlier)}
    until = time.monotonic() + chosen.seconds
    with tempfile.TemporaryDirectory(prefix="loosestep-gpu-quality-") as root:
        for seed in range(chosen.first_seed, chosen.first_seed + chosen.seeds):
            for trial in (Trial(name, setting, seed) for name, setting in settings(chosen)):
                if trial in known or time.monotonic() >= until:
                    continue
                known[trial] = result = train(
                    trial, chosen, RunFolder(Path(root) / str(len(known)))
                )
                tell(result, chosen.lines)
    return list(known.values())


# The section --------------------------------------------------------------------------------------


def section(results: Sequence[Result], chosen: argparse.Namespace) -> str:
    """One row a setting and what else was tried for it."""
    free = {result["seed"]: result["speed"] for result in results if result["name"] == FREE}
    rows: list[list[str]] = []
    synchronous = {
        result["seed"]: result["quality"] for result in results if result["name"] == SYNCHRONOUS
    }
    order = list(chosen.plan.settings)
    groups = dict.fromkeys(
        trial_of(result)[:2] for result in results if result["quality"] is not None
    )
    for name, setting in sorted(groups, key=lambda group: order.index(group[0])):
        runs = [
            r for r in results if r["quality"] is not None and trial_of(r)[:2] == (name, setting)
        ]
        reached = Spread(tuple(100 * result["quality"] for result in runs))
        beside = [result for result in runs if result["seed"] in free]
        gained = [
            100 * (r["quality"] - synchronous[r["seed"]]) for r in runs if r["seed"] in synchronous
        ]
        share = ratios(
            [result["speed"] for result in beside], [free[result["seed"]] for result in beside]
        )
        rows.append(
            [
                name if name == FREE else f"{name} (`{setting.strategy}`)",
                f"{setting.lr:g}",
                "" if name == FREE else reached.text(".1f", centre="mean"),
                ""
                if name in (FREE, SYNCHRONOUS) or not gained
                else f"{statistics.mean(gained):+.1f}",
                Spread(tuple(result["speed"] for result in runs)).text(".1f"),
                "" if name == FREE or not beside else share.text(".3f"),
                ""
                if name == FREE
                else f"{statistics.mean(result['megabytes_a_step'] for result in runs):.1f}",
                ""
                if name == FREE
                else f"{statistics.mean(result['staleness'] for result in runs):.1f}",
                str(len(runs)),
            ]
        )
    header = [
        "",
        "learning rate",
        JUDGED[chosen.recipe].label,
        "against synchronous",
        "gradients/s",
        "of no communication",
        "MB sent a step",
        "staleness",
        "runs",
    ]
    data = "the recipe's own data" if chosen.data is None else chosen.data.name
    options = " ".join(f"{key}={value}" for key, value in chosen.options.items())
    machines = "; ".join(sorted({result["where"] for result in results}))
    return (
        f"## Four ranks train to the end on one {chosen.device} device, {chosen.recipe}: speed "
        f"and quality of the same runs\n\n{table(header, rows)}\n\nWritten by "
        f"`benchmarks/gpu_quality.py`: the {chosen.recipe} recipe on {data} with {options}, "
        f"{chosen.gradients} gradients of all ranks; processes over gloo and the loopback, "
        f"{chosen.threads} threads each, nothing beside them. Quality: mean (least-most) over the "
        "seeds, of the model that `finish()` leaves on all ranks; the difference seed by seed. "
        f"Speed: median (least-most), from the time all ranks have made {WARM:.0%} of their steps "
        "until the first has made its last; ratios within a round (a seed). Start-up, evaluation "
        f"and finish are not counted. The run without communication makes {chosen.free:.0%} of "
        f"the gradients. {chosen.note}\n\n{machines}."
    )


def main() -> None:
    chosen = parse()
    if chosen.data is not None and not chosen.data.is_dir():
        sys.exit(f"no data at {chosen.data}: they are not part of the project")
    text = section(collect(chosen), chosen)
    print(f"\n{text}")
    write_section(
        "gpu-quality" if chosen.recipe == "vision" else f"gpu-quality-{chosen.recipe}",
        text,
        path=chosen.output or GPU,
    )


if __name__ == "__main__":
    main()
