"""Large batches: what sixteen learners reach when the total batch grows and the rate with it, a
strategy a line.

    python benchmarks/papers_large_batches.py --prepare ARRAYS [--data FOLDER]      corpora and untrained models as arrays
    python benchmarks/papers_large_batches.py --arrays ARRAYS --task an4 [--device cuda] [--seconds 240] [--lines FILE]
    python benchmarks/papers_large_batches.py --quick                               small arrays, few cells, nothing written
    python benchmarks/papers_large_batches.py --page                                the section of PAPERS.md from the lines

Virtual learners, all trainings of a total batch side by side in one tensor (`papers/learners.py`):
one exchange a step, landing a step later. Cells that are in the lines already are not trained
again, so a second call goes on. What is trained first: the rate at the smallest batch, then larger
batches with the rate in proportion, at the two largest also with a half, twice and four times that;
then further seeds.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from papers.learners import LEARNERS, RULES, Cell, Task, Trainings
from papers.pictures import EPOCHS as PICTURES_EPOCHS
from papers.pictures import Pictures
from papers.pictures import prepare as prepare_pictures
from papers.speech import EPOCHS as SPEECH_EPOCHS
from papers.speech import Speech
from papers.speech import prepare as prepare_speech

HERE = Path(__file__).resolve().parent
LINES = HERE / "results" / "papers-large-batches.jsonl"
PROCESSES = HERE / "results" / "papers-processes.jsonl"
DATA = HERE.parents[1] / "shared" / "data"
STARTS = 5
ROUNDS = 12_000
SYNCHRONOUS = "synchronous"
Result = dict[str, Any]


class Plan(NamedTuple):
    """What is trained of a task, every strategy alike: `grid` lists batches with rates and seeds, in
    the order of their weight. `together`: examples a step that fit into an accelerator's memory.
    """

    make: type[Speech] | type[Pictures]
    quality: str
    together: int
    grid: tuple[tuple[int, tuple[float, ...], tuple[int, ...]], ...]


PLANS = {
    "an4": Plan(
        Speech,
        "wer",
        10_000,
        (
            (32, (0.05, 0.1, 0.2), ()),  # synchronous training only: far from the best
            (32, (0.4, 0.8, 1.6), (0,)),
            (64, (0.8, 1.6), (0,)),
            (128, (0.8, 1.6, 3.2, 6.4, 12.8), (0,)),
            (256, (1.6, 3.2, 6.4, 12.8, 25.6), (0,)),
            (256, (4.5,), (0, 1, 2)),
            (256, (1.6, 3.2), (1, 2)),
            (128, (4.5,), (0, 1, 2)),
            (128, (1.6, 3.2), (1, 2)),
            (64, (1.6,), (1, 2)),
            (256, (0.8,), (0,)),
            (32, (0.8,), (1, 2)),
        ),
    ),
    "cifar10": Plan(
        Pictures,
        "accuracy",
        80_000,
        (
            (64, (0.0125, 0.025, 0.05, 0.1, 0.2, 0.4, 0.8), (0,)),
            (256, (0.8, 1.6), (0,)),
            (1024, (1.6, 3.2, 6.4, 12.8, 25.6), (0,)),
            (4096, (6.4, 12.8, 25.6, 51.2, 102.4), (0,)),
            (4096, (0.8, 1.6, 3.2), (0,)),
            (4096, (1.6, 3.2), (1, 2)),
            (1024, (1.6, 3.2), (1, 2)),
            (256, (0.4,), (0, 1, 2)),
            (1024, (0.8,), (0, 1, 2)),
            (4096, (0.8,), (1, 2)),
            (64, (0.2, 0.4), (1, 2)),
        ),
    ),
}


# What is trained -------------------------------------------------------------------------------------------------------


def stages(name: str) -> Iterator[list[Cell]]:
    """The cells of a task, what weighs most first."""
    for batch, rates, seeds in PLANS[name].grid:
        yield [
            Cell(name, strategy, batch, rate, seed)
            for strategy in (RULES if seeds else (SYNCHRONOUS,))
            for rate in rates
            for seed in (seeds or (0,))
        ]


def cell_of(result: Mapping[str, Any]) -> Cell:
    return Cell(*(result[field] for field in Cell._fields))


def same(first: Cell, second: Cell) -> bool:
    return (
        first[:3] == second[:3]
        and first.seed == second.seed
        and abs(first.rate / second.rate - 1) < 1e-6
    )


def chunks(cells: Sequence[Cell], together: int) -> Iterator[list[Cell]]:
    """Cells of one batch, as many as fit side by side."""
    for batch in dict.fromkeys(cell.batch for cell in cells):
        own = [cell for cell in cells if cell.batch == batch]
        room = max(1, together // batch)
        pieces = -(-len(own) // room)
        for part in np.array_split(np.arange(len(own)), pieces):
            yield [own[i] for i in part]


# Running ------------------------------------------------------------------------------------------


class Late(Exception):
    """The time is over in the middle of a chunk."""


def run(chosen: argparse.Namespace) -> None:
    """Stage after stage, until the time is over."""
    begin = time.monotonic()
    device = torch.device(chosen.device)
    torch.backends.cuda.matmul.allow_tf32 = True
    arrays = dict(np.load(chosen.arrays / f"{chosen.task}.npz"))
    plan = PLANS[chosen.task]
    task = plan.make(arrays, device=device, **({"epochs": chosen.epochs} if chosen.epochs else {}))
    orders = arrays["rings"].astype(np.int64)
    together = chosen.together or plan.together
    results = read(chosen.lines)
    slow = 0.0  # seconds a step and example of the chunk before
    while True:
        cells = next(
            (left for stage in stages(chosen.task) if (left := missing(stage, results))),
            [],
        )
        if not cells:
            print("every cell is trained", flush=True)
            return
        for chunk in chunks(cells, together):
            left = chosen.seconds - (time.monotonic() - begin)
            steps = task.steps(chunk[0].batch)
            expected = max(0.02, slow * len(chunk) * chunk[0].batch) * steps
            if left < expected:
                print(
                    f"{left:.0f} s left, {expected:.0f} s expected for {len(chunk)} cells of "
                    f"batch {chunk[0].batch}: the end",
                    flush=True,
                )
                return
            start = time.monotonic()

            def tell(share: float, start: float = start, left: float = left) -> None:
                if time.monotonic() - start > left:
                    raise Late

            try:
                found = side_by_side(task, chunk, device, orders, tell)
            except Late:
                print("the time is over inside a chunk, which is lost", flush=True)
                return
            except torch.cuda.OutOfMemoryError:
                torch.cuda.empty_cache()
                together //= 2
                print(f"out of memory; from here on {together} examples a step", flush=True)
                break
            seconds = time.monotonic() - start
            slow = seconds / steps / len(chunk) / chunk[0].batch
            for result in found:
                results.append(result)
                keep(result, chosen.lines)
            show(found, seconds, plan.quality, steps)


def side_by_side(
    task: Task, chunk: list[Cell], device: torch.device, orders: NDArray[np.int64], tell: Any
) -> list[Result]:
    """The results of a chunk."""
    torch.manual_seed(hash((chunk[0].batch, chunk[0].seed)) % 2**31)
    trainings = Trainings(
        task,
        chunk,
        device=device,
        rings=lambda seed, rounds: orders[seed, :rounds],
        dtype=torch.float32,
    )
    return trainings.train(tell=tell)


def missing(cells: Sequence[Cell], results: Sequence[Result]) -> list[Cell]:
    done = [cell_of(result) for result in results]
    return [cell for cell in dict.fromkeys(cells) if not any(same(cell, other) for other in done)]


def read(path: Path) -> list[Result]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def keep(result: Result, path: Path) -> None:
    with path.open("a") as file:
        file.write(json.dumps(result) + "\n")


def show(found: Sequence[Result], seconds: float, quality: str, steps: int) -> None:
    """A line a strategy."""
    print(
        f"{found[0]['task']} batch {found[0]['batch']}: {len(found)} cells, {steps} steps, "
        f"{seconds:.1f} s",
        flush=True,
    )
    for strategy in dict.fromkeys(result["strategy"] for result in found):
        own = [result for result in found if result["strategy"] == strategy]
        told = "  ".join(f"{r['rate']:g}/{r['seed']}: {100 * r[quality]:.1f}" for r in own)
        print(f"  {strategy:14} {told}", flush=True)


# Arrays -------------------------------------------------------------------------------------------


def prepare(folder: Path, data: Path) -> None:
    """What the trainings need, so that they need nothing but torch and numpy."""
    from loosestep.topology.graphs import permutation

    folder.mkdir(parents=True, exist_ok=True)
    rings = [
        [permutation(range(LEARNERS), seed, number) for number in range(ROUNDS)]
        for seed in range(STARTS)
    ]
    for name, make in (("an4", prepare_speech), ("cifar10", prepare_pictures)):
        arrays = make(data / name, STARTS)
        path = folder / f"{name}.npz"
        np.savez_compressed(path, rings=np.array(rings, np.int8), **arrays)
        print(f"{path}: {path.stat().st_size / 1e6:.1f} MB")


def quickly(chosen: argparse.Namespace) -> None:
    """The smallest batch at three rates, a twentieth of the epochs, in a folder that is forgotten."""
    with tempfile.TemporaryDirectory(prefix="loosestep-papers-") as folder:
        chosen.arrays = Path(folder)
        chosen.lines = Path(folder) / "lines.jsonl"
        chosen.seconds = 200.0
        chosen.together = 64
        prepare(chosen.arrays, chosen.data)
        for name, epochs in (("an4", 0.1), ("cifar10", 0.02)):
            chosen.task = name
            chosen.epochs = epochs
            batch = PLANS[name].grid[1][0]
            grid = ((batch, (0.1, 0.2), (0,)),)
            PLANS[name] = PLANS[name]._replace(grid=grid)
            run(chosen)


def main() -> None:
    """Prepare, train, or write the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--prepare", type=Path, metavar="ARRAYS")
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--arrays", type=Path)
    parser.add_argument("--task", choices=list(PLANS))
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--seconds", type=float, default=1e9, help="begin nothing that would not end by then"
    )
    parser.add_argument("--epochs", type=float)
    parser.add_argument(
        "--together", type=int, help="examples a step, instead of what fits an accelerator"
    )
    parser.add_argument("--lines", type=Path, default=LINES)
    parser.add_argument("--page", action="store_true", help="the section, from the lines")
    parser.add_argument("--quick", action="store_true", help="few examples, few cells")
    chosen = parser.parse_args()
    if chosen.page:
        from papers.batches_page import text
        from papers.page import section

        results = read(chosen.lines)
        epochs = {"an4": SPEECH_EPOCHS, "cifar10": PICTURES_EPOCHS}
        section("large-batches", text(results, epochs, read(PROCESSES)))
    elif chosen.quick:
        quickly(chosen)
    elif chosen.prepare:
        prepare(chosen.prepare, chosen.data)
    else:
        run(chosen)


if __name__ == "__main__":
    main()
