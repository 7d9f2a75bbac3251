"""The virtual clock: one strand at a time, in the order of virtual time, the same order for the
same seed.
"""

import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loosestep.sim.clock import Gate, Killed, VirtualClock


def test_strands_take_turns_in_the_order_of_virtual_time() -> None:
    clock = VirtualClock()
    seen = []

    def live(name: str, pause: float) -> None:
        for _ in range(3):
            clock.sleep(pause)
            seen.append((round(clock.now, 6), name))

    clock.spawn(lambda: live("slow", 1.0), name="slow", rank=0)
    clock.spawn(lambda: live("fast", 0.4), name="fast", rank=1)
    assert clock.run() == []
    assert seen == [
        (0.4, "fast"),
        (0.8, "fast"),
        (1.0, "slow"),
        (1.2, "fast"),
        (2.0, "slow"),
        (3.0, "slow"),
    ]


def order_of_ties(seed: int) -> list[int]:
    clock = VirtualClock(seed)
    seen = []

    def live(name: int) -> None:
        for _ in range(4):
            clock.sleep(1.0)
            seen.append(name)

    for name in range(8):
        clock.spawn(lambda name=name: live(name), name=str(name), rank=name)
    clock.run()
    return seen


def test_the_seed_alone_decides_between_equal_times() -> None:
    assert order_of_ties(3) == order_of_ties(3)
    assert order_of_ties(3) != order_of_ties(4)


@settings(max_examples=20, deadline=None)
@given(st.lists(st.lists(st.floats(0, 3), max_size=5), min_size=1, max_size=6))
def test_time_never_goes_back_and_only_one_strand_runs(pauses: list[list[float]]) -> None:
    clock = VirtualClock()
    running = []
    times = []

    def live(own: list[float]) -> None:
        for pause in own:
            running.append(1)
            assert len(running) == 1
            times.append(clock.now)
            running.pop()
            clock.sleep(pause)

    for index, own in enumerate(pauses):
        clock.spawn(lambda own=own: live(own), name=str(index), rank=index)
    clock.run()
    assert times == sorted(times)
    assert clock.now == pytest.approx(max(sum(own) for own in pauses))


def test_a_gate_lets_everybody_go_on_and_a_timeout_gives_up() -> None:
    clock = VirtualClock()
    seen = []
    gate = Gate(clock)
    clock.spawn(lambda: seen.append(gate.wait()), name="patient", rank=0)
    clock.spawn(lambda: seen.append(gate.wait(1.0)), name="hasty", rank=1)
    gate.open_at(2.0)
    clock.run()
    assert seen == [False, True]


def test_who_waits_for_nothing_is_named_and_unwound() -> None:
    clock = VirtualClock()
    unwound = []

    def live() -> None:
        try:
            Gate(clock).wait(why="a miracle")
        except Killed:
            unwound.append(True)
            raise

    strand = clock.spawn(live, name="rank 0", rank=0)
    assert clock.run() == [strand]
    assert unwound == [True]


def test_a_killed_rank_ends_where_it_waits_and_the_others_go_on() -> None:
    clock = VirtualClock()
    seen = []

    def live(name: str) -> None:
        for _ in range(3):
            clock.sleep(1.0)
            seen.append(name)

    clock.spawn(lambda: live("a"), name="a", rank=0)
    clock.spawn(lambda: live("b"), name="b", rank=1)
    clock.call(1.5, lambda: clock.kill(0))
    clock.run()
    assert (seen.count("a"), seen.count("b")) == (1, 3)


def test_no_thread_is_left() -> None:
    before = threading.active_count()
    order_of_ties(0)
    assert threading.active_count() == before


def test_an_error_in_an_event_is_raised_by_run() -> None:
    clock = VirtualClock()
    clock.spawn(lambda: clock.sleep(5.0), name="rank 0", rank=0)
    clock.call(1.0, lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        clock.run()
