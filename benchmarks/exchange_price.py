"""What an exchange costs beside torch alone: a bare all-reduce, a dozen lines of torch, DDP's step.

Every rank does all of it in turn, block by block, so that ratios are of neighbours in time; CPU is
that of all threads of all ranks. `lines` is an exchange written by hand: copy the parameters into a
vector that stays, copy it, all-reduce the copy, add the mean and subtract the vector. `exchange` is
`localsgd:period=1,delay=0`. `ddp` and `allreduce` are whole steps of one model: forward, backward,
optimizer.

    python benchmarks/exchange_price.py [--quick] [--cuda] [--topology rank|node|both|4x2]
        [--ranks 2,4,8] [--megabytes 1,4,32,128]
"""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import loosestep
from common import (
    Spread,
    here,
    is_rank,
    leave,
    machine,
    options,
    publish,
    ratios,
    run_ranks,
    say,
    settings_of_rank,
    table,
)

Step = Callable[[], None]
WIDTH = 512  # a layer has a megabyte
PAIRS = (("exchange", "lines"), ("exchange", "bare"), ("allreduce", "ddp"))


def make_model(megabytes: int, device: torch.device) -> nn.Module:
    """Layers of a megabyte each, the same on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(megabytes))).to(device)


def bare(model: nn.Module) -> Step:
    """One all-reduce of as many numbers on the host."""
    vector = torch.zeros(sum(p.numel() for p in model.parameters()))
    return lambda: dist.all_reduce(vector)


def lines(model: nn.Module) -> Step:
    """An exchange by hand."""
    params = [p.detach() for p in model.parameters()]
    sizes = [p.numel() for p in params]
    host = {"device": "cpu", "pin_memory": params[0].is_cuda}
    vector, wire = (torch.zeros(sum(sizes), **host) for _ in range(2))
    views = [piece.view_as(p) for piece, p in zip(vector.split(sizes), params, strict=True)]
    sums = [piece.view_as(p) for piece, p in zip(wire.split(sizes), params, strict=True)]
    size = dist.get_world_size()

    def step() -> None:
        torch._foreach_copy_(views, params)
        wire.copy_(vector)
        dist.all_reduce(wire)
        for these, alpha in ((sums, 1 / size), (views, -1.0)):
            near = [piece.to(params[0].device, non_blocking=True) for piece in these]
            torch._foreach_add_(params, near, alpha=alpha)

    return step


def training(model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device) -> Step:
    """A step with little computation."""
    data = torch.randn(8, WIDTH, device=device)

    def step() -> None:
        model(data).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


@contextlib.contextmanager
def prepared(mode: str, megabytes: int, device: torch.device, topology: Any) -> Iterator[Step]:
    """What `mode` repeats."""
    model = make_model(megabytes, device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6, foreach=True)
    if mode in ("bare", "lines"):
        yield {"bare": bare, "lines": lines}[mode](model)
    elif mode == "ddp":
        yield training(DistributedDataParallel(model), optimizer, device)
    else:
        strategy = "localsgd:period=1,delay=0,replica=rank" if mode == "exchange" else "allreduce"
        with loosestep.attach(model, optimizer, strategy, topology=topology):
            yield optimizer.step if mode == "exchange" else training(model, optimizer, device)


def measure(settings: dict[str, Any]) -> None:
    """Blocks of every mode in turn, the first unmeasured."""
    torch.set_num_threads(1)
    device = torch.device("cuda", 0) if settings["cuda"] else torch.device("cpu")
    dist.init_process_group("gloo")
    topology = loosestep.Topology(
        [
            list(range(a, a + settings["mates"]))
            for a in range(0, dist.get_world_size(), settings["mates"])
        ]
    )
    for megabytes in settings["megabytes"]:
        with contextlib.ExitStack() as stack:
            modes = {
                mode: stack.enter_context(prepared(mode, megabytes, device, topology))
                for mode in settings["modes"]
            }
            count = max(2, min(60, settings["budget"] // megabytes))
            for block in range(-1, settings["blocks"]):
                for mode, step in modes.items():
                    seconds, cpu = timed(step, count if block >= 0 else 3)
                    if block >= 0:
                        say(mode=mode, megabytes=megabytes, seconds=seconds, cpu=cpu)
    leave()


def timed(step: Step, count: int) -> tuple[float, float]:
    """Seconds of one of `count` steps, and processor seconds of all ranks."""
    cuda = torch.cuda.is_initialized()
    dist.barrier()
    cpu = time.process_time()
    start = time.perf_counter()
    for _ in range(count):
        step()
    if cuda:
        torch.cuda.synchronize()
    dist.barrier()
    seconds = time.perf_counter() - start
    used = torch.tensor([time.process_time() - cpu], dtype=torch.float64)
    dist.all_reduce(used)
    return seconds / count, float(used) / count


def main() -> None:
    parser = options(__doc__, quick="four ranks, 4 and 32 MB")
    parser.add_argument(
        "--cuda", action="store_true", help="parameters on the GPU, which all ranks share"
    )
    parser.add_argument(
        "--topology",
        choices=("rank", "node", "both", "4x2"),
        default="both",
        help="ranks on nodes of their own or together",
    )
    parser.add_argument("--ranks", default="2,4,8")
    parser.add_argument("--megabytes", default="1,4,32,128")
    parser.add_argument("--modes", default="bare,lines,exchange,ddp,allreduce")
    parser.add_argument("--blocks", type=int, default=5)
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.ranks = "4"
        arguments.megabytes = "4,32"
        arguments.blocks = 3
    where = machine()
    rows = []
    settings = {
        "cuda": arguments.cuda,
        "megabytes": [int(m) for m in arguments.megabytes.split(",")],
        "modes": arguments.modes.split(","),
        "blocks": arguments.blocks,
        "budget": 60 if arguments.quick else 200,
    }
    shapes = {"rank": ["rank"], "node": ["node"], "both": ["rank", "node"], "4x2": ["4x2"]}[
        arguments.topology
    ]
    for shape in shapes:
        for ranks in [8] if shape == "4x2" else [int(n) for n in arguments.ranks.split(",")]:
            mates = {"rank": 1, "node": ranks, "4x2": 2}[shape]
            said = run_ranks(
                __file__, {**settings, "mates": mates}, nodes=1, ranks_per_node=ranks, show=show
            )
            rows += summarise(f"{ranks // mates} x {mates}", said)
    headers = [
        "nodes x ranks, MB",
        *settings["modes"],
        *(f"{a} / {b}" for a, b in PAIRS),
        *(f"CPU {a} / {b}" for a, b in PAIRS),
    ]
    text = (
        f"## What an exchange costs beside torch\n\n{table(headers, rows)}\n\nMilliseconds a step, "
        f"median of {arguments.blocks} blocks; ratios block by block, median (range). {where}."
    )
    publish(here("exchange-price", where), text, quick=arguments.quick)


def show(said: dict[str, Any]) -> str:
    """One block of one mode."""
    seconds = 1e3 * said["seconds"]
    cpu = 1e3 * said["cpu"]
    return f"{said['mode']:10s} {said['megabytes']:4d} MB {seconds:8.2f} ms {cpu:8.1f} ms CPU"


def summarise(shape: str, said: list[dict[str, Any]]) -> list[list[str]]:
    """One row for each size."""
    times: dict[int, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    used: dict[int, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for entry in said:
        times[entry["megabytes"]][entry["mode"]].append(entry["seconds"])
        used[entry["megabytes"]][entry["mode"]].append(entry["cpu"])
    rows = []
    for megabytes, blocks in times.items():
        row = [
            f"{shape}, {megabytes}",
            *(f"{1e3 * Spread(tuple(values)).median:.1f}" for values in blocks.values()),
        ]
        for figures in (blocks, used[megabytes]):
            for one, other in PAIRS:
                both = one in figures and other in figures
                row.append(ratios(figures[one], figures[other]).text(".2f") if both else "")
        rows.append(row)
    return rows


if __name__ == "__main__":
    measure(settings_of_rank()) if is_rank() else main()
