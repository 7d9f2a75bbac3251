"""A learner for gossip tests: trains for some time or steps, prints one JSON line at a time.

    gossiper.py STRATEGY [--seconds S] [--steps N] [--size N] [--compute S] [--slow RANK:FACTOR] [--still] [--deadline S]

Every learner pulls towards its own point; with --still there are no gradients, so the mean must not move at all.
"""

import argparse
import hashlib
import json
import logging
import signal
import threading
import time

import torch
from torch import nn

import loosestep

parser = argparse.ArgumentParser()
parser.add_argument("strategy")
parser.add_argument("--seconds", type=float, default=1e9)
parser.add_argument("--steps", type=int, default=10**9)
parser.add_argument("--size", type=int, default=10_000)
parser.add_argument("--compute", type=float, default=0.01)
parser.add_argument("--slow", default="")
parser.add_argument("--still", action="store_true")
parser.add_argument("--deadline", type=float, default=20.0)
arguments = parser.parse_args()
logging.basicConfig(format="%(levelname)s %(message)s")
stop = threading.Event()
signal.signal(signal.SIGUSR1, lambda *_: stop.set())


def say(**fields):
    print(json.dumps(fields), flush=True)


model = nn.ParameterList([nn.Parameter(torch.zeros(arguments.size, dtype=torch.float64))])
x = model[0]
optimizer = torch.optim.SGD(model.parameters(), lr=0.0 if arguments.still else 0.05)
run = loosestep.attach(model, optimizer, arguments.strategy, deadline=arguments.deadline)
with torch.no_grad():
    if arguments.still:
        x.copy_(torch.randn(arguments.size, generator=torch.Generator().manual_seed(run.rank), dtype=torch.float64))
        run.step()  # the random start is this learner's first update
rank, _, factor = arguments.slow.partition(":")
compute = arguments.compute * (float(factor) if factor and int(rank) == run.rank else 1.0)
begun = last = time.monotonic()
gap = 0.0
steps = 0
announced = False
while not stop.is_set() and steps < arguments.steps and time.monotonic() - begun < arguments.seconds:
    optimizer.zero_grad()
    (x - run.rank).square().sum().div(2).backward()
    time.sleep(compute)
    optimizer.step()
    steps += 1
    now = time.monotonic()
    if announced:
        gap = max(gap, now - last)
    last = now
    if steps >= 10 and not announced:
        announced = True
        address = run._engine._mailbox._courier.transport.address
        say(ready=True, address=address, run_id=run._world.prefix, layout=run._learner.replica.digest())
    if steps % 5 == 0:
        say(at=now, step=steps)
stats = run.stats
mine = x.detach().clone()
say(
    stopping=True,
    steps=steps,
    gap=gap,
    sum=float(mine.sum()),
    lost=stats["lost"],
    exchanges=stats["exchanges"],
    global_steps=stats["global_steps"],
)
run.finish()
x = x.detach()
events = [
    {"kind": e.kind, **{k: v for k, v in e.fields.items() if isinstance(v, int | float | str)}}
    for e in run.trace.events
    if e.kind.startswith(("peer_", "frame_"))
]
say(
    done=True,
    digest=hashlib.sha256(x.numpy().tobytes()).hexdigest()[:16],
    sum=float(x.sum()),
    finite=bool(x.isfinite().all()),
    stats={k: v for k, v in run.stats.items() if isinstance(v, int | float | list | dict)},
    events=events,
    threads=[t.name for t in threading.enumerate() if t.name.startswith("loosestep")],
)
