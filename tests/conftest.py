"""What every test shares: GPUs and their marker, fixed seeds, a clean compiler between tests."""

import gc
import importlib.util
import os
import random
import sys

import numpy as np
import pytest
import torch

from tests.spared_work import spare, spare_dynamo

# A kernel that does not compile is an error here (lowering/fallback.py).
os.environ.setdefault("FLEXHOP_STRICT", "1")
# Dynamo would collect garbage after every compilation; see pytest_collection_finish.
os.environ.setdefault("TORCH_DYNAMO_RUN_GC_AFTER_COMPILE", "0")

spare()


# As many graphs more than after the last collection are collected; see _Graphs.
GRAPH_CLASSES = 1000


def share_gpus() -> None:
    """Spread the processes of a parallel run over the GPUs; before the first use of CUDA."""
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    if "FLEXHOP_TEST_DEVICE" in os.environ:  # the ranks of tests/distributed share all GPUs
        return
    if worker is not None and "CUDA_VISIBLE_DEVICES" not in os.environ:
        count = torch.cuda.device_count()
        if count > 1:
            os.environ["CUDA_VISIBLE_DEVICES"] = str(int(worker.removeprefix("gw")) % count)


share_gpus()


def missing_for_gpu() -> str | None:
    """Why GPU tests cannot run here, or None when they can."""
    if not torch.cuda.is_available():
        return "needs an NVIDIA GPU: torch.cuda.is_available() is False"
    if importlib.util.find_spec("triton") is None:
        return "needs Triton, which is not installed"
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what is marked ``gpu`` where there is none, saying why."""
    reason = missing_for_gpu()
    if reason is None:
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason=reason))


def pytest_collection_finish() -> None:
    """Compilers make millions of objects; looking through all older ones takes a seventh."""
    gc.collect()
    gc.freeze()
    # Most of what a compilation makes ends with it: at 100,000, looking at it before took 3 %.
    gc.set_threshold(1_000_000, 50, 100)


@pytest.fixture(autouse=True)
def _fixed_seeds() -> None:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


def _subclasses(owner: type) -> int:
    """How many classes descend from a class."""
    return sum(1 + _subclasses(one) for one in type.__subclasses__(owner))


class _Graphs:
    """Collects graphs that no test uses any more.

    Every graph of FX has a class of its own, which ends in a cycle, and all of a graph with it.
    What survives is set aside, because the next collection then takes a quarter of a second; what
    of it ends later waits for a collection of everything.
    """

    def __init__(self) -> None:
        self._limit = self._set_aside_limit = 0

    def collect(self) -> None:
        count = _subclasses(torch.fx.GraphModule)
        if count < self._limit:
            return
        if self._limit:
            count = self._collected()
        if count >= self._set_aside_limit:
            if self._set_aside_limit:
                gc.unfreeze()
                count = self._collected()
            self._set_aside_limit = count + 2 * GRAPH_CLASSES
        self._limit = count + GRAPH_CLASSES

    def _collected(self) -> int:
        gc.collect()
        gc.freeze()
        return _subclasses(torch.fx.GraphModule)


_graphs = _Graphs()


@pytest.fixture(autouse=True)
def _fresh_compiler():
    """Give each test Dynamo's limits and caches anew, if anything was compiled before it."""
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()
        _graphs.collect()
        spare_dynamo()
    yield
