"""The communication thread."""

import threading

import pytest
import torch

import loosestep
from loosestep.core.errors import CommError
from loosestep.core.thread import CommThread


@pytest.fixture
def three_threads():
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(1)


def in_a_new_thread() -> int:
    seen: list[int] = []
    thread = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    return seen[0]


def test_a_narrow_thread_leaves_the_cores_to_all_others(three_threads: None) -> None:
    narrow = CommThread("narrow", narrow=True)
    wide = CommThread("wide")
    assert narrow.run(torch.get_num_threads) == 1
    assert wide.run(torch.get_num_threads) == 3
    assert torch.get_num_threads() == 3
    assert in_a_new_thread() == 3
    assert narrow.close(timeout=5)
    assert wide.close(timeout=5)


def test_an_error_is_that_of_every_later_task() -> None:
    stream = CommThread("failing")
    with pytest.raises(ZeroDivisionError):
        stream.submit(lambda: 1 // 0).wait(5)
    with pytest.raises(ZeroDivisionError):
        stream.run(lambda: 1)
    assert stream.close(timeout=5)
    with pytest.raises(CommError, match="ended"):
        stream.submit(lambda: 1).wait(5)


def test_what_averages_parameters_on_the_host_is_narrow(three_threads: None) -> None:
    model = torch.nn.Linear(3, 2)
    with loosestep.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), "daso") as run:
        assert run._engine._comm._exchanges.run(torch.get_num_threads) == 1  # type: ignore[attr-defined]
