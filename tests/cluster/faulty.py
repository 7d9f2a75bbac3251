"""A training script for fault tests: trains until told to stop, says what happens, one JSON line at
a time.

faulty.py STRATEGY --deadline 4 [--fail RANK:STEP] [--steps N] [--size N] [--sleep S] [--near]
"""

import argparse
import hashlib
import json
import os
import threading
import time
from contextlib import nullcontext

import torch
from stand_in import near
from torch import nn

import loosestep

parser = argparse.ArgumentParser()
parser.add_argument("strategy")
parser.add_argument("--deadline", type=float, default=4.0)
parser.add_argument("--fail")
parser.add_argument("--steps", type=int, default=100000)
parser.add_argument("--size", type=int, default=1000)
parser.add_argument("--sleep", type=float, default=0.01)
parser.add_argument("--near", action="store_true", help="gradients and lanes stay on the device")
arguments = parser.parse_args()


def say(**fields):
    print(json.dumps(fields), flush=True)


def digest(tensor):
    return hashlib.sha256(tensor.detach().numpy().tobytes()).hexdigest()[:16]


model = nn.ParameterList([nn.Parameter(torch.zeros(arguments.size))])
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
before = model[0].detach().clone()
try:
    stand_in = (
        near(int(os.environ["RANK"]), LOOSESTEP_LANES="nccl") if arguments.near else nullcontext()
    )
    with (
        stand_in,
        loosestep.attach(model, optimizer, arguments.strategy, deadline=arguments.deadline) as run,
    ):
        fail = arguments.fail.split(":") if arguments.fail else None
        for step in range(arguments.steps):
            optimizer.zero_grad()
            (model[0] * (run.rank + step % 3)).sum().backward()
            if fail and run.rank == int(fail[0]) and step == int(fail[1]):
                raise ValueError("the loop went wrong")
            time.sleep(arguments.sleep)
            # what the local step alone makes of it
            before = model[0].detach().clone() - 0.01 * model[0].grad
            optimizer.step()
            if step == 10:
                say(ready=True)
except (RuntimeError, ValueError) as error:
    kept = torch.equal(model[0].detach(), before) or bool(torch.isfinite(model[0]).all())
    exact = torch.allclose(model[0].detach(), before)
    say(
        error=type(error).__name__,
        message=str(error),
        rank=getattr(error, "rank", None),
        kept=kept,
        exact=exact,
        at=time.monotonic(),
        saved=run.state_dict()["steps"],
    )
else:
    say(done=True, digest=digest(model[0]))
alive = [thread.name for thread in threading.enumerate() if thread.name.startswith("loosestep")]
say(threads=alive)
