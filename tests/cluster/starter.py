"""A training script for tests of starts and strangers: says one JSON line for each thing it did.

starter.py again | train [--steps N] [--strategy S] [--deadline 10] [--uneven]
"""

import argparse
import json
import os
import time

from little import flat, linear, one_step, sgd

import loosestep

parser = argparse.ArgumentParser()
parser.add_argument("what", choices=["again", "train"])
parser.add_argument("--steps", type=int, default=100000)
parser.add_argument("--strategy", default="daso:period=2")
parser.add_argument("--deadline", type=float, default=10.0)
arguments = parser.parse_args()


def say(**fields):
    os.write(1, f"{json.dumps(fields)}\n".encode())  # at one go: launchers mix what comes in parts


def begin(seed):
    model = linear(seed)
    optimizer = sgd(model)
    run = loosestep.attach(model, optimizer, arguments.strategy, deadline=arguments.deadline)
    return run, model, optimizer


def again():
    """Attach, finish, attach; then two at once, of which one finishes first."""
    for seed in range(2):
        run, model, optimizer = begin(seed)
        for step in range(3):
            one_step(model, optimizer, run.rank, step)
        run.finish()
        say(model=flat(model).tolist(), seed=seed)
    first, model, optimizer = begin(2)
    second, other, its = begin(3)
    for step in range(2):
        one_step(model, optimizer, first.rank, step)
        one_step(other, its, first.rank, step)
    first.finish()
    until = time.monotonic() + 2.5  # heartbeats go on
    step = 2
    while time.monotonic() < until:
        one_step(other, its, first.rank, step)
        time.sleep(0.05)
        step += 1
    second.finish()
    say(model=flat(other).tolist(), seed=3)


def train():
    """Until told to stop."""
    run, model, optimizer = begin(0)
    run.stop_on()
    board = run.notes("board")
    if run.rank == 0:
        board.set("rate", "0.1")
    say(ready=run.rank, world=run.topology.world, nodes=run.topology.nodes)
    made = 0
    while made < arguments.steps and not run.should_stop:
        one_step(model, optimizer, run.rank, made)
        made += 1
        time.sleep(0.01)
    rate = board.get("rate").decode() if arguments.steps == 100000 else ""
    run.finish()
    say(model=flat(model).tolist(), steps=made, stopped=run.should_stop, rate=rate)


try:
    {"again": again, "train": train}[arguments.what]()
except Exception as error:
    say(error=f"{type(error).__name__}: {error}")
    raise SystemExit(3) from error
