"""The pace of gossip."""

import pytest

from loosestep.core.gossip.budget import Pace


def settle(cost_per_exchange, *, steps_per_second=50, share=0.1, cores=1.0):
    """A learner whose peers keep the same pace: every exchange begun is matched by one answered."""
    pace = Pace(1.0, share=share, cores=cores)
    used = 0.0
    begun = []
    for step in range(60 * steps_per_second):
        exchanges = pace.due(step / steps_per_second, used)
        begun.append(exchanges)
        used += 2 * exchanges * cost_per_exchange
    tail = begun[len(begun) // 2 :]
    return sum(tail) / len(tail), 2 * cost_per_exchange * sum(tail) / (len(tail) / steps_per_second)


def test_cheap_exchanges_keep_the_full_rate():
    assert settle(1e-4)[0] == 1.0


@pytest.mark.parametrize("cost", [0.003, 0.02, 0.1])
def test_expensive_exchanges_are_slowed_to_their_share(cost):
    rate, share = settle(cost)
    assert 0 < rate < 1
    assert 0.07 <= share <= 0.13


def test_bad_pace_is_refused():
    with pytest.raises(ValueError, match="rate must be above 0"):
        Pace(0)
    with pytest.raises(ValueError, match="share"):
        Pace(1, share=2)
