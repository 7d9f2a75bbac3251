"""Where a lab cannot be made, the tests that need one are skipped, with the reason."""

import pytest

from loosestep.lab import Lab, LabError


def refusal() -> str | None:
    try:
        Lab(1).close()
    except LabError as error:
        return str(error)
    return None


@pytest.fixture(scope="session")
def _lab_or_reason() -> str | None:
    return refusal()


@pytest.fixture
def needs_namespaces(_lab_or_reason: str | None) -> None:
    if _lab_or_reason is not None:
        pytest.skip(_lab_or_reason)
