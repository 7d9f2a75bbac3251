"""Boundaries in two halves, as on an accelerator: nothing is lost, nothing counts twice, nobody
waits.
"""

import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loosestep.core.gossip.shadow import Shadow

SIZES = (7, 6)
CHUNK = 4 * 8


def learner(seed, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    params = [
        torch.randn(size, dtype=torch.float64, generator=generator).to(dtype) for size in SIZES
    ]
    return params, Shadow(params, chunk_bytes=CHUNK, relayed=True)


def exchange(first, second, chunk, weight=0.5):
    """Both shadows move by `weight` of the difference of the same pair of values."""
    a = first.read(chunk)
    b = second.read(chunk)
    mine = a.value.copy()
    theirs = b.value.copy()
    first.move(chunk, weight, mine=mine, theirs=theirs, snapshot=first.steps)
    second.move(chunk, weight, mine=theirs, theirs=mine, snapshot=second.steps)


def flat(params):
    return torch.cat([p.double().reshape(-1) for p in params]).numpy()


def wait_for_the_second_half(shadow):
    if shadow.relay._half is not None:
        shadow.relay._half.wait(10)


@pytest.fixture
def gate(monkeypatch):
    """Parameters that do not arrive before `gate` is set."""
    opened = threading.Event()
    params, shadow = learner(0)
    send = shadow.relay._staging.send

    def slow(pairs, **after):
        opened.wait(10)
        return send(pairs, **after)

    monkeypatch.setattr(shadow.relay._staging, "send", slow)
    yield opened, params, shadow
    opened.set()
    shadow.relay.close()


actions = st.one_of(
    st.tuples(st.just("step"), st.sampled_from([0, 1]), st.floats(-10, 10)),
    st.tuples(st.just("exchange"), st.integers(0, 3), st.sampled_from([0.25, 0.5])),
    st.tuples(st.just("wait"), st.sampled_from([0, 1]), st.just(0)),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(actions, max_size=25))
def test_the_sum_moves_by_the_updates_and_by_nothing_else(script):
    both = [learner(0), learner(1)]
    total = sum(flat(params) for params, _ in both)
    for kind, which, amount in script:
        if kind == "step":
            params, shadow = both[which]
            for p in params:
                p += amount
            total = total + amount
            shadow.boundary(params)
        elif kind == "exchange":
            exchange(both[0][1], both[1][1], which, amount)
        else:
            wait_for_the_second_half(both[which][1])
    for params, shadow in both:
        shadow.settle(params)
        shadow.relay.close()
        np.testing.assert_allclose(flat(params), shadow.flat(), atol=1e-12)
    np.testing.assert_allclose(sum(shadow.flat() for _, shadow in both), total, atol=1e-9)


def test_a_boundary_never_waits_and_what_it_skips_comes_later(gate):
    opened, params, shadow = gate
    start = flat(params)
    for _ in range(5):
        for p in params:
            p += 1
        fold = shadow.boundary(params)
    assert fold.skipped
    assert shadow.busy
    np.testing.assert_allclose(shadow.flat(), start)  # nothing has arrived yet
    opened.set()
    shadow.settle(params)
    np.testing.assert_allclose(shadow.flat(), start + 5)


def land(shadow, chunk, amount):
    """An exchange that adds `amount`."""
    value = shadow.read(chunk).value
    shadow.move(chunk, 0.5, mine=value, theirs=value + 2 * amount, snapshot=shadow.published)


def test_what_has_landed_is_in_the_parameters_after_the_boundary():
    params, shadow = learner(0)
    start = flat(params)
    for chunk in range(shadow.chunks):
        land(shadow, chunk, 1)
    shadow.steps += 4  # three of them found the relay busy
    assert shadow.age == 4
    fold = shadow.boundary(params)
    np.testing.assert_allclose(flat(params), start + 1)
    assert (fold.chunks, fold.staleness_max) == (shadow.chunks, 4)
    assert shadow.age == 0
    wait_for_the_second_half(shadow)
    np.testing.assert_allclose(shadow.flat(), start + 1)
    shadow.relay.close()


def test_a_boundary_takes_the_chunks_that_have_landed_and_no_other():
    params, shadow = learner(0)
    start = flat(params)
    expected = flat(params)
    for chunk in (0, 2):
        land(shadow, chunk, 1)
        shadow.slice(chunk, expected)[:] += 1
    fold = shadow.boundary(params)
    assert fold.chunks == 2
    np.testing.assert_allclose(flat(params), expected)
    assert (flat(params) == start).sum() == shadow.length(1) + shadow.length(3)
    shadow.relay.close()


def test_the_shadow_is_whole_while_the_parameters_travel(gate):
    opened, params, shadow = gate
    expected = flat(params)
    for step in range(4):  # every memory has been everything by then
        opened.clear()
        land(shadow, 0, 1)
        for p in params:
            p += 10
        shadow.steps += 1
        shadow.boundary(params)
        land(shadow, 0, 5)
        land(shadow, 1, 5)
        shadow.slice(0, expected)[:] += 6
        shadow.slice(1, expected)[:] += 5
        # nothing of the step yet, and all that has landed
        np.testing.assert_allclose(shadow.flat(), expected)
        assert shadow.published == step
        opened.set()
        wait_for_the_second_half(shadow)
        expected += 10
        np.testing.assert_allclose(shadow.flat(), expected)
    shadow.settle(params)
    np.testing.assert_allclose(flat(params), expected)


def test_an_exchange_waits_until_the_parameters_have_arrived(gate):
    opened, params, shadow = gate
    seen = []
    shadow.relay.when_published(lambda: seen.append("at once"))
    shadow.steps += 1
    shadow.boundary(params)
    shadow.relay.when_published(lambda: seen.append(shadow.published))
    assert seen == ["at once"]
    opened.set()
    shadow.settle(params)
    assert seen == ["at once", 1]


def test_settling_leaves_the_parameters_and_the_shadow_equal():
    params, shadow = learner(0)
    start = flat(params)
    value = shadow.read(0).value
    shadow.move(0, 0.5, mine=value, theirs=value + 2, snapshot=0)
    shadow.settle(params)
    np.testing.assert_array_equal(flat(params), shadow.flat())
    assert flat(params)[0] == start[0] + 1
    shadow.relay.close()


def test_a_relay_keeps_no_copy_of_strided_parameters():
    params = [torch.randn(4, 3).t()]
    shadow = Shadow(params, relayed=True)
    assert not shadow._views._xs
    assert not shadow._views._copies
    params[0] += 1
    shadow.settle(params)
    np.testing.assert_array_equal(shadow.flat(), params[0].reshape(-1))
    shadow.relay.close()


def test_halves_keep_what_rounding_cuts_off():
    params, shadow = learner(0, torch.bfloat16)
    before = shadow.flat()
    for _ in range(64):
        for chunk in range(shadow.chunks):
            value = shadow.read(chunk).value
            shadow.move(chunk, 0.5, mine=value, theirs=value + np.float32(2**-12), snapshot=0)
        shadow.settle(params)
    np.testing.assert_allclose(shadow.flat(), before + 64 * 2**-13, rtol=1e-6)
    np.testing.assert_allclose(flat(params), shadow.flat(), rtol=2**-8)
    shadow.relay.close()


def test_parameters_that_are_assigned_forget_what_was_on_its_way(gate):
    opened, params, shadow = gate
    value = shadow.read(0).value
    shadow.move(0, 0.5, mine=value, theirs=value + 2, snapshot=0)
    shadow.boundary(params)
    opened.set()
    shadow.assign(params, np.full(shadow.size, 3.0))
    shadow.settle(params)
    assert (flat(params) == 3.0).all()
    assert (shadow.flat() == 3.0).all()


def test_the_second_half_reports_its_failure_at_the_next_boundary(monkeypatch):
    params, shadow = learner(0)

    def broken(step):
        raise RuntimeError("no shadow")

    monkeypatch.setattr(shadow, "renew", broken)
    shadow.boundary(params)
    with pytest.raises(RuntimeError, match="no shadow"):
        shadow.settle(params)
    shadow.relay.close()
