"""Inductor's workers import what Hopper kernels need while Dynamo traces."""

import dataclasses
import os
import socket
import subprocess
import sys
import time
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
from flexhop.compat.kernels import gluon_versions, launcher
from flexhop.compat.workers import early as early_workers
from flexhop.compat.workers import orders as worker_orders
from flexhop.compat.workers import parent as worker
from flexhop.compat.workers import warm as warm_workers
from flexhop.templates import hopper
from tests.programs import run_code


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
    monkeypatch.setattr(gluon_versions, "obstacle", lambda: "")
    return pool


def test_workers_start_when_asked(workers: _Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    """Long before the first graph, and before CUDA is initialised."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    flexhop.install(workers=True)
    assert workers.asked == ["ready"]


# No pool: the test is about this process.
_FIRST_GRAPH = """
import sys, torch, flexhop
from flexhop.compat.workers import early as early_workers
from flexhop.compat.workers import warm as warm_workers
from flexhop.offline import generate_code
early_workers.begin = lambda: None
warm_workers.start_pool = lambda: True
flexhop.install(workers=True)
known = set(sys.modules)
q = torch.zeros(1, 2, 256, 128, dtype=torch.bfloat16, requires_grad=True)
generate_code(flexhop.flex_attention, q, q, q, grad=True)
names = ("flexhop.lowering", "flexhop.templates", "sympy", "torch._inductor.codegen.triton")
print([name for name in sys.modules if name not in known and name.startswith(names)])
"""


def test_a_first_graph_finds_kernels_and_symbols_imported() -> None:
    """Inductor asks for them one by one: 0.2 to 0.5 s of a model's first step."""
    found = run_code(_FIRST_GRAPH)
    assert (found.returncode, found.stdout.strip()) == (0, "[]"), found.stderr


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


# A job of builtins alone: it imports nothing. Where a GPU was used, the workers' parent starts
# when the import of Dynamo begins.
_LOOK = """
import os, sys, torch, flexhop
from functools import partial
from flexhop.compat.workers import early as early_workers
os.sched_getaffinity = lambda pid: range(early_workers._FEWEST_CORES)
torch.cuda.is_initialized = lambda: {is_early}
begin = early_workers.begin
early_workers.begin = lambda: (print("torch._dynamo.convert_frame" in sys.modules), begin())
import torch._dynamo
torch.cuda.is_initialized = lambda: False
os.environ["LATE"] = "1"
from torch._inductor.async_compile import AsyncCompile
from flexhop.compat.workers import warm as warm_workers
from flexhop.compat.workers import parent as worker
records = "flexhop.templates.hopper.records"
assert warm_workers.start_pool(records, "there_is.none")
has = "[n in __import__('sys').modules for n in " + str([records, *warm_workers.NEEDED]) + "]"
frozen = "__import__('gc').get_freeze_count() > 0"
alone = repr(worker.MODULES) + " not in __import__('os').environ"
late = "__import__('os').environ['LATE'] == '1'"
pool = AsyncCompile.process_pool()
print(pool.submit(partial(eval, f"[*{{has}}, {{frozen}}, {{alone}}, {{late}}]")).result())
print([started.process is pool.process for started in early_workers._started])
"""


@pytest.mark.parametrize("is_early", [False, True])
def test_workers_have_what_their_parent_imported(is_early: bool) -> None:
    if obstacle := gluon_versions.obstacle():
        pytest.skip(obstacle)
    result = subprocess.run(
        [sys.executable, "-c", _LOOK.format(is_early=is_early)],
        capture_output=True, text=True, check=False,
        env=os.environ | {"TORCHINDUCTOR_COMPILE_THREADS": "2"},
    )  # fmt: skip
    begun, adopted = (["False"], [True]) if is_early else ([], [])
    assert result.stdout.splitlines() == [*begun, str([True] * 7), str(adopted)], result.stderr


class _Process:
    """An early parent, which takes no orders."""

    def __init__(self, code: int | None) -> None:
        self.code = code

    def poll(self) -> int | None:
        return self.code


def _ended() -> dict[str, Any]:
    return {"process": _Process(1)}


def _waited_too_long() -> dict[str, Any]:
    return {"started": time.monotonic() - 2 * early_workers.PATIENCE}


def _of_another_process() -> dict[str, Any]:
    return {"owner": -1}


@pytest.mark.parametrize("change", [dict, _ended, _waited_too_long, _of_another_process])
def test_an_early_parent_is_used_if_it_lives(
    change: Callable[[], dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise Inductor starts its own."""
    ours, theirs = socket.socketpair()
    found = early_workers._Early(
        _Process(None), ours, {"A": "1", "B": "1"}, time.monotonic(), os.getpid()
    )  # type: ignore[arg-type]
    found = dataclasses.replace(found, **change())
    monkeypatch.setattr(early_workers, "_started", [found])
    command = [sys.executable, "main.py", "--workers=2", f"--read-fd={ours.fileno()}"]
    with theirs, ours:
        pipes = [os.dup(theirs.fileno())]
        command[-1] = f"--read-fd={pipes[0]}"
        process = early_workers._hand_over(
            command, env={"A": "2"}, pass_fds=pipes, stdout=None, stderr=None
        )
        if change is not dict:
            assert process is None
            return
        assert process is found.process
        _, descriptors, *_ = socket.recv_fds(theirs, 1, 8)
        order = worker_orders._read(theirs)
        monkeypatch.setenv("A", "1")
        monkeypatch.setenv("B", "1")
        arguments = worker_orders._prepared(order, descriptors)
        assert arguments == ["main.py", "--workers=2", f"--read-fd={descriptors[0]}"]
        assert (os.environ["A"], "B" in os.environ) == ("2", False)


@pytest.mark.parametrize(
    ("threads", "cores", "is_begun"),
    [("", 8, True), ("8", 8, True), ("1", 8, False), ("8", 2, False)],
)
def test_no_early_parent_without_workers_or_cores(
    threads: str, cores: int, is_begun: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(cores), raising=False)
    monkeypatch.delenv("TORCHINDUCTOR_COMPILE_THREADS", raising=False)
    if threads:
        monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", threads)
    assert early_workers._may_begin() is is_begun


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
    monkeypatch.setattr(gluon_versions, "obstacle", lambda: "not checked")


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
    if obstacle := gluon_versions.obstacle():
        pytest.skip(obstacle)
    text = (
        "import sys; from flexhop.compat.kernels import gluon; "
        "from flexhop.compat.workers import warm as warm_workers; "
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
