"""Final quality by strategy, learners sharing one device, each strategy at a learning rate of its own.

    python benchmarks/recipes.py --recipe acoustic --data AN4 --device cuda --jobs 4                   ACOUSTIC.md
    python benchmarks/recipes.py --recipe vision --data CIFAR10 --learners 8 --device cuda --jobs 2    VISION.md

Every run is what `loosestep train` does with the same settings. Learning rates are given (--fixed) or searched on the
first seed. Without the data (they are not part of the project) there is nothing to run.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from common import machine, table
from loosestep import launch
from loosestep.training.config import Config
from loosestep.training.folder import RunFolder

STRATEGIES = {
    "synchronous": "allreduce",
    "AD-PSGD fixed ring": "adpsgd:cpu_share=1.0",
    "AD-PSGD randomized ring": "adpsgd:topology=random-ring,cpu_share=1.0",
    "delay-by-one": "delay-by-one",
    "DASO": "daso",
}
QUALITIES = {"acoustic": ("wer", "WER %", 1), "vision": ("accuracy", "accuracy %", -1)}  # 1: less is better
LATEST = threading.Lock()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", choices=list(QUALITIES), default="acoustic")
    parser.add_argument("--learners", type=int, default=4)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time")
    parser.add_argument("--epochs", type=float, default=40.0)
    parser.add_argument("--search-epochs", type=float, default=16.0)
    parser.add_argument("--rates", default="0.002,0.004,0.008", help="learning rates tried on the first seed")
    parser.add_argument("--fixed", default="", help="strategy=rate;... instead of a search, as in daso=0.004")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", default="", help="names of strategies, separated by commas")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no further run after so long")
    parser.add_argument("--set", action="append", default=[], help="options of the recipe, as in --set batch=8")
    parser.add_argument("--earlier", type=Path, nargs="*", default=[], help="files with result lines of earlier calls")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--output", type=Path)
    return parser.parse_args()


def train(name: str, lr: float, seed: int, epochs: float, arguments: argparse.Namespace, root: Path) -> dict[str, Any]:
    """One run; its error rates, its speed and what it waited."""
    nodes, per_node = (2, arguments.learners // 2) if name == "DASO" else (arguments.learners, 1)
    options = {key: _value(text) for key, _, text in (pair.partition("=") for pair in arguments.set)}
    config = Config(
        recipe=arguments.recipe,
        strategy=STRATEGIES[name],
        nodes=nodes,
        ranks_per_node=str(per_node),
        data=str(arguments.data.resolve()),
        epochs=epochs,
        lr=lr,
        seed=seed,
        device=arguments.device,
        checkpoint_every=10**9,
        evaluate_every=10**9,
        options=options,
    )
    folder = RunFolder(root / f"{name.replace(' ', '-')}-{lr:g}-{seed}-{epochs:g}")
    folder.path.mkdir(parents=True)
    config.write(folder.config_file)
    begin = time.monotonic()
    command = [sys.executable, "-m", "loosestep.training.rank", str(folder.path)]
    with launch.start(command, nodes=nodes, ranks_per_node=per_node) as job:
        job.wait()
        tail = job.ranks[0].output[-3:]
    lines = folder.metrics()
    final = next((line for line in lines if line["kind"] == "final"), None)
    result: dict[str, Any] = {"name": name, "lr": lr, "seed": seed, "epochs": epochs, "wall": time.monotonic() - begin}
    if final is None:
        result |= {"quality": None, "problem": " ".join(tail)[-300:]}
    else:
        ends = [line for line in lines if line["kind"] == "end"]
        waits = [line["wait_seconds"] / max(line["seconds"], 1e-9) for line in ends]
        result |= {
            "quality": final["metrics"][QUALITIES[arguments.recipe][0]],
            "seconds": final["seconds"],
            "gradients": final["gradients"],
            "waiting": statistics.mean(waits),
        }
    with LATEST:
        print(json.dumps({k: round(v, 4) if isinstance(v, float) else v for k, v in result.items()}), flush=True)
    return result


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def main() -> None:
    arguments = parse()
    if not arguments.data.is_dir():
        sys.exit(f"no corpus at {arguments.data}: give --data a Sphinx feature folder")
    names = [name for name in STRATEGIES if not arguments.only or name in arguments.only.split(",")]
    fixed = dict(pair.split("=") for pair in filter(None, arguments.fixed.split(";")))
    rates = [float(rate) for rate in arguments.rates.split(",")]
    until = time.monotonic() + arguments.seconds
    root = Path(tempfile.mkdtemp(prefix="loosestep-acoustic-"))
    with ThreadPoolExecutor(arguments.jobs) as pool:

        def run_all(tasks: list[tuple[str, float, int, float]]) -> list[dict[str, Any]]:
            def run(task: tuple[str, float, int, float]) -> dict[str, Any] | None:
                return train(*task, arguments, root) if time.monotonic() < until else None

            return [result for result in pool.map(run, tasks) if result is not None]

        searched = [(n, r, 0, arguments.search_epochs) for n in names if n not in fixed for r in rates]
        found = run_all(searched)
        sign = QUALITIES[arguments.recipe][2]
        best = {name: float(fixed[name]) for name in names if name in fixed}
        for name in names:
            tried = [result for result in found if result["name"] == name and result["quality"] is not None]
            if tried:
                best[name] = min(tried, key=lambda result: sign * result["quality"])["lr"]
        seeds = range(arguments.first_seed, arguments.first_seed + arguments.seeds)
        results = run_all([(n, best[n], seed, arguments.epochs) for seed in seeds for n in names if n in best])
    for line in (line for file in arguments.earlier for line in file.read_text().splitlines() if line.startswith("{")):
        results.append(json.loads(line))
    report(arguments, names, results, found)


def report(arguments: argparse.Namespace, names: list[str], results: list[Any], found: list[Any]) -> None:
    """The table, as text and as a file."""
    rows, base = [], None
    for name in names:
        runs = [result for result in results if result["name"] == name and result["quality"] is not None]
        if not runs:
            continue
        values = [100 * result["quality"] for result in runs]
        mean = statistics.mean(values)
        base = mean if name == "synchronous" else base
        rows.append(
            [
                name,
                ", ".join(f"{rate:g}" for rate in sorted({result["lr"] for result in runs})),
                f"{mean:.1f} ({min(values):.1f}-{max(values):.1f})",
                "" if base is None else f"{mean - base:+.1f}",
                f"{len(runs)}",
                f"{statistics.mean(result['gradients'] / result['seconds'] for result in runs):.0f}",
                f"{statistics.mean(result['waiting'] for result in runs):.0%}",
            ]
        )
    label = QUALITIES[arguments.recipe][1]
    header = ["strategy", "learning rate", label, "against synchronous", "runs", "gradients/s", "waiting"]
    search = ", ".join(f"{r['name']} {r['lr']:g}: {100 * r['quality']:.1f}" for r in found if r["quality"] is not None)
    rates = f"searched on the first seed over {arguments.search_epochs:g} epochs ({search})" if search else "given"
    text = (
        f"# {arguments.recipe.capitalize()}: final quality by strategy\n\nWritten by `benchmarks/recipes.py` with {arguments.learners} "
        f"learners sharing one {arguments.device} device, {arguments.epochs:g} epochs, options {' '.join(arguments.set) or 'none'}; the same "
        f"number of gradients for every strategy; mean (least-most) of the runs. Learning rates: {rates}. Several runs shared the "
        f"device, so gradients per second compare only roughly.\n\n{machine()}\n\n{table(header, rows)}\n"
    )
    print(text)
    (arguments.output or Path(__file__).with_name(f"{arguments.recipe.upper()}.md")).write_text(text)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
