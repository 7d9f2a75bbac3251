"""The first contact: who is of this run, and who is not."""

import json
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed import HashStore

from loosestep.core.messages.contact import FirstContact, OtherRunError, Party

KEY = b"a run key of more than sixteen bytes"


def party(rank, *, world=2, run="job 7", key=KEY, number=0):
    return Party(rank, world, run, key, number, "here:1", address=f"10.0.0.{rank}")


def meet(store, *parties, patience=10.0):
    """What each of them came to: a contact or an error."""

    def one(who):
        try:
            return FirstContact(store, who, patience=patience).meet()
        except Exception as error:  # noqa: BLE001
            return error

    with ThreadPoolExecutor(len(parties)) as pool:
        return list(pool.map(one, parties))


def test_all_ranks_know_the_same_and_no_other_contact_does():
    store = HashStore()
    first = meet(store, *[party(rank, world=3) for rank in range(3)])
    second = meet(HashStore(), party(0), party(1))
    assert first[0] == first[1] == first[2]
    assert first[0].addresses == ("10.0.0.0", "10.0.0.1", "10.0.0.2")
    assert first[0].secret not in (None, second[0].secret)


def test_without_a_key_there_is_no_secret_yet():
    assert [
        contact.secret for contact in meet(HashStore(), party(0, key=None), party(1, key=None))
    ] == [None, None]


def test_the_notes_of_an_earlier_attempt_are_not_taken_for_those_of_this_one():
    store = HashStore()
    old = meet(store, party(0), party(1))
    waiting = []
    late = threading.Thread(target=lambda: waiting.extend(meet(store, party(1))))
    late.start()  # finds the old call, its own old answer, and the old go
    late.join(0.5)
    assert not waiting
    new = meet(store, party(0))
    late.join(10)
    assert waiting == new != old[:1]


def test_who_is_missing_is_named_to_all():
    results = meet(HashStore(), party(0, world=3), party(2, world=3), patience=0.5)
    assert all(isinstance(result, TimeoutError) for result in results)
    assert all(
        "rank(s) 1 did not call loosestep.attach within 0.5 s, at here:1" in str(result)
        for result in results
    )


def test_a_peer_of_another_run_is_refused_by_name_and_does_no_harm():
    store = HashStore()
    zero, one, stranger = meet(store, party(0), party(1), party(1, run="job 8"))
    assert zero == one
    assert isinstance(stranger, OtherRunError)
    assert "belongs to another run" in str(stranger)
    assert "job 7" in str(stranger)
    assert "job 8" in str(stranger)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("key", "message"),
    [
        (b"another key of more than 16 bytes", "rank 0 has a wrong run key"),
        (None, "a run key, this"),
    ],
)
def test_another_key_is_refused_by_name_and_does_no_harm(key, message):
    store = HashStore()
    zero, one, stranger = meet(
        store, party(0, world=3), party(1, world=3), party(2, world=3, key=key), patience=4.0
    )
    assert isinstance(stranger, ConnectionError)
    assert message in str(stranger)
    assert "LOOSESTEP_KEY" in str(stranger)
    assert isinstance(zero, TimeoutError)
    assert isinstance(one, TimeoutError)


def test_a_rank_that_came_twice_is_said_to_the_one_that_was_displaced():
    results = meet(
        HashStore(), party(0, world=3), party(1, world=3), party(1, world=3), patience=1.0
    )
    assert all(isinstance(result, TimeoutError) for result in results)  # rank 2 is still missing
    store = HashStore()
    threading.Timer(0.5, lambda: meet(store, party(2, world=3))).start()
    zero, *twice = meet(
        store,
        party(0, world=3),
        party(1, world=3, key=KEY),
        party(1, world=3, key=KEY),
        patience=3.0,
    )
    assert sum(result == zero for result in twice) == 1
    assert (
        sum("another process has come to here:1 as rank 1" in str(result) for result in twice) == 1
    )


def test_what_a_stranger_overwrites_is_written_again():
    store = HashStore()
    stop = threading.Event()

    def disturb():
        while not stop.wait(0.1):
            forged = json.dumps({"said": {"token": "0", "run": "job 7", "world": 2}, "proof": "00"})
            store.set("loosestep/0/call", forged)
            store.set("loosestep/0/call/1", b"\xff")

    stranger = threading.Thread(target=disturb)
    stranger.start()
    one = threading.Thread(target=lambda: results.extend(meet(store, party(1))))
    results: list[object] = []
    one.start()
    one.join(0.5)
    zero = meet(store, party(0))
    one.join(10)
    stop.set()
    stranger.join()
    assert results == zero


def test_whoever_waits_says_for_whom_and_where(monkeypatch, caplog):
    monkeypatch.setattr("loosestep.core.messages.contact.TELL", 0.1)
    meet(HashStore(), party(0, world=3), party(2, world=3), patience=0.5)
    said = {record.getMessage() for record in caplog.records}
    assert said == {f"rank {rank} waits for rank(s) 1 at here:1" for rank in (0, 2)}


def test_a_rank_that_cannot_reach_rank_0_says_where_it_waits(monkeypatch, caplog):
    from loosestep.core.messages import gathering
    from loosestep.topology.launchers import Launch, Rendezvous

    monkeypatch.setattr(gathering, "TELL", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    launch = Launch("slurm", 1, 2, 0, "n", "job 7")
    with pytest.raises(TimeoutError, match=f"127.0.0.1:{port}.*refused"):
        gathering._come(launch, Rendezvous(("127.0.0.1",), (port,)), KEY, 0.5)
    assert f"waits for rank 0 at 127.0.0.1:{port}" in caplog.text
    assert "refused" in caplog.text
