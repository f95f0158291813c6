"""DTensor operands: heads and batches divided among ranks, results as on one."""

import pytest
from torch.distributed.tensor import Replicate, Shard

from tests.distributed import tensor_tasks as tasks


@pytest.mark.parametrize("name", tasks.PLACEMENTS)
def test_eager(fleet_of_4, name):
    fleet_of_4.run(tasks.check_placements, name)


def test_captured_dtensors(fleet_of_4):
    fleet_of_4.run(tasks.check_captured_dtensors)


def test_keys_of_one_head_are_shared(fleet_of_4):
    fleet_of_4.run(tasks.check_shared_keys)


def test_dropout_is_that_of_one_process(fleet_of_4):
    fleet_of_4.run(tasks.check_dropout)


def test_compiled(fleet_of_4):
    fleet_of_4.run(tasks.check_compiled)


def test_recipe_for_local_map(fleet_of_4):
    fleet_of_4.run(tasks.check_local_map)


@pytest.mark.parametrize(
    ("query", "key", "words"),
    [
        ([Shard(2), Replicate()], [Shard(2), Replicate()], "context_parallel"),
        ([Shard(3), Replicate()], [Shard(3), Replicate()], "query.redistribute"),
        ([Shard(1), Replicate()], [Shard(1), Replicate()], "3 heads cannot be divided by 2 ranks"),
        ([Shard(0), Replicate()], [Replicate(), Replicate()], "key.redistribute"),
    ],
)
def test_refused_placements(fleet_of_4, query, key, words):
    for text in fleet_of_4.run(tasks.refusal, query, key):
        assert words in text


def test_refused_partial_sums(fleet_of_4):
    for text in fleet_of_4.run(tasks.refuse_partial):
        assert "P(sum)" in text or "Partial" in text
        assert "query.redistribute" in text
