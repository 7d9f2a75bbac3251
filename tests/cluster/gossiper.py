"""A learner for gossip tests: trains until SIGUSR1, or for some time or steps; prints one JSON line
at a time.

    gossiper.py STRATEGY [--seconds S] [--steps N] [--size N] [--compute S] [--slow RANK:FACTOR] [--still] [--deadline S]
                [--folder F] [--die RANK:VALUES] [--hesitate RANK:SECONDS]

Every learner pulls towards its own point; with --still there are no gradients, so the mean must not
move at all. SIGUSR2: send rank 0 what a faulty rank of the same run might, and print a true frame
for others to send again.
"""

import argparse
import hashlib
import json
import logging
import os
import signal
import sys
import threading
import time
import warnings
from pathlib import Path

import ledger
import numpy as np
import torch
from torch import nn

import loosestep
from loosestep.core.messages.frames import HEADER_BYTES, KIND, FrameKind, Header
from loosestep.core.messages.sockets import Letter

parser = argparse.ArgumentParser()
parser.add_argument("strategy")
parser.add_argument("--seconds", type=float, default=1e9)
parser.add_argument("--steps", type=int, default=10**9)
parser.add_argument("--size", type=int, default=10_000)
parser.add_argument("--compute", type=float, default=0.01)
parser.add_argument("--slow", default="", help="this rank computes so many times longer")
parser.add_argument("--still", action="store_true")
parser.add_argument("--deadline", type=float, default=20.0)
parser.add_argument(
    "--folder",
    type=Path,
    help="rank 0 leaves the final vector here, and the dying what a ledger needs",
)
parser.add_argument("--die", default="", help="kill -9 right before so many values were sent")
parser.add_argument(
    "--hesitate", default="", help="this rank's communication thread sleeps so long before it looks"
)
arguments = parser.parse_args()
logging.basicConfig(format="%(levelname)s %(message)s")
# steps of some milliseconds on a busy machine
warnings.filterwarnings("ignore", message=".*trains nearly alone")
stop = threading.Event()
speaking = threading.Lock()
signal.signal(signal.SIGUSR1, lambda *_: stop.set())


def say(**fields):
    with speaking:
        sys.stdout.write(json.dumps(fields) + "\n")
        sys.stdout.flush()


def told(event):
    """What happened to peers and frames, as JSON holds it."""
    return {"event": event.kind, **event.fields, "when": event.time}


def concerns_others(event):
    return event.kind.startswith(("peer_", "frame_"))


def mine(option, default):
    """The value of RANK:VALUE on that rank."""
    rank, _, value = option.partition(":")
    return float(value) if value and int(rank) == run.rank else default


def die_while_sending(values):
    """kill -9 in the middle of a transfer, once this rank has written down what it leaves."""
    left = [values]

    def lose(header):
        if header.kind in (FrameKind.REQUEST, FrameKind.REPLY):
            left[0] -= 1
            if left[0] == 0:
                ledger.write_will(arguments.folder, courier)
                os.kill(os.getpid(), signal.SIGKILL)
        return False

    courier._lose = lose


def hesitate(seconds):
    wait = courier.transport.wait

    def late(timeout):
        time.sleep(seconds)
        return wait(timeout)

    courier.transport.wait = late


def misbehave(*_):
    """Frames with the right key that do not fit the model; and the next true request, printed."""
    send = courier.transport.send

    def watch(peer, letter):
        if peer == 0 and letter.frame[KIND] == FrameKind.REQUEST:
            courier.transport.send = send
            say(request=bytes(letter.frame).hex())
        return send(peer, letter)

    def act():
        courier.transport.send = watch
        for dtype, numbers in ((2, 17), (1, 500)):
            frame = bytearray(HEADER_BYTES) + np.full(numbers, 1e6).tobytes()
            courier.wire.seal(
                Header(FrameKind.REQUEST, run.rank, 0, tag=1, una=1, weight=0.5, dtype=dtype), frame
            )
            send(0, Letter(frame))

    run._engine._mailbox._do(act)


model = nn.ParameterList([nn.Parameter(torch.zeros(arguments.size, dtype=torch.float64))])
x = model[0]
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
run = loosestep.attach(model, optimizer, arguments.strategy, deadline=arguments.deadline)
run.trace.sink = lambda event: say(**told(event)) if concerns_others(event) else None
courier = run._engine._mailbox._courier
signal.signal(signal.SIGUSR2, misbehave)
if arguments.still:
    with torch.no_grad():
        x.copy_(
            torch.randn(
                arguments.size,
                generator=torch.Generator().manual_seed(run.rank),
                dtype=torch.float64,
            )
        )
    run.step()  # the random start is this learner's first update
compute = arguments.compute * mine(arguments.slow, 1.0)
if arguments.die:
    victim = int(arguments.die.partition(":")[0])
    if victim == run.rank:
        die_while_sending(mine(arguments.die, 0))
    else:
        ledger.keep(arguments.folder, courier, victim)
if mine(arguments.hesitate, 0.0):
    hesitate(mine(arguments.hesitate, 0.0))
begun = last = time.monotonic()
gap = 0.0
steps = 0
announced = False
while (
    not stop.is_set() and steps < arguments.steps and time.monotonic() - begun < arguments.seconds
):
    if not arguments.still:
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
        say(
            ready=True,
            address=courier.transport.address,
            run_id=courier.wire._run_id,
            layout=run._learner.replica.digest(),
            password=courier.transport._password.hex(),
        )
    if steps % 5 == 0:
        say(at=now, step=steps, exchanges=run.stats["exchanges"])
stats = run.stats
say(
    stopping=True,
    steps=steps,
    gap=gap,
    **{name: stats[name] for name in ("lost", "exchanges", "global_steps")},
)
run.finish()
x = x.detach()
if arguments.folder and run.rank == 0:
    np.save(arguments.folder / "end.npy", x.numpy())
say(
    done=True,
    digest=hashlib.sha256(x.numpy().tobytes()).hexdigest()[:16],
    finite=bool(x.isfinite().all()),
    stats={k: v for k, v in run.stats.items() if isinstance(v, int | float | list | dict)},
    events=[told(event) for event in run.trace.events if concerns_others(event)],
    threads=[t.name for t in threading.enumerate() if t.name.startswith("loosestep")],
)
