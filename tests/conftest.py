"""Shared by all tests: helpers are importable by name; one thread computes, as on the ranks that results are compared with."""

import sys
from pathlib import Path

import torch

HERE = Path(__file__).parent
for folder in (HERE, HERE / "cluster"):
    sys.path.insert(0, str(folder))
torch.set_num_threads(1)
