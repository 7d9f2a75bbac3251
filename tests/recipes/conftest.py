from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Nothing of the user's cache is read or written."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOOSESTEP_CACHE", str(folder))
        yield folder


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Small tensors: more threads only make them slower."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def shared(name: str) -> Path:
    folder = REPOSITORY.parent / "shared" / "data" / name
    if not folder.is_dir():
        pytest.skip(f"{name} is not at ../shared/data/{name}")
    return folder


@pytest.fixture
def an4() -> Path:
    return shared("an4")


@pytest.fixture
def cifar10() -> Path:
    return shared("cifar10")
