"""Record and replay of free-running gossip: real processes, a straggler, a kill -9; bit for bit
at every step.
"""

import pytest
import replay_worker

from loosestep.record.format import Recording, RecordKind
from loosestep.record.player import RecordingEnds
from loosestep.sim.driver import simulate

SLOW_AND_KILLED = {"slow": {1: 8}, "kill": {2: 25}}


def both(folder, **options):
    original = replay_worker.ranks(folder, replay=False, **options)
    return original, replay_worker.ranks(folder, replay=True, **options)


def in_process(folder, monkeypatch, *, ranks_per_node=1, **options):
    """The same recording on virtual ranks, in this process; what each rank says."""
    monkeypatch.setenv("LOOSESTEP_REPLAY", str(folder / "recording"))
    ranks = options["nodes"] * ranks_per_node
    lines = [[] for _ in range(ranks)]

    def train(rank):
        try:
            replay_worker.train(
                rank, folder, options, True, lambda *what: lines[rank].append(list(what))
            )
        except RecordingEnds as error:
            lines[rank].append(["ends", str(error)])

    simulate(train, ranks=ranks, ranks_per_node=ranks_per_node)
    return lines


def assert_same(original, replayed, killed=()):
    for rank, (first, second) in enumerate(zip(original, replayed, strict=True)):
        if rank in killed:  # it may have died between a step and the line about it
            assert second[-1][0] == "ends"
            assert "it was killed" in second[-1][1]
            assert len(first) - 1 <= len(second[:-1]) <= len(first) + 1
            together = min(len(first), len(second) - 1)
            first = first[:together]
            second = second[:together]
        assert second == first, f"rank {rank}"


@pytest.mark.timeout(240)
@pytest.mark.parametrize("codec", ["none", "bf16"])
def test_a_run_with_a_straggler_and_a_kill_is_replayed_bit_for_bit_at_every_step(
    tmp_path, monkeypatch, codec
):
    options = {
        "strategy": f"adpsgd:graph=random-ring,codec={codec}",
        "nodes": 4,
        "steps": 60,
        **SLOW_AND_KILLED,
    }
    original, replayed = both(tmp_path, **options)
    assert_same(original, replayed, killed=(2,))
    assert_same(replayed, in_process(tmp_path, monkeypatch, **options))
    # really killed, really noticed
    assert all(lines[-1][2] == [2] for rank, lines in enumerate(original) if rank != 2)
    recordings = [Recording.read(tmp_path / "recording", rank) for rank in range(4)]
    folds = [
        sum(record.kind is RecordKind.FOLD for record in recording.records())
        for recording in recordings
    ]
    assert sum(folds) > 40  # and really asynchronous: the slow one was averaged many times a step


@pytest.mark.timeout(240)
def test_boundaries_of_some_chunks_of_a_larger_model_are_replayed_bit_for_bit(tmp_path):
    options = {
        "strategy": "adpsgd:graph=random-ring",
        "nodes": 3,
        "steps": 30,
        "width": 80_000,
        "lr": 1e-6,
        "look": False,
    }
    original, replayed = both(tmp_path, slow={1: 4}, **options)
    assert_same(original, replayed)
    recordings = [Recording.read(tmp_path / "recording", rank) for rank in range(3)]
    boundaries = [
        record.rest
        for each in recordings
        for record in each.records()
        if record.kind is RecordKind.BOUNDARY
    ]
    assert any(0 < len(chunks) < 4 for chunks in boundaries if chunks is not None)


@pytest.mark.timeout(240)
def test_nodes_that_gossip_shard_by_shard_are_replayed_bit_for_bit(tmp_path, monkeypatch):
    options = {
        "strategy": "adpsgd:replica=node",
        "nodes": 2,
        "ranks_per_node": 2,
        "steps": 40,
        "look": False,
    }
    original = replay_worker.ranks(tmp_path, replay=False, slow={3: 3}, **options)
    assert_same(original, in_process(tmp_path, monkeypatch, **options))


@pytest.mark.timeout(240)
def test_a_node_that_dies_ends_its_replay_where_it_ended(tmp_path):
    options = {
        "strategy": "adpsgd:replica=node",
        "nodes": 2,
        "ranks_per_node": 2,
        "steps": 60,
        "look": False,
    }
    original, replayed = both(tmp_path, kill={3: 25}, deadline=5, **options)
    assert_same(original[:2], replayed[:2])  # the other node goes on
    assert original[2][-1][0] == "lost"
    assert replayed[2][-1][0] in ("ends", "lost")
    steps = min(len(original[2]), len(replayed[2])) - 1
    assert abs(len(original[2]) - len(replayed[2])) <= 1
    assert original[2][:steps] == replayed[2][:steps]
