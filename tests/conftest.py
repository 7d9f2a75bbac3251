"""Shared by all tests: helpers are importable by name, and processes of the pool end with the run."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
for folder in (HERE, HERE / "cluster"):
    sys.path.insert(0, str(folder))
