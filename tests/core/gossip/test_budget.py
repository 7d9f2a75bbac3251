"""The pace of gossip."""

import os
import random
import time

import pytest

from loosestep.core.gossip.budget import Budget, Idle

# ---- the budget: how much slower communication may make steps


class Machine:
    """A clock on which a step costs its computation, and a model exchanged what it takes from
    it.
    """

    def __init__(self, budget, *, step=0.1, theft=0.0, cpu=0.0, noise=0.0, seed=0):
        self.budget = budget
        self.step = step
        self.theft = theft  # seconds that a model begun (and the one answered) takes from the step
        self.cpu = cpu  # seconds of the processor that it costs
        self.noise = noise
        self.draw = random.Random(seed)
        self.now = 1000.0
        self.used = 0.0

    def run(self, steps, others=lambda: ()):
        """Make steps; what was begun per step, and how much slower the mean step was."""
        begun = []
        spent = 0.0
        for _ in range(steps):
            share = self.budget.due(self.now, self.used, others=others())
            took = self.step * (1 + self.noise * self.draw.gauss(0, 1)) + share * self.theft
            self.now += took
            self.used += share * self.cpu
            spent += share * self.theft
            begun.append(share)
        return sum(begun) / steps, spent / (steps * self.step)


def test_where_communication_takes_nothing_the_full_rate_is_kept_but_for_the_quiet_part():
    """A process of its own on idle cores, beside a computation that waits or runs on a GPU."""
    machine = Machine(Budget(1.0), cpu=0.05)
    machine.run(300)
    sent, _ = machine.run(1000)
    assert machine.budget.rate == 1.0
    assert sent >= 0.85


@pytest.mark.parametrize("noise", [0.0, 0.05])
@pytest.mark.parametrize("theft", [0.01, 0.05, 0.3])
def test_a_computation_that_is_disturbed_gets_slower_by_no_more_than_it_may(theft, noise):
    """A main thread that holds the interpreter, or shares caches and memory with communication."""
    machine = Machine(Budget(1.0), theft=theft, noise=noise)
    machine.run(1500)
    sent, slower = machine.run(3000)
    assert slower <= 0.03 * (1.0 if noise == 0 else 1.4)
    assert sent >= min(0.7, 0.5 * 0.024 * machine.step / theft)  # and nothing much is given away


def test_when_no_core_is_idle_every_second_of_communication_counts_as_stolen():
    """The steps of this rank do not show it: they are taken from another rank of the host."""
    machine = Machine(Budget(1.0, cores=0.5, idle=lambda: 0.0), cpu=0.05)
    machine.run(1500)
    before = machine.used
    begun = machine.now
    machine.run(2000)
    assert (machine.used - before) / (machine.now - begun) <= 0.03 * 0.5 * 1.1
    assert machine.budget.rate > 0.01


def test_on_a_host_with_idle_cores_what_communication_costs_does_not_matter():
    machine = Machine(Budget(1.0, cores=0.5, idle=lambda: 3.0), cpu=0.05)
    machine.run(600)
    assert machine.budget.rate == 1.0


def test_the_rate_follows_a_computation_that_begins_to_be_disturbed_and_recovers():
    machine = Machine(Budget(1.0))
    machine.run(600)
    machine.theft = 0.1
    machine.run(2000)
    assert machine.run(1000)[1] <= 0.03
    machine.theft = 0.0
    machine.run(2000)
    assert machine.budget.rate == 1.0


def test_the_ranks_of_a_host_go_by_one_estimate():
    """One of them is disturbed by the communication of all; the others begin less for its sake."""
    machine = Machine(Budget(1.0))
    machine.run(1500, others=lambda: (0.3,))
    assert machine.budget.rate < 0.1


def test_ranks_of_a_host_are_quiet_at_the_same_time():
    machines = [Machine(Budget(1.0), step=0.1), Machine(Budget(1.0), step=0.09)]
    machines[1].now += 0.53
    quiet = []
    for machine in machines:
        spans = set()
        for _ in range(400):
            if machine.budget.due(machine.now, 0.0) == 0.0:
                spans.add(int(machine.now * 2))  # half seconds
            machine.now += machine.step
        quiet.append(spans)
    assert quiet[0]
    assert len(quiet[0] & quiet[1]) >= 0.8 * min(map(len, quiet))


def test_a_pause_for_an_evaluation_does_not_count_as_slower_steps():
    machine = Machine(Budget(1.0))
    for _ in range(20):
        machine.run(90)
        machine.now += 30.0
    assert machine.budget.rate == 1.0


def test_steps_that_get_much_longer_are_measured_anew():
    machine = Machine(Budget(1.0), step=0.01)
    machine.run(300)
    machine.step = 3.0
    machine.theft = 2.0
    machine.run(1500)
    assert machine.run(600)[1] <= 0.035


def test_shares_smaller_than_can_travel_are_saved_up():
    budget = Budget(0.1, slowdown=None, least=0.25)
    begun = [budget.due(float(now), 0.0) for now in range(100)]
    assert set(begun) == {0.0, 0.25}
    assert sum(begun) == pytest.approx(10, abs=0.25)


def test_without_a_limit_the_rate_is_what_was_asked_for_and_nothing_is_quiet():
    budget = Budget(2.0, slowdown=None)
    assert [budget.due(float(now), 0.0) for now in range(50)] == [2.0] * 50


def test_exchanges_that_have_become_too_rare_are_known():
    rare = Machine(Budget(1.0), theft=3.0)
    often = Machine(Budget(1.0))
    for machine in (rare, often):
        machine.run(3000)
    assert rare.budget.too_rare
    assert not often.budget.too_rare
    seldom = Machine(Budget(0.01))  # as asked for
    seldom.run(3000)
    assert not seldom.budget.too_rare


def test_bad_budgets_are_refused():
    for arguments, what in (
        ({"rate": 0}, "rate"),
        ({"slowdown": 0.0}, "slowdown"),
        ({"cores": 0}, "cores"),
    ):
        with pytest.raises(ValueError, match=what):
            Budget(**arguments)


def test_idle_cores_are_counted():
    idle = Idle()
    wait_until = time.monotonic() + 0.1
    while time.monotonic() < wait_until:
        pass
    cores = idle()
    assert cores is None or 0 <= cores <= len(os.sched_getaffinity(0))
