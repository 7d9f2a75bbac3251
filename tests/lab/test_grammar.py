"""What the lab's options mean, and what a wrong one is told."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loosestep.lab import Lab, grammar
from loosestep.lab.grammar import Kill, Partition, Stop


def test_every_option_of_the_manual_is_understood() -> None:
    assert grammar.rate("500mbit") == 500_000_000
    assert grammar.rate("2.5Gbit") == 2_500_000_000
    assert grammar.duration("20ms") == pytest.approx(0.02)
    assert grammar.duration("2min") == 120
    assert grammar.duration("50us") == pytest.approx(5e-5)
    assert grammar.share("1%") == pytest.approx(0.01)
    assert grammar.link("2-3=50mbit") == ((2, 3), "50mbit")
    assert grammar.slow("5:10x") == (5, 10.0)
    assert grammar.kill("3@20s") == Kill(3, 20.0)
    assert grammar.stop("2@10s:5s") == Stop(2, 10.0, 5.0)
    assert grammar.partition("0,1/2,3@15s:10s") == Partition(
        (frozenset({0, 1}), frozenset({2, 3})), 15.0, 10.0
    )


@pytest.mark.parametrize(
    ("parse", "text", "example"),
    [
        (grammar.rate, "500", "500mbit"),
        (grammar.rate, "0mbit", "500mbit"),
        (grammar.rate, "-1mbit", "500mbit"),
        (grammar.duration, "20", "20ms"),
        (grammar.share, "0.01", "1%"),
        (grammar.share, "100%", "below 100%"),
        (grammar.link, "2-3", "2-3=50mbit"),
        (grammar.link, "2-2=50mbit", "two different nodes"),
        (grammar.link, "2-3=fast", "500mbit"),
        (grammar.slow, "5:10", "5:10x"),
        (grammar.slow, "5:0.5x", "at least 1"),
        (grammar.kill, "3", "3@20s"),
        (grammar.kill, "3@20", "20ms"),
        (grammar.stop, "2@10s", "2@10s:5s"),
        (grammar.partition, "0,1|2,3@15s:10s", "0,1/2,3@15s:10s"),
        (grammar.partition, "0,1/1@15s:10s", "each node may be named once"),
    ],
)
def test_what_is_wrong_is_shown_with_the_grammar(parse: object, text: str, example: str) -> None:
    with pytest.raises(ValueError) as caught:
        parse(text)  # type: ignore[operator]
    assert example in str(caught.value)


@given(st.text(max_size=20))
def test_any_text_is_understood_or_refused_as_a_value_error(text: str) -> None:
    readers = (grammar.rate, grammar.duration, grammar.share, grammar.link, grammar.slow)
    for parse in (*readers, grammar.kill, grammar.stop, grammar.partition):
        try:
            parse(text)
        except ValueError:
            continue


@given(st.integers(1, 10), st.data())
def test_a_completed_partition_holds_every_node_once(nodes: int, data: st.DataObject) -> None:
    named = data.draw(st.lists(st.sampled_from(range(nodes)), unique=True))
    cut = data.draw(st.integers(0, len(named)))
    groups = tuple(frozenset(part) for part in (named[:cut], named[cut:]) if part)
    if len(groups) + (len(named) < nodes) < 2:
        with pytest.raises(ValueError, match="cuts nothing"):
            grammar.complete(groups, nodes)
        return
    complete = grammar.complete(groups, nodes)
    assert sorted(node for group in complete for node in group) == list(range(nodes))
    assert complete[: len(groups)] == groups


@pytest.mark.parametrize("text", ["40gbit", "0.0001kbit"])
def test_a_rate_that_no_token_bucket_keeps_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="between 1kbit and 32gbit"):
        grammar.link("0-1=" + text)


def test_a_link_has_one_rate() -> None:
    assert grammar.links(["0-1=50mbit", "1-2=20mbit"]) == {(0, 1): "50mbit", (1, 2): "20mbit"}
    with pytest.raises(ValueError, match="--link 1-0: this pair has two rates"):
        grammar.links(["0-1=50mbit", "1-0=20mbit"])


def test_uneven_nodes_are_refused_before_torchrun_starts() -> None:
    with pytest.raises(ValueError, match=r"same number of ranks on every node, got \[2, 1\]"):
        Lab(2, [2, 1], network=False, launcher="torchrun")
