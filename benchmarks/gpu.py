"""What loosestep costs on a GPU: staging, folds, ranks that share the device, synchronisation,
memory.

    python benchmarks/gpu.py [--quick] [--out FOLDER] [--only alone|compiled|shared]

*Alone*: one process that exchanges with itself: every snapshot, copy to the host, average there,
copy back and fold is made, nothing travels. Blocks of every variant in turn. *Compiled*: the same
with the model through torch.compile. *Shared*: four ranks on one GPU, over gloo and the loopback,
against the same four ranks without communication. Writes the section of GPU.md.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import loosestep
from common import (
    Spread,
    is_rank,
    machine,
    options,
    ratios,
    run_ranks,
    say,
    settings_of_rank,
    table,
    write_section,
)
from loosestep import Topology
from loosestep.recipes.vision.resnet import resnet

RESULTS = Path(__file__).with_name("GPU.md")
FREE = "no communication"
# so large that the device sets the pace, not the host that starts its kernels
BATCHES = {
    "ResNet-50": 128,
    "6-layer BLSTM": 512,
}
ALONE = (
    FREE,
    "daso:period=4,delay=1",
    "daso:period=4,delay=3",
    "adpsgd:graph=random-ring",
    "adpsgd:replica=node",
)
COMPILED = (FREE, "localsgd:period=1000000", "daso:period=4,delay=3")
SHARED: dict[str, tuple[str, list[list[int]]]] = {
    FREE: ("", []),
    "DASO, 4 nodes of 1 rank": ("daso:period=8,delay=6", [[0], [1], [2], [3]]),
    "DASO, 2 nodes of 2 ranks": ("daso:period=8,delay=6", [[0, 1], [2, 3]]),
    "AD-PSGD, randomized ring": ("adpsgd:graph=random-ring", [[0], [1], [2], [3]]),
}
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


# Models -------------------------------------------------------------------------------------------


class BLSTM(nn.Module):
    """Six bidirectional layers of 512 cells each way, a bottleneck of 256, 32,000 classes: an
    acoustic model.
    """

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(260, width, num_layers=6, bidirectional=True)
        self.out = nn.Sequential(nn.Linear(2 * width, 256), nn.Linear(256, classes))

    def forward(self, frames: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.out(self.lstm(frames)[0]).flatten(0, 1)
        return scores


Problem = tuple[nn.Module, torch.Tensor, torch.Tensor]


def image_model(batch: int, small: bool) -> Problem:
    """ResNet-50 with BatchNorm on 224x224 images, channels last."""
    side = 32 if small else 224
    model = resnet(
        "resnet50",
        channels=3,
        classes=1000,
        width=0.125 if small else 1.0,
        norm="batch",
        large_images=True,
    )
    x = torch.randn(batch, 3, side, side, device=DEVICE).to(memory_format=torch.channels_last)
    return (
        model.to(DEVICE, memory_format=torch.channels_last),
        x,
        torch.randint(1000, (batch,), device=DEVICE),
    )


def speech_model(batch: int, small: bool) -> Problem:
    """The 6-layer BLSTM on sequences of 84 frames."""
    frames, width, classes = (5, 8, 30) if small else (84, 512, 32_000)
    x = torch.randn(frames, batch, 260, device=DEVICE)
    return (
        BLSTM(width, classes).to(DEVICE),
        x,
        torch.randint(classes, (frames * batch,), device=DEVICE),
    )


MODELS: dict[str, Callable[[int, bool], Problem]] = {
    "ResNet-50": image_model,
    "6-layer BLSTM": speech_model,
}


def step(problem: Problem, optimizer: torch.optim.Optimizer, run: Any) -> None:
    """One step of an ordinary loop; images in bfloat16 where autocast says so, speech in
    float32.
    """
    model, x, y = problem
    halves = DEVICE.type == "cuda" and not isinstance(model, BLSTM)
    with torch.autocast("cuda", torch.bfloat16) if halves else nullcontext():
        loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if run is not None:
        run.observe(loss)


def synchronise() -> None:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def build(name: str, batch: int, small: bool) -> tuple[Problem, torch.optim.Optimizer, int]:
    """The problem, SGD with momentum for it, the bytes of its parameters."""
    torch.manual_seed(0)
    problem = MODELS[name](batch, small)
    parameters = list(problem[0].parameters())
    optimizer = torch.optim.SGD(parameters, lr=1e-4, momentum=0.9)
    for _ in range(2):  # the momentum and cuDNN's workspaces exist before anything is compared
        step(problem, optimizer, None)
    return problem, optimizer, sum(p.numel() * p.element_size() for p in parameters)


# Alone --------------------------------------------------------------------------------------------


def alone(settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Blocks of every variant in turn; then synchronisation and memory; then the price of the
    hooks.
    """
    said: list[dict[str, Any]] = []
    for name, batch in settings["alone"].items():
        problem, optimizer, size = build(name, batch, settings["small"])
        for round_ in range(settings["rounds"]):
            for variant in ALONE:
                seconds, extra = block(problem, optimizer, variant, settings)
                said.append(
                    {
                        "part": "alone",
                        "model": name,
                        "bytes": size,
                        "batch": batch,
                        "round": round_,
                        "variant": variant,
                        "seconds": seconds,
                        **extra,
                    }
                )
                print(
                    f"  {name:14} {variant:28} {1e3 * seconds:8.2f} ms a step {extra}", flush=True
                )
        for variant in ALONE:
            calls, memory = watch(problem, optimizer, variant)
            said.append(
                {
                    "part": "watch",
                    "model": name,
                    "variant": variant,
                    "bytes": size,
                    "calls": calls,
                    "memory": memory,
                }
            )
            print(f"  {name:14} {variant:28} waits {calls}, memory {memory}", flush=True)
        del problem, optimizer
    return said + overhead(settings)


def block(
    problem: Problem, optimizer: torch.optim.Optimizer, variant: str, settings: dict[str, Any]
) -> tuple[float, dict[str, float]]:
    """Seconds a step; how long exchanges took and how much of the time was spent waiting for
    them.
    """
    run = None if variant == FREE else loosestep.attach(problem[0], optimizer, variant)
    with run or nullcontext():
        for _ in range(settings["warmup"]):
            step(problem, optimizer, run)
        synchronise()
        before = dict(run.stats) if run else {}
        start = time.perf_counter()
        for _ in range(settings["steps"]):
            step(problem, optimizer, run)
        synchronise()
        seconds = time.perf_counter() - start
        if run is None:
            return seconds / settings["steps"], {}
        grown = {
            key: run.stats[key] - before[key]
            for key in ("wait_seconds", "exchange_seconds", "folds", "exchanges")
        }
    return seconds / settings["steps"], {
        "waiting": round(grown["wait_seconds"] / seconds, 4),
        "exchange_ms": round(1e3 * grown["exchange_seconds"] / max(grown["exchanges"], 1), 1),
        "exchanges": grown["exchanges"],
    }


def watch(
    problem: Problem, optimizer: torch.optim.Optimizer, variant: str
) -> tuple[dict[str, int], float]:
    """Calls of this thread that wait for the device in 8 steps, and device memory that is ours,
    in bytes.
    """
    before = torch.cuda.memory_allocated() if DEVICE.type == "cuda" else 0
    run = None if variant == FREE else loosestep.attach(problem[0], optimizer, variant)
    with run or nullcontext():
        for _ in range(8):
            step(problem, optimizer, run)
        synchronise()
        memory = (torch.cuda.memory_allocated() if DEVICE.type == "cuda" else 0) - before
        activities = [torch.profiler.ProfilerActivity.CPU]
        if DEVICE.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        record = torch.profiler.record_function("the compute thread")
        with torch.profiler.profile(activities=activities) as profiler, record:
            for _ in range(8):
                step(problem, optimizer, run)
        with tempfile.TemporaryDirectory() as folder:
            profiler.export_chrome_trace(f"{folder}/trace.json")
            events = json.loads(Path(f"{folder}/trace.json").read_text())["traceEvents"]
    own = next(e for e in events if e.get("name") == "the compute thread" and "tid" in e)
    inside = [
        e
        for e in events
        if e.get("name") in WAITS and own["ts"] <= e["ts"] <= own["ts"] + own["dur"]
    ]
    calls = Counter(
        e["name"] + ("" if e["tid"] == own["tid"] else ", other threads") for e in inside
    )
    return dict(calls), memory


def overhead(settings: dict[str, Any]) -> list[dict[str, Any]]:
    """What hooks and observe cost on a model that takes no time: host microseconds a step."""
    said = []
    for _ in range(settings["rounds"]):
        for variant in (
            FREE,
            "localsgd:period=1000000",
            "daso:period=4,delay=1",
            "adpsgd:graph=random-ring",
        ):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)).to(DEVICE)
            problem = (
                model,
                torch.randn(16, 64, device=DEVICE),
                torch.arange(16, device=DEVICE) % 10,
            )
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
            seconds, _ = block(
                problem,
                optimizer,
                variant,
                {**settings, "warmup": 30, "steps": settings["tiny_steps"]},
            )
            said.append({"part": "overhead", "variant": variant, "seconds": seconds})
            print(
                f"  tiny model     {variant:28} {1e6 * seconds:8.1f} microseconds a step",
                flush=True,
            )
    return said


def compiled(settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Blocks of every variant in turn with a compiled ResNet-50: attached without an exchange,
    and with DASO.
    """
    said = []
    (model, x, y), optimizer, size = build(
        "ResNet-50", settings["alone"]["ResNet-50"], settings["small"]
    )
    problem: Problem = torch.compile(model), x, y
    for round_ in range(-1, settings["rounds"]):
        for variant in COMPILED:
            seconds, extra = block(
                problem, optimizer, variant, {**settings, "steps": 4 * settings["steps"]}
            )
            print(
                f"  compiled       {variant:28} {1e3 * seconds:8.2f} ms a step {extra}", flush=True
            )
            if round_ >= 0:  # the first round compiles
                said.append(
                    {
                        "part": "compiled",
                        "bytes": size,
                        "round": round_,
                        "variant": variant,
                        "seconds": seconds,
                    }
                )
    return said


# Shared -------------------------------------------------------------------------------------------


def share() -> None:
    """On every rank: blocks of every variant in turn."""
    settings = settings_of_rank()
    dist.init_process_group("gloo")
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // dist.get_world_size()))
    for name, batch in settings["shared"].items():
        problem, optimizer, size = build(name, batch, settings["small"])
        for round_ in range(settings["shared_rounds"]):
            for title in SHARED:
                speed, extra = shared_block(problem, optimizer, title, settings)
                everybody = [None] * dist.get_world_size()
                dist.all_gather_object(everybody, (speed, extra))
                total = sum(s for s, _ in everybody)  # type: ignore[misc]
                say(
                    part="shared",
                    model=name,
                    batch=batch,
                    bytes=size,
                    round=round_,
                    variant=title,
                    speed=total,
                    extra=extra,
                )
    dist.destroy_process_group()


def shared_block(
    problem: Problem, optimizer: torch.optim.Optimizer, title: str, settings: dict[str, Any]
) -> tuple[float, dict[str, Any]]:
    """Steps a second of this rank while all four are at work; all start together and time the
    same number of steps.
    """
    spec, nodes = SHARED[title]
    run = loosestep.attach(problem[0], optimizer, spec, topology=Topology(nodes)) if spec else None
    with run or nullcontext():
        for _ in range(settings["warmup"]):
            step(problem, optimizer, run)
        synchronise()
        dist.barrier()
        before = dict(run.stats) if run else {}
        start = time.perf_counter()
        for _ in range(settings["shared_steps"]):
            step(problem, optimizer, run)
        synchronise()
        seconds = time.perf_counter() - start
        after = dict(run.stats) if run else {}
        dist.barrier()
    keys = ("exchanges", "folds", "wait_seconds", "exchange_seconds", "bytes_sent")
    grown = {key: round(after[key] - before[key], 3) for key in keys} if run else {}
    return settings["shared_steps"] / seconds, grown | {
        "staleness": after.get("staleness_mean"),
        "seconds": round(seconds, 2),
    }


# The section --------------------------------------------------------------------------------------


def section(said: list[dict[str, Any]], settings: dict[str, Any], where: str) -> str:
    """Every part in one section."""
    parts = ["## One GPU\n"]
    if any(s["part"] == "alone" for s in said):
        parts += alone_text(said, settings) + overhead_text(said)
    if any(s["part"] == "compiled" for s in said):
        parts += compiled_text(said, settings)
    if any(s["part"] == "shared" for s in said):
        parts += shared_text(said, settings)
    return "\n".join([*parts, f"{where}."])


def named(variant: str) -> str:
    return variant if " " in variant else f"`{variant}`"


def alone_text(said: list[dict[str, Any]], settings: dict[str, Any]) -> list[str]:
    """Step times, then what was watched."""
    rows = []
    watched = []
    for model in settings["alone"]:
        mine = [s for s in said if s["part"] == "alone" and s["model"] == model]
        free = [s["seconds"] for s in mine if s["variant"] == FREE]
        for variant in ALONE:
            blocks = [s for s in mine if s["variant"] == variant]
            ratio = ratios([s["seconds"] for s in blocks], free)
            milliseconds = Spread(tuple(1e3 * s["seconds"] for s in blocks))
            added = (
                ""
                if variant == FREE
                else Spread(tuple(100 * (r - 1) for r in ratio.values)).text("+.2f")
            )
            exchange = (
                f"{Spread(tuple(s['exchange_ms'] for s in blocks)).median:.0f}"
                if variant.startswith("daso")
                else ""
            )
            waiting = (
                ""
                if variant == FREE
                else f"{Spread(tuple(s['waiting'] for s in blocks)).median:.1%}"
            )
            rows.append(
                [f"{model}: {named(variant)}", milliseconds.text(), added, exchange, waiting]
            )
            look = next(
                s
                for s in said
                if s["part"] == "watch" and (s["model"], s["variant"]) == (model, variant)
            )
            own = sum(n for call, n in look["calls"].items() if "other" not in call)
            other = ", ".join(
                f"{n} {call.partition(',')[0]}"
                for call, n in look["calls"].items()
                if "other" in call
            )
            copies = "" if variant == FREE else f"{look['memory'] / look['bytes']:.2f}"
            watched.append([f"{model}: {named(variant)}", str(own), other or "none", copies])
    sizes = ", ".join(
        f"{model} {next(s['bytes'] for s in said if s.get('model') == model) / 1e6:.0f} MB of "
        f"parameters, batch {batch}"
        for model, batch in settings["alone"].items()
    )
    return [
        "**Staging and folds**: one process that exchanges with itself every 4 steps (DASO) or "
        "sends its parameters to its shadow as often as it can (AD-PSGD).\n",
        table(["", "ms a step", "added, %", "ms an exchange takes", "waiting"], rows),
        "",
        f"Median and range (least-most) of {settings['rounds']} interleaved rounds of "
        f"{settings['steps']} steps after {settings['warmup']}; {sizes}; bfloat16 autocast "
        "(BLSTM: float32), SGD with momentum, observed losses. An exchange is the averaging on "
        "the host (here with nobody), not the copies. Waiting: share of the time in which a fold "
        "was due and had not landed.\n",
        "**Synchronisation and memory** in 8 steps, from the profiler: calls that make a thread "
        "wait for the device (stream, device and event synchronisation, blocking copies).\n",
        table(["", "compute thread", "other threads", "copies on the device"], watched),
        "",
    ]


def overhead_text(said: list[dict[str, Any]]) -> list[str]:
    """Microseconds a step."""
    mine = [s for s in said if s["part"] == "overhead"]
    free = [s["seconds"] for s in mine if s["variant"] == FREE]
    rows = []
    for variant in dict.fromkeys(s["variant"] for s in mine):
        seconds = [s["seconds"] for s in mine if s["variant"] == variant]
        added = Spread(tuple(1e6 * (s - f) for s, f in zip(seconds, free, strict=True)))
        rows.append(
            [
                named(variant),
                Spread(tuple(1e6 * s for s in seconds)).text(".0f"),
                "" if variant == FREE else added.text(".0f"),
            ]
        )
    return [
        "**What attaching costs a step** of a model of 4,810 parameters, with `observe`:\n",
        table(["", "microseconds a step", "added"], rows),
        "",
    ]


def compiled_text(said: list[dict[str, Any]], settings: dict[str, Any]) -> list[str]:
    """Step times of the compiled model."""
    seconds = {
        v: [s["seconds"] for s in said if s["part"] == "compiled" and s["variant"] == v]
        for v in COMPILED
    }
    rows = [
        [
            named(variant),
            Spread(tuple(1e3 * s for s in seconds[variant])).text(),
            ""
            if variant == FREE
            else Spread(
                tuple(100 * (r - 1) for r in ratios(seconds[variant], seconds[FREE]).values)
            ).text("+.2f"),
        ]
        for variant in COMPILED
    ]
    return [
        f"**torch.compile**: ResNet-50 compiled, batch {settings['alone']['ResNet-50']}, "
        "otherwise as above; the first variant attached never exchanges.\n",
        table(["", "ms a step", "added, %"], rows),
        "",
    ]


def shared_text(said: list[dict[str, Any]], settings: dict[str, Any]) -> list[str]:
    """Throughput of four ranks."""
    rows = []
    for model, batch in settings["shared"].items():
        speeds = {
            v: [
                s["speed"]
                for s in said
                if s["part"] == "shared" and (s["model"], s["variant"]) == (model, v)
            ]
            for v in SHARED
        }
        for title, (spec, _) in SHARED.items():
            share_of = "" if title == FREE else ratios(speeds[title], speeds[FREE]).text(".3f")
            name = f"{model}, batch {batch}: {title}" + (f" (`{spec}`)" if spec else "")
            sent = [
                s["extra"].get("bytes_sent", 0) / 1e6
                for s in said
                if s["part"] == "shared" and s["variant"] == title
            ]
            traffic = (
                ""
                if title == FREE
                else f"{Spread(tuple(sent)).median / settings['shared_steps']:.0f}"
            )
            rows.append([name, Spread(tuple(speeds[title])).text(), share_of, traffic])
    return [
        "**Four ranks share the GPU**, over gloo and the loopback (with two ranks a node, "
        "gradients inside it through shared memory):\n",
        table(["", "gradients/s", "of no communication", "MB a step that rank 0 sends"], rows),
        "",
        f"Median and range (least-most) of {settings['shared_rounds']} interleaved rounds of "
        f"{settings['shared_steps']} steps after {settings['warmup']}, ratios within a round. "
        "Start-up, attach and finish not counted. Threads of OpenMP that have nothing to do "
        "sleep (`OMP_WAIT_POLICY=passive`) instead of spinning on the cores that other ranks "
        "communicate with.\n",
    ]


def main() -> None:
    """Parse, run, publish."""
    parser = options(__doc__, quick="fewer steps and rounds")
    parser.add_argument("--only", choices=["alone", "compiled", "shared"])
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--model", choices=list(MODELS), help="one of the models only")
    parser.add_argument(
        "--out",
        type=Path,
        help="a folder for the raw figures (said.json) and the section (section.md)",
    )
    parser.add_argument(
        "--small", action="store_true", help="tiny models, to try the script without a GPU"
    )
    chosen = parser.parse_args()
    models = [name for name in MODELS if chosen.model in (None, name)]
    settings: dict[str, Any] = {
        "small": chosen.small,
        "rounds": chosen.rounds or (2 if chosen.quick else 10),
        "shared_rounds": chosen.rounds or (1 if chosen.quick else 3),
        "warmup": 8,
        "steps": 12 if chosen.quick else 24,
        "tiny_steps": 100 if chosen.quick else 500,
        "shared_steps": 12 if chosen.quick else 24,
        "alone": {model: 8 if chosen.small else BATCHES[model] for model in models},
        "shared": {"ResNet-50": 8 if chosen.small else 192},
    }
    # four ranks: idle threads must not spin on each other's cores
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    where = machine()
    print(where, flush=True)
    said: list[dict[str, Any]] = []
    if chosen.only in (None, "alone"):
        said += alone(settings)
    if chosen.only in (None, "compiled"):
        said += compiled(settings)
    if chosen.only in (None, "shared"):
        said += run_ranks(
            __file__,
            settings,
            nodes=4,
            ranks_per_node=1,
            show=lambda s: (
                f"{s['model']:14} {s['variant']:28} {s['speed']:7.2f} gradients/s {s['extra']}"
            ),
        )
    text = section(said, settings, where)
    print(f"\n{text}")
    if chosen.out is not None:
        (chosen.out / "said.json").write_text(
            json.dumps({"settings": settings, "where": where, "said": said})
        )
        (chosen.out / "section.md").write_text(text)
    if not chosen.quick and not chosen.small and chosen.only is None:
        write_section("gpu", text, path=RESULTS)


if __name__ == "__main__":
    if is_rank():
        share()
    else:
        main()
