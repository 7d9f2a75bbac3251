"""A training script that forgets `finish()`: forgets.py STRATEGY [in a function]"""

import sys

import torch
from torch import nn

import loosestep


def train():
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = loosestep.attach(model, optimizer, sys.argv[1], deadline=5)
    for _ in range(3):
        model(torch.randn(4, 2)).sum().backward()
        optimizer.step()
    return run


if len(sys.argv) > 2:
    train()
else:
    run = train()
