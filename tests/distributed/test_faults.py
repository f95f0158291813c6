"""Mistakes on a mesh: named on every rank, and never a collective that waits for ever."""

import socket

from tests.distributed import fault_tasks as tasks
from tests.processes import new_processes


def test_unequal_batches_are_named(fleet_of_2):
    for text in fleet_of_2.run(tasks.unequal_batches):
        assert "query [1, 2, 32, 8] torch.float32" in text
        assert "query [2, 2, 32, 8] torch.float32" in text
        assert "on rank 1" in text


def test_unequal_batches_are_named_when_compiling(fleet_of_2):
    for text in fleet_of_2.run(tasks.unequal_batches_compiled):
        assert "query [2, 2, 32, 8] torch.float64" in text


def test_unequal_plans_are_named(fleet_of_2):
    for text in fleet_of_2.run(tasks.unequal_plans):
        assert "disagree about the plan" in text
        assert "on every rank" in text


def test_wrong_meshes(fleet_of_2):
    for size, heads, dims in fleet_of_2.run(tasks.wrong_meshes):
        assert size == "mesh has 2 ranks, but the plan is for 4."
        assert "(1, 2)" in heads
        assert "(2, 1)" in dims


def test_calls_outside_of_the_plan(fleet_of_2):
    for said in fleet_of_2.run(tasks.calls_outside_of_the_plan):
        assert "not one of the plan's masks" in said["mask"]
        assert "None included" in said["none"]
        assert "key is on meta, but the mesh is of " in said["device"]
        assert "query has 64 tokens" in said["tokens"]
        assert "decode_attention" in said["cache"]
        assert "PackedSequences" in said["offsets"]
        assert "has 32 entries, but the plan is for 64 tokens" in said["shard"]
        assert "every rank has 32 tokens" in said["unshard"]


def test_a_rank_that_dies_is_an_error_on_the_others(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = new_processes()
    ranks = [
        context.Process(target=tasks.die, args=(rank, port, str(tmp_path))) for rank in (0, 1)
    ]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(120)
        assert rank.exitcode is not None
    seconds, error = (tmp_path / "told").read_text().split()
    assert float(seconds) < 20
    assert error in ("RuntimeError", "DistBackendError")
