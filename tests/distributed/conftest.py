"""Fleets of two and four processes, started when a test first asks for them."""

import pytest

from tests.distributed.fleet import Fleet


@pytest.fixture(scope="session")
def fleet_of_2():
    fleet = Fleet(2)
    yield fleet
    fleet.close()


@pytest.fixture(scope="session")
def fleet_of_4():
    fleet = Fleet(4)
    yield fleet
    fleet.close()
