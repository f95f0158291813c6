"""Context parallelism against one process: every mask and mod, layout and way of exchange."""

import pytest

from tests.distributed import tasks
from tests.distributed.problems import PROBLEMS, Sizes

METHODS = [
    {"layout": "zigzag", "method": "gather"},
    {"layout": "contiguous", "method": "blocks"},
    {"layout": "greedy", "method": "blocks", "groups": 2},
    {"layout": "greedy", "method": "stages"},
]
BY_HEADS = {"heads": 2}
RANDOM = range(8)


@pytest.mark.parametrize("name", [*PROBLEMS, *RANDOM], ids=str)
def test_two_ranks(fleet_of_2, name):
    fleet_of_2.run(tasks.check_methods, name, [*METHODS, BY_HEADS], Sizes())


@pytest.mark.parametrize(
    "name", ["window, learned ALiBi", "documents, relative bias", 11], ids=str
)
def test_four_ranks(fleet_of_4, name):
    fleet_of_4.run(tasks.check_methods, name, METHODS, Sizes())


@pytest.mark.parametrize("name", ["window by head, gate", "documents, relative bias"])
def test_sequence_and_heads(fleet_of_4, name):
    fleet_of_4.run(tasks.check_two_dimensions, name)


@pytest.mark.parametrize("sizes", [Sizes(5), Sizes(17), Sizes(64), Sizes(130, (32, 16))], ids=str)
def test_ranks_without_work(fleet_of_4, sizes):
    fleet_of_4.run(tasks.check_methods, "causal", METHODS, sizes)


@pytest.mark.parametrize("name", ["causal", "window, learned ALiBi", "documents, relative bias"])
@pytest.mark.parametrize("method", ["gather", "blocks", "stages"])
def test_bytes_are_those_of_the_plan(fleet_of_4, name, method):
    for found, foretold in fleet_of_4.run(tasks.count_bytes, name, method):
        assert found == foretold
