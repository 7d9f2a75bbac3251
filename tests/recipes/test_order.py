from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loosestep.recipes.order import BatchStream, Order, mix

GOLDEN = (6375474604893067239, 7617019192293260610, 4909851169395153553)
sizes = st.integers(1, 60)


@given(
    examples=sizes,
    batch=st.integers(1, 9),
    seed=st.integers(0, 5),
    epoch=st.integers(0, 3),
    bucketed=st.booleans(),
)
def test_an_epoch_visits_every_example_once(
    examples: int, batch: int, seed: int, epoch: int, bucketed: bool
) -> None:
    lengths = [(7 * i) % 13 for i in range(examples)] if bucketed else None
    order = Order(examples, batch=batch, seed=seed, lengths=lengths, pool=2)
    n = order.batches_per_epoch
    batches = [order[epoch * n + i] for i in range(n)]
    assert sorted(np.concatenate(batches)) == list(range(examples))
    assert max(map(len, batches)) <= batch
    assert max(map(len, batches)) - min(map(len, batches)) <= 1


@given(
    examples=sizes, batch=st.integers(1, 9), learners=st.integers(1, 5), taken=st.integers(0, 20)
)
def test_learners_take_all_batches_and_never_the_same(
    examples: int, batch: int, learners: int, taken: int
) -> None:
    order = Order(examples, batch=batch, seed=0)
    numbers = []
    for learner in range(learners):
        stream = BatchStream(
            lambda n: (n, order[n]), learner=learner, learners=learners, taken=taken
        )
        numbers += [next(stream)[0] for _ in range(3)]
    assert sorted(numbers) == list(range(taken, taken + 3 * learners))


def test_the_order_depends_on_the_seed_and_the_epoch_alone() -> None:
    a, b, other = (Order(100, batch=10, seed=seed) for seed in (1, 1, 2))
    assert np.array_equal(a[3], b[3])
    a[57]
    assert np.array_equal(a[3], b[3])
    assert not np.array_equal(a[3], other[3])
    assert not np.array_equal(a[3], a[13])


def test_batches_are_bucketed_by_length_but_not_in_order_of_length() -> None:
    lengths = np.random.default_rng(0).integers(10, 1000, 320)
    order = Order(320, batch=8, seed=0, lengths=list(lengths), pool=40)
    spans = [np.ptp(lengths[order[i]]) for i in range(order.batches_per_epoch)]
    means = [lengths[order[i]].mean() for i in range(order.batches_per_epoch)]
    assert np.mean(spans) < 150
    assert abs(np.corrcoef(means, range(len(means)))[0, 1]) < 0.5


def test_a_stream_continues_where_it_was_saved() -> None:
    stream = BatchStream(lambda n: n, learner=1, learners=3)
    first = [next(stream) for _ in range(4)]
    state = stream.state_dict()
    rest = [next(stream) for _ in range(4)]
    resumed = BatchStream(lambda n: n, learner=1, learners=3)
    resumed.load_state_dict(state)
    assert first + [next(resumed) for _ in range(4)] == [1, 4, 7, 10, *rest]


def test_a_position_of_other_learners_is_refused() -> None:
    state = BatchStream(lambda n: n, learners=2).state_dict()
    with pytest.raises(ValueError, match="one of 2 learners, this stream has 3"):
        BatchStream(lambda n: n, learners=3).load_state_dict(state)


def test_mixed_seeds_differ() -> None:
    seeds = {
        mix(seed, name, i)
        for seed in range(5)
        for name in ("order", "model", "noise")
        for i in range(50)
    }
    assert len(seeds) == 5 * 3 * 50
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_negative_seeds_are_seeds_of_their_own() -> None:
    assert len({mix(seed, "order", 0) for seed in range(-50, 50)}) == 100
    assert mix(-(2**70), "order") != mix(2**70, "order")


def test_mixed_seeds_are_what_they_always_were() -> None:
    """Data orders, models and noise of runs that were recorded or stopped depend on it."""
    assert (mix(0), mix(0, "order", 0), mix(17, "augment", 123456)) == GOLDEN


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"examples": 0, "batch": 1}, "at least 1 example"),
        ({"examples": 3, "batch": 0}, "batch must be at least 1, got 0"),
        ({"examples": 3, "batch": 1, "lengths": [1]}, "1 lengths were given for 3 examples"),
    ],
)
def test_nonsense_is_refused(arguments: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):  # a RecipeError where it may be the user's
        Order(**arguments, seed=0)  # type: ignore[arg-type]


def test_a_learner_outside_the_learners_is_refused() -> None:
    with pytest.raises(ValueError, match=r"learner must be in 0\.\.1 for 2 learners, got 2"):
        BatchStream(lambda n: n, learner=2, learners=2)
