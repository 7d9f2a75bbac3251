"""Nested state without pickle."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from loosestep.core.plain_state import flatten, unflatten

plain = (
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False)
    | st.text()
)
nested = st.recursive(
    plain,
    lambda inner: (
        st.lists(inner)
        | st.dictionaries(st.integers() | st.text(), inner)
        | st.tuples(inner, inner)
    ),
    max_leaves=10,
)


@given(nested)
def test_what_goes_in_comes_out(state):
    assert unflatten(*flatten(state)) == state


def test_tensors_keep_their_dtype_and_place():
    state = {"a": [torch.arange(3), {"b": torch.ones(2, dtype=torch.bfloat16)}], 7: torch.zeros(())}
    back = unflatten(*flatten(state))
    assert torch.equal(back["a"][0], torch.arange(3))
    assert back["a"][1]["b"].dtype == torch.bfloat16
    assert back[7].shape == ()


def test_numbers_of_numpy_and_dtypes_are_plain_too():
    back = unflatten(
        *flatten({"lr": np.float32(0.5), "steps": np.int64(3), "state": torch.bfloat16})
    )
    assert back == {"lr": 0.5, "steps": 3, "state": torch.bfloat16}
    assert type(back["lr"]) is float


def test_anything_else_is_refused():
    with pytest.raises(TypeError, match="got set"):
        flatten({"a": {1, 2}})
