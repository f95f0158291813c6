"""Data and tensor parallel ranks together; CUDA graphs."""

import pytest

from tests.distributed import model_tasks as tasks
from tests.distributed.problems import DEVICE


def test_data_and_heads_are_divided(fleet_of_4):
    fleet_of_4.run(tasks.check_data_and_heads)


@pytest.mark.skipif(DEVICE.type == "cpu", reason="needs GPUs: set FLEXHOP_TEST_DEVICE=cuda")
@pytest.mark.parametrize("method", ["gather", "blocks", "stages"])
def test_a_cuda_graph(fleet_of_2, method):
    fleet_of_2.run(tasks.check_graph, method)
