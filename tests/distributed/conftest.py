"""Fleets of two and four processes, started when a test first asks for them."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.distributed.fleet import Fleet
from tests.distributed.problems import DEVICE

_fleets: list[Fleet] = []


def _started(size: int) -> Iterator[Fleet]:
    if DEVICE.type == "cuda" and torch.cuda.device_count() < size:
        pytest.skip(f"needs {size} GPUs: torch.cuda.device_count() is {torch.cuda.device_count()}")
    fleet = Fleet(size)
    _fleets.append(fleet)
    yield fleet
    fleet.close()


def pytest_runtest_teardown(nextitem: pytest.Item | None) -> None:
    """End fleets before other tests: threads of idle ranks took a tenth of two cores."""
    if nextitem is None or Path(__file__).parent not in nextitem.path.parents:
        for fleet in _fleets:
            fleet.close()


@pytest.fixture(scope="session")
def fleet_of_2():
    yield from _started(2)


@pytest.fixture(scope="session")
def fleet_of_4():
    yield from _started(4)
