"""A strategy is one file: this one defines a new one, and nothing else knows of it."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from little import GRID, flat, linear, one_step, sgd
from pool import ranks
from typer.testing import CliRunner

import loosestep
from loosestep import Cluster, strategy
from loosestep.cli import app
from loosestep.sim.predict.timing import predict
from loosestep.strategies import STRATEGIES, Exchanges, State, Strategy
from loosestep.strategies.base import is_due

STEPS = 8


@dataclass(frozen=True, kw_only=True)
class Fibonacci(Strategy[Exchanges]):
    """Exchanges at the steps 1, 2, 3, 5, 8, ..., each landing `delay` steps later."""

    name: ClassVar[str] = "fibonacci"
    summary: ClassVar[str] = "replicas average more and more rarely"

    delay: int = 1

    def begin(self) -> State:
        return {"step": 0, "exchanges": 0, "next": [1, 2]}

    def boundary(self, state: State, run: Exchanges) -> None:
        state["step"] += 1
        if is_due(state, run, self.delay):
            self.land(state, run.replica, run.fold())
        first, second = state["next"]
        if state["step"] == first:
            if run.in_flight is not None:
                self.land(state, run.replica, run.fold())
            run.start()
            state["next"] = [second, first + second]


def train(rank: int, **place) -> tuple[torch.Tensor, int]:
    model = linear(seed=rank)
    optimizer = sgd(model)
    with loosestep.attach(model, optimizer, "fibonacci:delay=1", deadline=10, **place) as run:
        for step in range(STEPS):
            one_step(model, optimizer, rank, step)
        exchanges = run.state["exchanges"]
        replica = flat(model)
    return replica, exchanges


@pytest.mark.processes
def test_it_trains_on_processes_and_in_the_simulator_alike():
    real = ranks(4, train, topology=GRID)
    virtual = loosestep.simulate(train, ranks=4, topology=GRID).results
    for (replica, exchanges), (expected, _) in zip(real, virtual, strict=True):
        torch.testing.assert_close(replica, expected, rtol=0, atol=0)
        assert exchanges == 5  # at 1, 2, 3, 5, 8


def test_it_is_timed_on_clusters_that_nobody_has():
    cluster = Cluster(bandwidth="1gbit", latency="1ms", compute="10ms")
    prediction = predict("fibonacci", GRID, cluster, parameters=4_000_000, steps=STEPS)
    assert prediction.exchanges == 5


def test_it_appears_in_the_help_with_its_fields(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TERMINAL_WIDTH", "80")
    page = CliRunner().invoke(app, ["train", "--help"]).output
    assert Fibonacci.summary in page
    assert "delay=1" in page.partition(Fibonacci.summary)[2].splitlines()[1]


def test_it_is_read_from_its_string_and_written_as_one():
    assert strategy("fibonacci:delay=3") == Fibonacci(delay=3)
    assert str(Fibonacci(delay=3)) == "fibonacci:delay=3"


def test_a_module_put_into_the_package_is_found_without_being_imported(tmp_path, monkeypatch):
    package = tmp_path / "kinds_of_things"
    package.mkdir()
    (package / "__init__.py").write_text(
        "from loosestep.registry import Registry\n"
        "THINGS = Registry('thing', 'things', package=__name__, example='stone')\n"
    )
    (package / "stone.py").write_text(
        "from dataclasses import dataclass\n"
        "from kinds_of_things import THINGS\n"
        "@dataclass(frozen=True)\n"
        "class Stone:\n"
        "    name = 'stone'\n"
        "    summary = 'hard'\n"
        "    weight: int = 1\n"
        "THINGS.enter(Stone)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    from kinds_of_things import THINGS

    assert list(THINGS.entries()) == ["stone"]
    assert THINGS.read("stone:weight=2").weight == 2
    sys.modules.pop("kinds_of_things.stone")


def test_the_readme_says_of_each_strategy_what_its_help_says():
    readme = Path(__file__).parents[2].joinpath("README.md").read_text()
    for entry in STRATEGIES.entries().values():
        if entry.kind.__module__.startswith("loosestep."):
            assert f"| {entry.summary}" in readme, entry.name


def test_two_classes_of_one_name_are_refused():
    with pytest.raises(ValueError, match="two strategies have the name 'fibonacci'"):

        @dataclass(frozen=True, kw_only=True)
        class Another(Strategy[Exchanges]):
            name: ClassVar[str] = "fibonacci"
            summary: ClassVar[str] = "something else"

    assert strategy("fibonacci") == Fibonacci()


def test_a_strategy_without_a_line_for_its_help_is_refused():
    with pytest.raises(TypeError, match="needs `summary: ClassVar"):

        class Silent(Strategy[Exchanges]):
            name: ClassVar[str] = "silent"


def test_rank_0_says_once_who_is_one_learner(caplog: pytest.LogCaptureFixture):
    def train(rank: int) -> str:
        model = linear()
        with loosestep.attach(model, sgd(model), "delay-by-one", deadline=10) as run:
            return str(run.strategy)

    with caplog.at_level("INFO", logger="loosestep"):
        chosen = loosestep.simulate(train, ranks=4, topology=GRID).results
    assert chosen == ["delay-by-one:replica=node"] * 4
    said = [
        record.getMessage() for record in caplog.records if "one learner" in record.getMessage()
    ]
    assert said == [
        "delay-by-one on these nodes is delay-by-one:replica=node: a node is one learner"
    ]


def test_replicas_are_nodes_where_there_are_several_nodes_of_several_ranks():
    chosen = strategy("localsgd:replica=auto")
    assert chosen.fitted([2, 2]).replica == "node"
    assert chosen.fitted([1, 2]).replica == "node"
    assert chosen.fitted([4]).replica == "rank"
    assert chosen.fitted([1, 1]).replica == "rank"
    assert strategy("localsgd:replica=rank").fitted([2, 2]).replica == "rank"
    with pytest.raises(ValueError, match="depends on the nodes"):
        _ = chosen.learner
