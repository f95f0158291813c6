"""Fleets of two and four processes, started when a test first asks for them."""

from collections.abc import Iterator

import pytest
import torch

from tests.distributed.fleet import Fleet
from tests.distributed.problems import DEVICE


def _started(size: int) -> Iterator[Fleet]:
    if DEVICE.type == "cuda" and torch.cuda.device_count() < size:
        pytest.skip(f"needs {size} GPUs: torch.cuda.device_count() is {torch.cuda.device_count()}")
    fleet = Fleet(size)
    yield fleet
    fleet.close()


@pytest.fixture(scope="session")
def fleet_of_2():
    yield from _started(2)


@pytest.fixture(scope="session")
def fleet_of_4():
    yield from _started(4)
