"""What an integration says where its library is not installed."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize("name", ["lightning", "accelerate", "transformers"])
def test_a_missing_library_is_named_with_the_extra_that_brings_it(name):
    code = f"import sys; sys.modules['{name}'] = None; import loosestep.integrations.{name}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert f"pip install 'loosestep[{name}]'" in done.stderr.splitlines()[-1]
