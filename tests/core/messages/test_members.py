"""Who counts as there."""

from loosestep.core.messages.members import Members, State


def members(*peers, suspend=1.0, deadline=60.0):
    return Members(
        peers, now=0.0, suspend=suspend, deadline=deadline, emit=lambda kind, **fields: None
    )


def test_nobody_is_blamed_for_the_time_this_process_was_stopped():
    there = members(1)
    there.sweep(0.4)
    assert there.sweep(10.0) == []
    assert there.alive() == {1}


def test_who_is_heard_right_after_a_pause_is_suspended_as_soon_as_anybody_else():
    there = members(1)
    there.sweep(0.4)
    # the frame that had waited, before the first sweep after the pause
    there.hear(1, 10.0, progress=0, flags=0)
    for tenth in range(100, 112):
        there.sweep(tenth / 10)
    assert there.ranks(State.SUSPENDED) == {1}
