"""The worked examples of the documentation run as they stand there."""

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("page", ["adding-a-strategy.md", "adding-a-codec.md"])
def test_the_worked_example_runs(page):
    blocks = re.findall(r"^```python\n(.*?)^```", (DOCS / page).read_text(), re.M | re.S)
    assert len(blocks) == 2
    # Dataclasses look up the module that they are defined in.
    exec(compile("\n".join(blocks), page, "exec"), {"__name__": "__main__"})
