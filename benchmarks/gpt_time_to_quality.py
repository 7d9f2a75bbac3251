"""A small GPT, four learners, one machine: what a step takes, how often models meet, what is
learned.

    python benchmarks/gpt_time_to_quality.py [--steps 300] [--seeds 2] [--seconds 225] [--lines FILE]
    python benchmarks/gpt_time_to_quality.py --quick        a tiny one on the CPU

Four processes train a character model of about 20 million parameters on the sources of Python's own
library, each on a part of its own, and are judged by the loss on text that nobody has seen, after
as many steps as everybody else. They share a GPU and speak over the loopback. The rows: one learner
alone, torch's DDP over gloo, the strategies, and an oracle: what pairs that average on every step,
one step late, learn when they are four models in one process and nothing is ever late or missing.

The same processes train row after row, so that starting up is paid once; where the time is up, the
rows that are missing are left out and said to be.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from common import Spread, machine, table

LEARNERS = 4
SETTLED = 20  # steps that are not timed
PATIENCE = 60.0  # seconds without a word from a rank that mean the end


@dataclass(frozen=True)
class Shape:
    """A model and what it is fed with."""

    layers: int
    width: int
    heads: int
    context: int
    batch: int
    steps: int
    judged: int  # batches of validation
    text: int  # bytes of the corpus


FULL = Shape(
    layers=6, width=512, heads=8, context=128, batch=16, steps=200, judged=16, text=8 << 20
)
QUICK = Shape(layers=2, width=48, heads=2, context=32, batch=4, steps=24, judged=4, text=1 << 20)

ROWS = {
    "one learner alone": "alone",
    "torch DDP over gloo": "ddp",
    "allreduce": "allreduce",
    "DASO, period 4, delay 1": "daso:period=4,delay=1",
    "DASO, period 4, delay 1, bf16": "daso:period=4,delay=1,codec=bf16",
    "delay-by-one": "delay-by-one:replica=rank",
    "delay-by-one, int8": "delay-by-one:replica=rank,codec=int8",
    "AD-PSGD, as it comes": "adpsgd",
    "AD-PSGD, randomized ring": "adpsgd:graph=random-ring",
    "AD-PSGD, randomized ring, bf16": "adpsgd:graph=random-ring,codec=bf16",
    "oracle: pairs on every step, one late": "oracle",
}


class Block(nn.Module):
    """Attention and two layers behind each other, each on what was normalised before."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.before = nn.LayerNorm(shape.width)
        self.query_key_value = nn.Linear(shape.width, 3 * shape.width)
        self.out = nn.Linear(shape.width, shape.width)
        self.between = nn.LayerNorm(shape.width)
        self.wide = nn.Linear(shape.width, 4 * shape.width)
        self.narrow = nn.Linear(4 * shape.width, shape.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, width = x.shape
        parts = self.query_key_value(self.before(x)).view(rows, length, 3, self.heads, -1)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(rows, length, width))
        return x + self.narrow(F.gelu(self.wide(self.between(x))))


class GPT(nn.Module):
    """Predicts the next character."""

    def __init__(self, shape: Shape, characters: int) -> None:
        super().__init__()
        self.character = nn.Embedding(characters, shape.width)
        self.place = nn.Embedding(shape.context, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.after = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, characters, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.character(x) + self.place.weight[: x.shape[1]]
        for block in self.blocks:
            h = block(h)
        return self.head(self.after(h))


class Corpus:
    """The sources of Python's library, as characters; the last tenth of the files is for
    judging.
    """

    def __init__(self, shape: Shape) -> None:
        files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
        files += sorted(Path(sysconfig.get_paths()["stdlib"]).glob("[a-s]*/*.py"))
        random.Random(0).shuffle(files)
        text = []
        size = 0
        for file in files:
            if size >= shape.text or "site-packages" in file.parts:
                continue
            source = file.read_bytes().decode("ascii", errors="ignore").encode()
            text.append(source)
            size += len(source)
        flat = torch.frombuffer(bytearray(b"".join(text)), dtype=torch.uint8).clamp(max=127)
        self.train = flat[: -size // 10]
        self.judge = flat[-size // 10 :]
        self._shape = shape

    def batches(self, rank: int, seed: int, device: torch.device) -> Iterator[Any]:
        """Random places of this rank's part of the text, for ever."""
        length = len(self.train) // LEARNERS
        mine = self.train[rank * length : (rank + 1) * length].to(device)
        draw = torch.Generator().manual_seed(1000 * seed + rank)
        while True:
            yield self._cut(mine, draw)

    def judged(self, device: torch.device) -> list[Any]:
        """The same batches for everybody."""
        text = self.judge.to(device)
        draw = torch.Generator().manual_seed(0)
        return [self._cut(text, draw, rows=64) for _ in range(self._shape.judged)]

    def _cut(
        self, text: torch.Tensor, draw: torch.Generator, rows: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        length = self._shape.context + 1
        rows = rows or self._shape.batch
        starts = torch.randint(len(text) - length, (rows, 1), generator=draw)
        cut = text[(starts + torch.arange(length)).to(text.device)].long()
        return cut[:, :-1], cut[:, 1:]


class Learner:
    """A model, its optimizer and its data."""

    def __init__(self, corpus: Corpus, shape: Shape, rank: int, seed: int, device: torch.device):
        torch.manual_seed(seed)  # the same start everywhere
        self.model: nn.Module = GPT(shape, 128).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, weight_decay=0.1)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: min(1.0, (step + 1) / SETTLED)
        )
        self._batches = corpus.batches(rank, seed, device)

    def step(self) -> torch.Tensor:
        x, y = next(self._batches)
        loss = F.cross_entropy(self.model(x).flatten(0, 1), y.flatten())
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.schedule.step()
        return loss.detach()


@torch.no_grad()
def judge(model: nn.Module, batches: list[Any]) -> float:
    losses = [F.cross_entropy(model(x).flatten(0, 1), y.flatten()) for x, y in batches]
    return float(torch.stack(losses).mean())


def wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def timed(step: Callable[[], Any], steps: int, device: torch.device) -> float:
    """Make all steps; milliseconds for one of those that are timed."""
    settled = min(SETTLED, steps // 3)
    for _ in range(settled):
        step()
    wait_for(device)
    begun = time.perf_counter()
    for _ in range(steps - settled):
        step()
    wait_for(device)
    return 1e3 * (time.perf_counter() - begun) / (steps - settled)


def oracle(corpus: Corpus, shape: Shape, seed: int, device: torch.device) -> dict[str, Any]:
    """x_i <- x_i + u_i + (s_j - s_i) / 2 with the parameters s of the step before, for pairs drawn
    on every step; the mean of the learners at the end."""
    learners = [Learner(corpus, shape, rank, seed, device) for rank in range(LEARNERS)]
    draw = random.Random(seed)
    late = [None] * LEARNERS

    def step() -> None:
        for learner in learners:
            learner.step()
        with torch.no_grad():
            params = [list(learner.model.parameters()) for learner in learners]
            now = list(late)
            order = draw.sample(range(LEARNERS), LEARNERS)
            deltas: list[Any] = [None] * LEARNERS
            for i, j in zip(order[::2], order[1::2], strict=True):
                apart = torch._foreach_sub(params[j], params[i])
                torch._foreach_mul_(apart, 0.5)
                deltas[i] = apart
                deltas[j] = torch._foreach_neg(apart)
            for rank, delta in enumerate(now):
                if delta is not None:
                    torch._foreach_add_(params[rank], delta)
            late[:] = deltas

    milliseconds = timed(step, shape.steps, device)
    with torch.no_grad():
        first, *others = [list(learner.model.parameters()) for learner in learners]
        for other in others:
            torch._foreach_add_(first, other)
        torch._foreach_div_(first, LEARNERS)
    loss = judge(learners[0].model, corpus.judged(device))
    return {"loss": loss, "ms": milliseconds, "exchanges": 1.0, "mbps": 0.0}


def train(
    row: str, corpus: Corpus, shape: Shape, seed: int, device: torch.device
) -> dict[str, Any]:
    """One row on one rank: loss, milliseconds a step, models exchanged a step, MB/s sent."""
    import loosestep
    from loosestep import Topology

    rank = int(os.environ["RANK"])
    learner = Learner(corpus, shape, rank, seed, device)
    told: dict[str, Any] = {"exchanges": 0.0, "mbps": 0.0}
    if row == "alone":
        told["ms"] = timed(learner.step, shape.steps, device)
    elif row == "ddp":
        dist.init_process_group("gloo")
        learner.model = nn.parallel.DistributedDataParallel(learner.model)
        told |= {"ms": timed(learner.step, shape.steps, device), "exchanges": 1.0}
        learner.model = learner.model.module
        dist.barrier()
        dist.destroy_process_group()
    else:
        apart = Topology([[each] for each in range(LEARNERS)])
        run = loosestep.attach(learner.model, learner.optimizer, row, topology=apart)
        with run:
            begun = time.perf_counter()
            told["ms"] = timed(learner.step, shape.steps, device)
            seconds = time.perf_counter() - begun
            stats = run.stats
        averages_gradients = row == "allreduce"
        told["exchanges"] = 1.0 if averages_gradients else stats["exchanges"] / shape.steps
        told["mbps"] = stats["bytes_sent"] / 1e6 / seconds
        for name in ("staleness_mean", "queue_full", "repeated", "slower"):
            told[name] = stats.get(name)
    told["loss"] = judge(learner.model, corpus.judged(device))
    return told


def work(arguments: argparse.Namespace) -> None:
    """A rank: rows as they come on the input, results on the output."""
    shape = QUICK if arguments.quick else FULL
    shape = Shape(**{**vars(shape), "steps": arguments.steps or shape.steps})
    device = torch.device("cpu" if arguments.quick or not torch.cuda.is_available() else "cuda")
    torch.set_num_threads(1 if arguments.quick else max(1, (os.cpu_count() or 4) // LEARNERS))
    torch.set_float32_matmul_precision("high")
    corpus = Corpus(shape)
    for line in sys.stdin:
        order = json.loads(line)
        os.environ["MASTER_PORT"] = str(order["port"])
        try:
            if order["row"] == "oracle":
                result = oracle(corpus, shape, order["seed"], device) if arguments.rank == 0 else {}
            else:
                result = train(order["row"], corpus, shape, order["seed"], device)
        except Exception as error:  # noqa: BLE001  the row is said to have failed; others follow
            result = {"error": f"{type(error).__name__}: {error}"}
        print("@" + json.dumps(result), flush=True)


class Ranks:
    """The processes of all learners."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        flags = ["--quick"] if arguments.quick else []
        flags += ["--steps", str(arguments.steps)] if arguments.steps else []
        self._processes = [self._start(rank, flags) for rank in range(LEARNERS)]

    def _start(self, rank: int, flags: list[str]) -> subprocess.Popen[str]:
        about = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": LEARNERS}
        about |= {"LOCAL_WORLD_SIZE": LEARNERS, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 0}
        environment = {**os.environ, **{name: str(value) for name, value in about.items()}}
        return subprocess.Popen(
            [sys.executable, __file__, "--rank", str(rank), *flags],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def run(self, row: str, seed: int) -> list[dict[str, Any]]:
        """Train one row; what each rank tells of it."""
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        order = json.dumps({"row": row, "seed": seed, "port": port})
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(order + "\n")
            process.stdin.flush()
        return [self._hear(process) for process in self._processes]

    def _hear(self, process: subprocess.Popen[str]) -> dict[str, Any]:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("@"):
                return dict(json.loads(line[1:]))
        raise RuntimeError(f"a rank has ended with {process.wait()}")

    def close(self) -> None:
        """End all of them."""
        for process in self._processes:
            process.kill()
            process.wait()


def combine(told: list[dict[str, Any]]) -> dict[str, Any]:
    """One row from what its ranks tell: means, the error of the first that failed."""
    failed = [each["error"] for each in told if "error" in each]
    if failed:
        return {"error": failed[0]}
    told = [each for each in told if each]
    return {
        name: statistics.fmean(each[name] for each in told)
        for name in told[0]
        if all(each[name] is not None for each in told)
    }


def report(results: dict[str, list[dict[str, Any]]]) -> str:
    """Markdown."""
    rows = []
    reference = results.get("one learner alone", [])
    for name, rounds in results.items():
        good = [each for each in rounds if "error" not in each]
        if not good:
            rows.append([name, (rounds[0]["error"] if rounds else "not made")[:60], "", "", "", ""])
            continue

        def spread(field: str, good: list[dict[str, Any]] = good) -> Spread:
            return Spread(tuple(each.get(field, float("nan")) for each in good))

        alone = reference[0].get("ms", float("nan")) if reference else float("nan")
        speed = alone / spread("ms").median
        oracle_row = ROWS[name] == "oracle"  # four models in one process: its speed is no speed
        rows.append(
            [
                name,
                "" if oracle_row else spread("ms").text(".1f"),
                "" if oracle_row else f"{speed:.0%}",
                spread("exchanges").text(".3f"),
                "" if oracle_row else spread("mbps").text(".0f"),
                spread("loss").text(".3f"),
            ]
        )
    headers = ["", "ms a step", "speed alone", "exchanges a step", "MB/s", "validation loss"]
    return table(headers, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a tiny model on the CPU")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=225.0, help="begin no row after these")
    parser.add_argument("--lines", type=Path, help="append every result here, as JSON")
    parser.add_argument("--rows", help="only these, by their strategy, separated by spaces")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank is not None:
        work(arguments)
        return
    begun = time.monotonic()
    wanted = arguments.rows.split() if arguments.rows else list(ROWS.values())
    results: dict[str, list[dict[str, Any]]] = {
        name: [] for name, row in ROWS.items() if row in wanted
    }
    ranks = Ranks(arguments)
    try:
        for seed in range(1 if arguments.quick else arguments.seeds):
            for name in results:
                if time.monotonic() - begun > arguments.seconds:
                    break
                result = combine(ranks.run(ROWS[name], seed))
                results[name].append(result)
                line = json.dumps({"row": name, "seed": seed, **result})
                print(line, flush=True)
                if arguments.lines:
                    with arguments.lines.open("a") as out:
                        out.write(line + "\n")
    finally:
        ranks.close()
    model = GPT(QUICK if arguments.quick else FULL, 128)
    size = sum(param.numel() for param in model.parameters()) / 1e6
    print(f"\n{machine()}; {size:.1f} M parameters, {LEARNERS} learners\n\n{report(results)}")


if __name__ == "__main__":
    main()
