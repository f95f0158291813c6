"""Fleets of two and four processes, started when a test first asks for them."""

from pathlib import Path

import pytest
import torch

from tests.distributed.fleet import Fleet
from tests.distributed.problems import DEVICE

FLEETS = {size: Fleet(size) for size in (2, 4)}


def pytest_runtest_teardown(nextitem: pytest.Item | None) -> None:
    """End fleets before other tests: threads of idle ranks took a tenth of two cores."""
    if nextitem is None or Path(__file__).parent not in nextitem.path.parents:
        for fleet in FLEETS.values():
            fleet.close()


def _fleet(size: int) -> Fleet:
    if DEVICE.type == "cuda" and torch.cuda.device_count() < size:
        pytest.skip(f"needs {size} GPUs: torch.cuda.device_count() is {torch.cuda.device_count()}")
    return FLEETS[size]


@pytest.fixture(scope="session")
def fleet_of_2():
    return _fleet(2)


@pytest.fixture(scope="session")
def fleet_of_4():
    return _fleet(4)
