"""Inductor's workers import what Hopper kernels need while Dynamo traces."""

import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._inductor import compile_fx
from torch._inductor.fx_passes import joint_graph
from torch.fx.experimental.proxy_tensor import make_fx

import flexhop
from flexhop import lowering
from flexhop.compat import launcher, warm_workers, worker
from flexhop.lowering.hopper import versions
from flexhop.templates import hopper


class _Workers:
    """What is asked of Inductor's pool, in order."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.pickler: Any = None

    def use_process_pool(self) -> bool:
        self.asked.append("ready")
        return False

    def process_pool(self) -> SimpleNamespace:
        return SimpleNamespace(submit=self.submit, pickler=self.pickler)

    def submit(self, job: Callable[..., None], modules: tuple[str, ...]) -> Future[None]:
        self.asked.append(job)
        self.modules = modules
        return Future()


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> _Workers:
    """Three workers and a Hopper GPU."""
    pool = _Workers()
    monkeypatch.setenv("TRITON_CACHE_DIR", "unused")
    monkeypatch.setattr(warm_workers, "AsyncCompile", pool)
    monkeypatch.setattr(warm_workers, "get_compile_threads", lambda: 3)
    monkeypatch.setattr(warm_workers, "_has_started", lambda: True)
    monkeypatch.setattr(warm_workers, "_last", [])
    monkeypatch.setattr(launcher, "build_driver", lambda: pool.asked.append("driver"))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(versions, "obstacle", lambda: "")
    return pool


def test_workers_start_when_asked(workers: _Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    """Long before the first graph, and before CUDA is initialised."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    flexhop.install(workers=True)
    assert workers.asked == ["ready"]


def test_every_worker_imports(workers: _Workers) -> None:
    """Behind the question whether the pool is ready, which would wait for the imports."""
    lowering.expect_kernels()
    assert workers.asked == ["driver", "ready", *[warm_workers.prepare_worker] * 3]


def test_workers_whose_parent_has_imported_do_not(
    workers: _Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    def create(modules: tuple[str, ...]) -> None:
        workers.asked.append("parent")
        workers.modules, workers.pickler = modules, worker.Pickler()

    monkeypatch.setattr(warm_workers, "_has_started", lambda: False)
    monkeypatch.setattr(warm_workers, "_create_pool", create)
    lowering.expect_kernels()
    assert workers.asked == ["driver", "parent", "ready"]
    assert workers.modules == hopper.MODULES


# A job of builtins alone: it imports nothing.
_LOOK = """
from functools import partial
from torch._inductor.async_compile import AsyncCompile
from flexhop.compat import warm_workers, worker
records = "flexhop.templates.hopper.records"
assert warm_workers.start_pool(records, "there_is.none")
has = f"[n in __import__('sys').modules for n in {[records, *warm_workers._NEEDED]}]"
frozen = "__import__('gc').get_freeze_count() > 0"
alone = f"{worker.MODULES!r} not in __import__('os').environ"
print(AsyncCompile.process_pool().submit(partial(eval, f"[*{has}, {frozen}, {alone}]")).result())
"""


def test_workers_have_what_their_parent_imported() -> None:
    if obstacle := versions.obstacle():
        pytest.skip(obstacle)
    result = subprocess.run(
        [sys.executable, "-c", _LOOK], capture_output=True, text=True, check=False,
        env=os.environ | {"TORCHINDUCTOR_COMPILE_THREADS": "2"},
    )  # fmt: skip
    assert result.stdout.strip() == str([True] * 6), result.stderr


def test_workers_that_inductor_may_have_ended_import_again(
    workers: _Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = iter([100.0, 129.0, 131.0])
    monkeypatch.setattr(warm_workers, "time", SimpleNamespace(monotonic=lambda: next(seconds)))
    asked = []
    for _ in range(3):
        lowering.expect_kernels()
        asked.append(workers.asked.count(warm_workers.prepare_worker))
    assert asked == [3, 3, 6]


def _forbid_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warm_workers, "get_compile_threads", lambda: 1)


def _older_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))


def _unknown_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "obstacle", lambda: "not checked")


def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)


@pytest.mark.parametrize("without", [_forbid_workers, _older_gpu, _unknown_triton, _no_gpu])
def test_nothing_is_imported_in_vain(
    without: Callable[[pytest.MonkeyPatch], None],
    workers: _Workers,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    without(monkeypatch)
    lowering.expect_kernels()
    assert workers.asked == []


def test_a_worker_has_what_a_kernel_imports() -> None:
    """Later imports of a generated kernel find everything there."""
    if obstacle := versions.obstacle():
        pytest.skip(obstacle)
    text = (
        "import sys; from flexhop.compat import gluon, warm_workers; "
        "from flexhop.templates import hopper; "
        "warm_workers.prepare_worker(hopper.MODULES); before = set(sys.modules); "
        "exec(gluon._IMPORTS + hopper.IMPORTS); print(set(sys.modules) - before); "
        "import gc; print(gc.get_freeze_count() > 0)"
    )
    result = subprocess.run(
        [sys.executable, "-c", text], capture_output=True, text=True, check=False
    )
    assert result.stdout.split() == ["set()", "True"], result.stderr


def test_a_graph_finds_the_patterns_registered():
    """Inductor asks by device: another spelling of it would register them once more."""
    warm_workers.register_patterns(torch.device("cpu"))
    before = joint_graph.lazy_init.cache_info().misses
    graph = make_fx(lambda x: x + 1)(torch.ones(2))
    compile_fx._recursive_joint_graph_passes(graph, input_device=torch.device("cpu"))
    assert joint_graph.lazy_init.cache_info().misses == before
