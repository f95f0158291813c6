"""The backward kernel of Hopper GPUs, compiled in the background, is what Inductor then finds."""

import os
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch

import flexhop
from flexhop.compat import ahead, gluon_versions
from flexhop.offline import Kernel, generate


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Whether Triton's cache had what was compiled, "hit" or "miss", in order.

    This process stands for a worker; the cache is empty, and stays while Inductor changes its
    folder.
    """
    if obstacle := gluon_versions.obstacle():
        pytest.skip(obstacle)
    import triton
    from torch._inductor.runtime import triton_helpers

    found: list[str] = []

    def note(**report: Any) -> None:
        found.append("hit" if report["cache_hit"] else "miss")

    def compile_here(name: str, source: str) -> Future[Any]:
        job: Future[Any] = Future()
        job.set_result(_compile(name, source, tmp_path))
        return job

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(triton.knobs.compilation, "listener", note)
    monkeypatch.setattr(triton_helpers, "set_driver_to_gpu", lambda: None)
    monkeypatch.setattr(ahead, "is_useful", lambda: True)
    monkeypatch.setattr(ahead, "_submit", compile_here)
    monkeypatch.setattr(ahead, "_jobs", {})
    return found


def _compile(name: str, source: str, cache: Path) -> None:
    """Compile as Inductor's workers do."""
    from torch._inductor.codecache import PyCodeCache

    os.environ["TRITON_CACHE_DIR"] = str(cache)
    getattr(PyCodeCache.load(source), name).precompile(warm_cache_only=True)


def _generate() -> Kernel:
    inputs = [
        torch.randn(1, 1, 128, 64, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)
    ]
    options = flexhop.KernelOptions(backend="hopper")
    generated = generate(
        lambda q, k, v: flexhop.flex_attention(q, k, v, kernel_options=options),
        *inputs, grad=True,
    )  # fmt: skip
    return generated.kernel_with("differentiate")


class _Pool:
    """What `finish` asks Inductor's pool of workers."""

    def __init__(self, is_ready: bool) -> None:
        self.is_ready = is_ready

    def use_process_pool(self) -> bool:
        return self.is_ready


def test_workers_find_the_kernel(found: list[str], tmp_path: Path) -> None:
    kernel = _generate()
    assert found == ["miss"]
    _compile(kernel.name, kernel.source, tmp_path)
    assert found == ["miss", "hit"]


def test_one_text_is_begun_once(found: list[str]) -> None:
    _generate()
    torch.compiler.reset()
    _generate()
    assert found == ["miss"]


@pytest.mark.parametrize("is_ready", [False, True])
def test_backward_waits_for_workers_that_it_will_ask(
    is_ready: bool, found: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the pool has not started, Inductor compiles in this process and finds nothing."""
    waited: list[Any] = []
    monkeypatch.setattr(ahead, "AsyncCompile", _Pool(is_ready))
    monkeypatch.setattr(ahead, "wait", waited.extend)
    _generate()
    assert waited == (list(ahead._jobs.values()) if is_ready else [])


def test_failure_is_left_to_inductor(found: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    failed: Future[Any] = Future()
    failed.set_exception(RuntimeError("no compiler"))
    monkeypatch.setattr(ahead, "_submit", lambda name, source: failed)
    monkeypatch.setattr(ahead, "AsyncCompile", _Pool(is_ready=True))
    assert _generate().is_gluon
    (job,) = ahead._jobs.values()
    assert job.done()
    assert found == []


def test_only_so_much_is_begun(found: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "_MOST", 0)
    _generate()
    assert ahead._jobs == {}
    assert found == []


def test_nothing_is_begun_without_a_gpu() -> None:
    """The offline tools forbid caches, and there is no device."""
    if obstacle := gluon_versions.obstacle():
        pytest.skip(obstacle)
    before = dict(ahead._jobs)
    _generate()
    assert ahead._jobs == before
