"""The end of a run as a pure game of messages and deaths: all survivors end with the same
average.
"""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loosestep.core.gossip.ending import Ending
from loosestep.core.gossip.shadow import Shadow
from loosestep.core.messages.frames import Flags, Topic
from loosestep.core.messages.members import Members, State

N = 4
CHUNKS = 2
ONES = dict.fromkeys(range(N), 1)


class Rank:
    def __init__(self, rank):
        self.rank = rank
        self.shadow = Shadow(
            [torch.full((2 * CHUNKS,), 10.0**rank, dtype=torch.float64)], chunk_bytes=16
        )
        peers = [peer for peer in range(N) if peer != rank]
        self.members = Members(
            peers, now=0.0, suspend=1e9, deadline=1e9, emit=lambda kind, **fields: None
        )
        self.ending = Ending(rank, self.shadow, self.members, retry=1.0, weights=ONES)
        self.ending.done = True


class Game:
    """Ranks, the messages between them, who is dead, and who knows."""

    def __init__(self):
        self.ranks = [Rank(rank) for rank in range(N)]
        self.flying = []  # (source, dest, word, flags, promised); word is None for a beat
        self.dead = set()
        self.left = set()
        self.now = 0.0
        for rank in self.ranks:
            self.turn(rank)

    def send(self, source, dest, word=None):
        self.flying.append((source.rank, dest, word, source.ending.flags(), source.ending.promised))

    def turn(self, rank):
        while rank.ending.advance(pending=0):
            for peer in rank.members.present():
                self.send(rank, peer)
        if rank.ending.complete and rank.rank not in self.left:
            self.left.add(rank.rank)  # from here on it answers nobody
            for peer in rank.members.present():
                self.send(rank, peer, ("bye", None, None, None, None))
        if rank.ending.fetch is not None:
            for peer, chunk in rank.ending.fetch.asks(self.now):
                self.send(
                    rank, peer, ("ask", rank.ending.fetch.topic, rank.ending.fetch.tag, chunk, None)
                )

    def deliver(self, index):
        source, dest, word, flags, promised = self.flying.pop(index % len(self.flying))
        rank = self.ranks[dest]
        if dest in self.dead | self.left or source not in rank.members.present():
            return
        rank.members.hear(source, self.now, progress=0, flags=flags)
        rank.ending.highest = max(rank.ending.highest, promised)
        if word is not None:
            kind, topic, tag, chunk, value = word
            if kind == "bye":
                rank.members.remove(source, State.LEFT)
            elif kind == "ask":
                value = rank.ending.answer(topic, tag, chunk)
                if value is not None:
                    self.send(rank, source, ("value", topic, tag, chunk, value.copy()))
            elif rank.ending.fetch is not None:
                rank.ending.fetch.receive(source, topic, tag, chunk, value)
        self.turn(rank)

    def kill(self, rank):
        if len(self.dead) < N - 1:
            self.dead.add(rank)

    def notice(self, rank, peer):
        if (
            peer in self.dead
            and rank not in self.dead
            and self.ranks[rank].members.remove(peer, State.DEAD)
        ):
            self.turn(self.ranks[rank])

    def settle(self):
        survivors = [rank for rank in self.ranks if rank.rank not in self.dead]
        for _ in range(60):
            for rank in survivors:
                for peer in self.dead:
                    self.notice(rank.rank, peer)
            while self.flying:
                self.deliver(0)
            if all(rank.ending.complete for rank in survivors):
                return [rank.ending.result for rank in survivors]
            self.now += 2.0
            for rank in survivors:
                for peer in rank.members.present():
                    self.send(
                        rank,
                        peer,
                        ("bye", None, None, None, None) if rank.rank in self.left else None,
                    )
                self.turn(rank)
        raise AssertionError("the run does not end")


moves = st.one_of(
    st.tuples(st.just("deliver"), st.integers(0, 200)),
    st.tuples(st.just("deliver"), st.integers(0, 200)),
    st.tuples(st.just("deliver"), st.integers(0, 200)),
    st.tuples(st.just("kill"), st.integers(0, N - 1)),
    st.tuples(st.just("notice"), st.integers(0, N - 1), st.integers(0, N - 1)),
    st.tuples(st.just("lose"), st.integers(0, 200)),
    st.tuples(st.just("wait")),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(moves, max_size=120))
def test_survivors_agree_whatever_is_late_lost_or_killed(script):
    game = Game()
    for name, *rest in script:
        if name == "deliver" and game.flying:
            game.deliver(*rest)
        elif name == "lose" and game.flying:
            game.flying.pop(rest[0] % len(game.flying))
        elif name == "kill":
            game.kill(*rest)
        elif name == "notice":
            game.notice(*rest)
        elif name == "wait":
            game.now += 2.0
            for rank in game.ranks:
                if rank.rank not in game.dead:
                    game.turn(rank)
    results = game.settle()
    for other in results:
        np.testing.assert_array_equal(other, results[0])
    assert np.all(results[0] == results[0][0])  # every chunk is the mean of the same ranks


def test_a_result_of_an_older_view_is_refused_after_a_newer_collection_was_answered():
    """Rank 3 has half of rank 0's average when rank 0 dies and rank 1 collects anew; then the
    other half arrives.
    """
    rank = Rank(3)
    rank.members.hear(0, 0.0, progress=0, flags=Flags.DONE | Flags.DRAINED | Flags.HOLDS)
    rank.ending.advance(pending=0)
    copy = rank.ending.fetch
    copy.receive(0, Topic.RESULT, copy.tag, 0, np.zeros(2))
    assert rank.ending.answer(Topic.FINAL, 2 << 20 | 1, 0) is not None
    if rank.ending.fetch is not None:
        rank.ending.fetch.receive(0, Topic.RESULT, 0, 1, np.zeros(2))
    rank.members.remove(0, State.DEAD)
    rank.ending.advance(pending=0)
    assert not rank.ending.holds


def test_the_collection_of_an_older_view_is_not_answered():
    rank = Rank(3)
    rank.ending.advance(pending=0)
    assert rank.ending.answer(Topic.FINAL, 2 << 20 | 1, 0) is not None
    assert rank.ending.answer(Topic.FINAL, 1 << 20, 0) is None


def test_nobody_is_answered_before_this_rank_has_drained():
    rank = Rank(3)
    rank.ending.advance(pending=1)
    assert rank.ending.answer(Topic.FINAL, 1 << 20, 0) is None
