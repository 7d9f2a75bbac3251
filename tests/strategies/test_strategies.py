"""Strategies as values: what they accept, how they are written, how DASO adapts."""

from dataclasses import FrozenInstanceError

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from loosestep import ADPSGD, DASO, AllReduce, DelayByOne, LocalSGD, strategy


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("allreduce", AllReduce()),
        ("daso", DASO()),
        ("daso:period=8,delay=2", DASO(period=8, delay=2)),
        ("daso: period=8 , delay=2", DASO(period=8, delay=2)),
        ("daso-paper", DASO.paper()),
        ("daso-paper:period=8", DASO.paper(period=8)),
        ("localsgd:replica=node,local_period=4", LocalSGD(replica="node", local_period=4)),
        ("delay-by-one", DelayByOne()),
        ("daso:cooldown=5,total=100,threshold=0.1", DASO(cooldown=5, total=100, threshold=0.1)),
    ],
)
def test_a_strategy_is_read_from_its_string(text, value):
    assert strategy(text) == value


@given(
    period=st.integers(1, 64),
    data=st.data(),
    warmup=st.integers(0, 50),
    merge=st.sampled_from(["delta", "stale"]),
    lanes=st.sampled_from(["sharded", "rotating"]),
    ramp=st.sampled_from(["gradients", "parameters"]),
    threshold=st.floats(0, 0.9),
)
def test_a_strategy_survives_the_round_trip_through_its_string(
    period, data, warmup, merge, lanes, ramp, threshold
):
    chosen = DASO(
        period=period,
        delay=data.draw(st.integers(0, period)),
        warmup=warmup,
        merge=merge,
        lanes=lanes,
        ramp=ramp,
        threshold=threshold,
        epoch=data.draw(st.none() | st.integers(1, 10)),
    )
    assert strategy(str(chosen)) == chosen


@pytest.mark.parametrize(
    "graph", [{0: [1, 2], 1: [2]}, {0: (1,), 1: (2,)}, [[0.9, 0.1], [0.1, 0.9]]], ids=str
)
def test_a_graph_or_matrix_survives_the_round_trip_among_other_fields(graph):
    chosen = ADPSGD(graph=graph, rate=0.5, lockstep=True)
    assert strategy(str(chosen)) == chosen


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "dasso",
            r"unknown strategy 'dasso' \(did you mean 'daso'\?\); the strategies are .*daso, .*localsgd",
        ),
        (
            "daso:perid=3",
            r"daso has no field 'perid' \(did you mean 'period'\?\); its fields are: period, delay",
        ),
        ("allreduce:period=3", "allreduce has no field 'period'; its fields are: codec"),
        ("daso:period", "expected field=value"),
        ("daso:period=1,period=2", "given twice"),
        ("daso:period=0", "period must be a whole number of at least 1, got 0"),
        ("daso:period=2.5", "period must be a whole number of at least 1, got 2.5"),
        ("daso:period=2,delay=3", "delay must be at most period, got delay=3 and period=2"),
        ("localsgd:period=2,delay=3", "delay must be at most the 2 steps"),
        ("daso:cooldown=5", "cooldown=5 needs total"),
        ("daso:cooldown=5,warmup=6,total=10", r"warmup \+ cooldown must fit into total=10"),
        ("daso:merge=average", "merge must be one of 'delta', 'stale', got 'average'"),
        ("localsgd:local_period=2,replica=rank", "needs replica='node'"),
        ("adpsgd:rate=abc", "rate must be above 0 and at most 16 exchanges per step, got 'abc'"),
        ("adpsgd:slowdown=abc", "slowdown must be above 0 and at most 1, got 'abc'"),
        ("daso:threshold=asdf", "threshold must be at least 0 and below 1, got 'asdf'"),
        ("adpsgd:graph=-1", "unknown graph -1; valid are ring"),
        ("localsgd:replica=gpu", "replica must be one of 'auto', 'rank', 'node'"),
    ],
)
def test_a_bad_strategy_is_refused_with_what_to_do(text, message):
    with pytest.raises(ValueError, match=message):
        strategy(text)


def test_strategies_are_frozen_and_keyword_only():
    with pytest.raises(FrozenInstanceError):
        DASO().period = 3
    with pytest.raises(TypeError):
        DASO(8)


def test_the_paper_waits_a_quarter_of_the_period_and_at_least_one_step():
    assert [DASO.paper(period=period).delay for period in (1, 4, 8, 16)] == [1, 1, 2, 4]
    paper = DASO.paper()
    assert (paper.merge, paper.lanes, paper.ramp) == ("stale", "rotating", "parameters")


def plateaus(daso, state, count):
    """The periods after each of `count` plateaus."""
    seen = []
    for _ in range(count):
        for _ in range(daso.patience):
            daso.evaluate(state, 1.0)
        seen.append((state["period"], state["delay"]))
    return seen


def test_on_plateaus_the_period_cycles_4_2_1_4():
    daso = DASO(period=4, delay=1)
    state = daso.begin()
    daso.evaluate(state, 1.0)
    assert plateaus(daso, state, 4) == [(2, 1), (1, 1), (4, 1), (2, 1)]


def test_the_delay_halves_with_the_period_and_returns_with_it():
    daso = DASO(period=8, delay=4)
    state = daso.begin()
    daso.evaluate(state, 1.0)
    assert plateaus(daso, state, 4) == [(4, 2), (2, 1), (1, 1), (8, 4)]


def test_an_improvement_of_more_than_the_threshold_resets_the_patience():
    daso = DASO(period=4)
    state = daso.begin()
    for loss in (1.0, 1.0, 1.0, 0.94, 0.94, 0.94):
        daso.evaluate(state, loss)
    assert state["period"] == 4
    daso.evaluate(state, 0.90)  # better, but not by 5 % of the best
    assert state["period"] == 2


def test_a_loss_that_is_not_a_number_is_no_improvement():
    daso = DASO(period=4)
    state = daso.begin()
    for _ in range(3):
        daso.evaluate(state, float("nan"))
    assert state["period"] == 2
    assert state["best"] is None


def test_a_mixing_matrix_may_be_an_array():
    matrix = torch.full((2, 2), 0.5)
    assert (
        ADPSGD(graph=matrix.numpy())
        == ADPSGD(graph=matrix)
        == ADPSGD(graph=[[0.5, 0.5], [0.5, 0.5]])
    )
    assert "0.5" in str(ADPSGD(graph=matrix))
