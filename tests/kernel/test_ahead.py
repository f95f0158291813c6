"""The backward kernel of Hopper GPUs, compiled in the background, is what Inductor then finds."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

import flexhop
from flexhop.compat import ahead, gluon_versions
from flexhop.offline import Kernel, generate


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Whether Triton's cache had what was compiled, "hit" or "miss", in order.

    The cache is empty, and stays while Inductor changes its folder.
    """
    if obstacle := gluon_versions.obstacle():
        pytest.skip(obstacle)
    import triton
    from torch._inductor.runtime import triton_helpers

    found: list[str] = []

    def note(**report: Any) -> None:
        found.append("hit" if report["cache_hit"] else "miss")

    compile_kernel = ahead._compile

    def compile_here(kernel: Any) -> None:
        os.environ["TRITON_CACHE_DIR"] = str(tmp_path)
        compile_kernel(kernel)

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(triton.knobs.compilation, "listener", note)
    monkeypatch.setattr(triton_helpers, "set_driver_to_gpu", lambda: None)
    monkeypatch.setattr(ahead, "is_useful", lambda: True)
    monkeypatch.setattr(ahead, "_compile", compile_here)
    monkeypatch.setattr(ahead, "_jobs", {})
    return found


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


def _compile_as_inductor_does(kernel: Kernel) -> None:
    from torch._inductor.codecache import PyCodeCache

    getattr(PyCodeCache.load(kernel.source), kernel.name).precompile(warm_cache_only=True)


def test_inductor_finds_the_kernel(jobs: list[str], tmp_path: Path) -> None:
    kernel = _generate()
    assert jobs == ["miss"]  # and is done: the backward graph waited for it
    os.environ["TRITON_CACHE_DIR"] = str(tmp_path)
    _compile_as_inductor_does(kernel)
    assert jobs == ["miss", "hit"]


def test_failure_is_left_to_inductor(jobs: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(kernel: Any) -> None:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(ahead, "_compile", fail)
    assert _generate().is_gluon
    (job,) = ahead._jobs.values()
    assert str(job.exception()) == "no compiler"
    assert jobs == []


def test_only_so_much_is_begun(monkeypatch: pytest.MonkeyPatch, jobs: list[str]) -> None:
    """Python waits for threads when it ends."""
    monkeypatch.setattr(ahead, "_MOST", 0)
    _generate()
    assert ahead._jobs == {}
    assert jobs == []


def test_nothing_is_begun_without_a_gpu() -> None:
    """The offline tools forbid caches, and there is no device."""
    if obstacle := gluon_versions.obstacle():
        pytest.skip(obstacle)
    before = dict(ahead._jobs)
    _generate()
    assert ahead._jobs == before
