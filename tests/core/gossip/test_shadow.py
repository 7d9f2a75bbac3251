"""The shadow and the exchange protocol: the mean never moves, whatever the network does."""

import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loosestep.codecs import codec
from loosestep.core.gossip.exchange import Edge, Message, NotFiniteError
from loosestep.core.gossip.shadow import Shadow
from loosestep.core.messages.frames import FrameKind

SIZE = 10
CHUNK = 4 * 8


def learner(seed, size=SIZE, chunk_bytes=CHUNK, codec=None):
    params = [torch.randn(size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))]
    return params, Shadow(params, chunk_bytes=chunk_bytes, codec=codec)


class Network:
    """Two learners and a network that delivers any message at any time, twice, or never."""

    def __init__(self, codec=None):
        self.learners = [learner(0, codec=codec), learner(1, codec=codec)]
        self.edges = [Edge(shadow, window=2) for _, shadow in self.learners]
        self.flying = [[], []]  # towards 0, towards 1
        self.total = self.sum()

    def sum(self):
        return sum(shadow.flat() for _, shadow in self.learners)

    def send(self, to, message):
        if message is not None:
            value = None if message.value is None else message.value.value.copy()
            self.flying[to].append(
                Message(message.kind, message.chunk, message.q, message.una, message.weight, value)
            )

    def begin(self, end, chunk, weight=0.5):
        self.send(1 - end, self.edges[end].begin(chunk, weight))

    def deliver(self, end, index, keep=False):
        if self.flying[end]:
            index %= len(self.flying[end])
            message = self.flying[end][index] if keep else self.flying[end].pop(index)
            for answer in self.edges[end].receive(message):
                self.send(1 - end, answer)

    def step(self, end, amount):
        params, shadow = self.learners[end]
        params[0] += amount
        self.total = self.total + amount
        shadow.boundary(params)

    def step_in_part(self, end, amount, chunks):
        """A step whose parameters reach the shadow in some chunks only, and the others later."""
        params, shadow = self.learners[end]
        params[0] += amount
        self.total = self.total + amount
        shadow.steps += 1
        shadow.settle(params, sorted(chunks))

    def publish(self):
        for params, shadow in self.learners:
            shadow.boundary(params)

    def settle(self):
        """Repeat what is unanswered until nothing is."""
        for _ in range(50):
            for end in (0, 1):
                for message in self.edges[end].unanswered():
                    self.send(1 - end, message)
            while any(self.flying):
                self.deliver(0, 0)
                self.deliver(1, 0)
            if not any(edge.pending for edge in self.edges):
                return
        raise AssertionError("the exchange does not end")


actions = st.one_of(
    st.tuples(
        st.just("begin"), st.integers(0, 1), st.integers(0, 2), st.sampled_from([0.5, 1 / 3])
    ),
    st.tuples(st.just("deliver"), st.integers(0, 1), st.integers(0, 50)),
    st.tuples(st.just("double"), st.integers(0, 1), st.integers(0, 50)),
    st.tuples(st.just("lose"), st.integers(0, 1), st.integers(0, 50)),
    st.tuples(st.just("repeat"), st.integers(0, 1)),
    st.tuples(st.just("step"), st.integers(0, 1), st.floats(-1, 1)),
    st.tuples(st.just("part"), st.integers(0, 1), st.floats(-1, 1), st.sets(st.integers(0, 2))),
)


@settings(max_examples=400, deadline=None)
@given(st.lists(actions, max_size=60), st.sampled_from([None, codec("bf16")]))
def test_mean_is_untouched_by_loss_reordering_and_duplication(script, code):
    network = Network(code)
    for name, end, *rest in script:
        if name == "begin":
            network.begin(end, rest[0], rest[1])
        elif name == "deliver":
            network.deliver(end, rest[0])
        elif name == "double":
            network.deliver(end, rest[0], keep=True)
        elif name == "lose" and network.flying[end]:
            network.flying[end].pop(rest[0] % len(network.flying[end]))
        elif name == "repeat":
            for message in network.edges[end].unanswered():
                network.send(1 - end, message)
        elif name == "step":
            network.step(end, rest[0])
        elif name == "part":
            network.step_in_part(end, *rest)
        for edge in network.edges:
            assert edge.pending <= edge.window
            assert edge.cached <= 3 * edge.window  # bounded, whatever is lost
    network.settle()
    network.publish()
    np.testing.assert_allclose(network.sum(), network.total, rtol=0, atol=1e-12)


def test_ends_that_round_what_they_send_meet_as_near_as_it_is_fine():
    network = Network(codec("bf16"))
    a, b = (shadow.flat() for _, shadow in network.learners)
    for chunk in range(3):
        network.begin(0, chunk)
        network.settle()
    for _, shadow in network.learners:
        np.testing.assert_allclose(shadow.flat(), (a + b) / 2, rtol=0, atol=2**-7)
    np.testing.assert_allclose(network.sum(), a + b, rtol=0, atol=1e-12)


def test_an_exchange_averages_with_its_weight():
    network = Network()
    a, b = (shadow.flat() for _, shadow in network.learners)
    for chunk in range(3):
        network.begin(0, chunk, 1 / 3)
        network.settle()
    np.testing.assert_allclose(network.learners[0][1].flat(), a + (b - a) / 3)
    np.testing.assert_allclose(network.learners[1][1].flat(), b + (a - b) / 3)


def test_crossing_requests_form_one_pair_with_the_smaller_weight():
    network = Network()
    a, b = (shadow.flat()[:4] for _, shadow in network.learners)
    network.begin(0, 0, 1 / 3)
    network.begin(1, 0, 1 / 2)
    network.settle()
    np.testing.assert_allclose(network.learners[0][1].flat()[:4], a + (b - a) / 3)
    assert [edge.applied for edge in network.edges] == [1, 1]


def test_a_crossing_pair_survives_the_loss_of_one_request():
    network = Network()
    network.begin(0, 0, 1 / 3)
    network.begin(1, 0, 1 / 2)
    network.flying[1].clear()
    network.settle()
    assert [edge.applied for edge in network.edges] == [1, 1]
    np.testing.assert_allclose(network.sum(), network.total, atol=1e-13)


def test_a_repeated_request_is_answered_with_the_same_bytes():
    network = Network()
    network.begin(0, 0)
    request = network.flying[1][0]
    first = network.edges[1].receive(request)[0].value.value.copy()
    network.step(1, 5.0)
    np.testing.assert_array_equal(network.edges[1].receive(request)[0].value.value, first)


def test_a_learner_that_never_steps_is_averaged_a_hundred_times_without_overshoot():
    network = Network()
    params, slow = network.learners[0]
    fast = network.learners[1][1].flat()
    low = np.minimum(slow.flat(), fast)
    high = np.maximum(slow.flat(), fast)
    for _ in range(100):
        network.begin(1, 0)
        network.settle()
    fold = slow.boundary(params)
    assert fold.chunks == 100
    assert np.all(params[0].numpy() >= low - 1e-12)
    assert np.all(params[0].numpy() <= high + 1e-12)


def test_doubt_after_a_death_names_what_may_be_missing():
    network = Network()
    before = network.learners[1][1].flat().sum()
    network.begin(1, 1)  # never answered
    network.begin(0, 0)
    network.deliver(1, -1)  # answered, never confirmed
    doubt = network.edges[1].drop()
    assert doubt.unanswered == [(1, 1)]
    assert doubt.unconfirmed == [(0, 1)]
    assert network.learners[1][1].flat().sum() - before == pytest.approx(doubt.moved)
    assert network.edges[1].pending == network.edges[1].cached == 0


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_value_that_is_not_finite_is_refused_as_a_whole(bad):
    network = Network()
    before = network.learners[1][1].flat()
    network.begin(0, 0)
    network.flying[1][0].value[2] = bad
    with pytest.raises(NotFiniteError):
        network.deliver(1, 0)
    np.testing.assert_array_equal(network.learners[1][1].flat(), before)


def test_large_finite_values_are_not_mistaken_for_infinity():
    shadow = Shadow([torch.full((8,), 1e38)], chunk_bytes=32)
    mine = shadow.read(0).value
    # the differences sum to 1.6e39
    shadow.move(0, 0.5, mine=mine, theirs=np.full(8, 3e38, np.float32), snapshot=0)
    np.testing.assert_allclose(shadow.flat(), 2e38)


def test_boundary_keeps_the_local_update_and_lands_the_delta():
    params, shadow = learner(0)
    start = params[0].clone()
    value = shadow.read(0)
    shadow.move(0, 0.5, mine=value.value, theirs=value.value + 2.0, snapshot=shadow.steps)
    params[0] -= 0.25
    shadow.steps += 1
    fold = shadow.boundary(params)
    expected = start - 0.25
    expected[:4] += 1.0
    torch.testing.assert_close(params[0], expected)
    np.testing.assert_allclose(shadow.flat(), params[0].numpy())
    assert (fold.chunks, fold.staleness_max) == (1, 1)
    assert shadow.boundary(params).chunks == 0
    torch.testing.assert_close(params[0], expected)


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from([[torch.float64], [torch.float32, torch.float64]]),
    st.lists(
        st.tuples(st.sampled_from(["exchange", "step", "lift", "land"]), st.integers(0, 1)),
        max_size=40,
    ),
)
def test_what_a_copy_has_gained_may_be_added_later(dtypes, script):
    """The mean of all learners is what they started from and have learnt, however many steps a
    copy was away.
    """
    models = [
        [torch.randn(6, generator=torch.Generator().manual_seed(end)).to(dtype) for dtype in dtypes]
        for end in (0, 1)
    ]
    shadows = [Shadow(params, chunk_bytes=8 * 5) for params in models]
    away = [None, None]
    total = sum(shadow.flat() for shadow in shadows)

    def land(end):
        for param, gained in zip(models[end], away[end] or [], strict=False):
            param += gained
        away[end] = None

    for name, end in script:
        if name == "exchange":
            for chunk in range(shadows[0].chunks):
                values = [shadow.read(chunk).value for shadow in shadows]
                for mine, shadow in enumerate(shadows):
                    shadow.move(
                        chunk,
                        0.5,
                        mine=values[mine],
                        theirs=values[1 - mine],
                        snapshot=shadow.published,
                    )
        elif name == "step":
            for param in models[end]:
                param += 0.5
            shadows[end].steps += 1
            total = total + 0.5
        elif name == "land":
            land(end)
        elif away[end] is None:
            away[end] = [param.clone() for param in models[end]]
            before = shadows[end].steps
            fold = shadows[end].lift(away[end], step=before)
            assert fold.staleness_max <= before
            y = torch.cat([(x + d).double() for x, d in zip(models[end], away[end], strict=True)])
            # others meet it at once
            np.testing.assert_allclose(shadows[end].flat(), y.numpy(), rtol=0, atol=1e-6)
            assert shadows[end].published == before
    for end in (0, 1):
        land(end)
        shadows[end].boundary(models[end])
        flat = torch.cat([param.double() for param in models[end]])
        np.testing.assert_allclose(shadows[end].flat(), flat.numpy(), rtol=0, atol=1e-6)
    np.testing.assert_allclose(
        sum(s.flat() for s in shadows), total, rtol=0, atol=1e-12 if len(dtypes) == 1 else 1e-5
    )


def test_staleness_counts_the_steps_from_snapshot_to_fold():
    params, shadow = learner(0)
    value = shadow.read(0)
    snapshot = shadow.steps
    shadow.steps += 3  # whether they were folded does not matter
    shadow.move(0, 0.5, mine=value.value, theirs=value.value, snapshot=snapshot)
    later = shadow.steps
    shadow.move(1, 0.5, mine=value.value, theirs=value.value, snapshot=later)
    shadow.steps += 1
    assert shadow.age == 4
    fold = shadow.boundary(params)
    assert (fold.chunks, fold.staleness_max, fold.staleness_mean) == (2, 4, 2.5)
    assert shadow.age == 0


@given(st.lists(st.integers(0, 9), min_size=1, max_size=6).filter(any), st.integers(1, 12))
def test_every_cut_into_chunks_covers_every_number_once(sizes, per_chunk):
    params = [torch.arange(size, dtype=torch.float64) + 100 * i for i, size in enumerate(sizes)]
    shadow = Shadow(params, chunk_bytes=8 * per_chunk)
    flat = torch.cat(params).numpy()
    np.testing.assert_array_equal(shadow.flat(), flat)
    for chunk in range(shadow.chunks):
        value = shadow.read(chunk).value
        shadow.move(chunk, 1.0, mine=value, theirs=value + 1, snapshot=0)
    shadow.boundary(params)
    np.testing.assert_array_equal(torch.cat(params).numpy(), flat + 1)


def test_parameters_that_are_not_contiguous_are_folded_too():
    base = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    params = [base.t()]
    shadow = Shadow(params)
    value = shadow.read(0).value
    shadow.move(0, 1.0, mine=value, theirs=value + 1, snapshot=0)
    shadow.boundary(params)
    torch.testing.assert_close(base, torch.arange(12, dtype=torch.float32).reshape(3, 4) + 1)


def test_bfloat16_keeps_what_rounding_cuts_off():
    params = [torch.full((64,), 256.0, dtype=torch.bfloat16)]
    shadow = Shadow(params)
    for _ in range(8):  # each quarter is lost in bfloat16 at 256, where the spacing is 2
        value = shadow.read(0).value
        shadow.move(0, 1.0, mine=value, theirs=value + np.float32(0.25), snapshot=0)
        shadow.boundary(params)
    np.testing.assert_allclose(shadow.flat(), 258.0)
    assert params[0][0] == 258.0


def test_what_landed_in_a_chunk_of_full_precision_beside_one_of_less_is_added_once():
    params = [torch.full((8,), 256.0, dtype=torch.bfloat16), torch.ones(8)]
    shadow = Shadow(params, chunk_bytes=8 * 4)  # a chunk each
    for chunk in range(2):
        value = shadow.read(chunk).value
        shadow.move(chunk, 1.0, mine=value, theirs=value + np.float32(0.25), snapshot=0)
    for _ in range(3):
        shadow.boundary(params)
        assert [float(p[0]) for p in params] == [256.0, 1.25]
        np.testing.assert_array_equal(shadow.flat(), [256.25] * 8 + [1.25] * 8)


PRECISIONS = [
    [torch.bfloat16, torch.float32],
    [torch.float32, torch.float64],
    [torch.float16, torch.float32] * 2,
]


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from(PRECISIONS),
    st.lists(
        st.one_of(
            st.tuples(st.just("exchange"), st.integers(0, 1)),
            st.tuples(st.just("boundary"), st.integers(0, 1)),
            st.tuples(st.just("step"), st.integers(0, 1)),
        ),
        max_size=40,
    ),
)
def test_mean_is_untouched_in_models_of_several_precisions(dtypes, script):
    """Chunks of four among tensors of six: some are of one precision, some of two."""
    models = [
        [
            torch.randn(6, generator=torch.Generator().manual_seed(10 * end + i)).to(d)
            for i, d in enumerate(dtypes)
        ]
        for end in (0, 1)
    ]
    shadows = [
        Shadow(params, chunk_bytes=4 * (8 if torch.float64 in dtypes else 4)) for params in models
    ]
    total = sum(shadow.flat().astype(np.float64) for shadow in shadows)
    for name, end in script:
        if name == "exchange":
            for chunk in range(shadows[0].chunks):
                values = [shadow.read(chunk).value for shadow in shadows]
                for mine, shadow in enumerate(shadows):
                    shadow.move(chunk, 0.5, mine=values[mine], theirs=values[1 - mine], snapshot=0)
        else:
            before = torch.cat([p.double() for p in models[end]])
            if name == "step":
                for p in models[end]:
                    p += 0.5
            total += (torch.cat([p.double() for p in models[end]]) - before).numpy()
            shadows[end].boundary(models[end])
    np.testing.assert_allclose(sum(shadow.flat() for shadow in shadows), total, rtol=0, atol=1e-4)


@pytest.mark.parametrize("relayed", [False, True])
def test_boundaries_and_exchanges_of_two_threads_lose_nothing_and_nobody_reads_half_of_one(
    relayed: bool,
) -> None:
    """One chunk of 1 MB of equal numbers: long enough to be met in the middle, and equal
    whenever it is whole.
    """
    params = [torch.zeros(1 << 18)]
    exchanges = 1000
    steps = 0
    torn = 0
    shadow = Shadow(params, relayed=relayed)
    zero, one = (np.full(1 << 18, value, np.float32) for value in (0, 1))

    def gossip() -> None:
        nonlocal torn
        for _ in range(exchanges):
            shadow.move(0, 1.0, mine=zero, theirs=one, snapshot=shadow.steps)
            seen = shadow.read(0)
            torn += seen.value.min() != seen.value.max()
            shadow.give(seen)

    other = threading.Thread(target=gossip)
    other.start()
    while other.is_alive():
        params[0] += 1
        steps += 1
        shadow.steps = steps
        shadow.boundary(params)
    other.join()
    shadow.settle(params)
    if shadow.relay is not None:
        shadow.relay.close()
    assert torn == 0
    np.testing.assert_array_equal(shadow.flat(), steps + exchanges)
    np.testing.assert_array_equal(params[0], steps + exchanges)


def test_a_shadow_without_parameters_says_so():
    with pytest.raises(ValueError, match="at least one parameter"):
        Shadow([])


def test_a_reply_is_never_answered():
    network = Network()
    stray = Message(FrameKind.REPLY, 0, 7, 1, 0.5, np.zeros(4))
    assert network.edges[0].receive(stray) == []
