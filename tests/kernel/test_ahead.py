"""The backward kernel of Hopper GPUs: what one worker compiles ahead, the others find."""

import functools
import importlib
import os
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._inductor.codecache import PyCodeCache, _load_triton_kernel_from_source
from torch._inductor.runtime.compile_tasks import _worker_compile_triton
from torch._inductor.utils import fresh_cache

import flexhop
from flexhop.compat.graphs import ahead
from flexhop.compat.kernels import gluon_versions, launcher
from flexhop.compat.workers import chained as chained_jobs
from flexhop.masks import causal
from flexhop.offline import Generated, Kernel, generate_code
from flexhop.offline.kernel import read_kernel
from tests.processes import new_processes


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Name and text of every kernel that is handed to a worker, who does nothing."""
    if obstacle := gluon_versions.obstacle():
        pytest.skip(obstacle)
    handed: list[tuple[str, str]] = []

    def submit(name: str, source: str) -> Future[Any]:
        handed.append((name, source))
        job: Future[Any] = Future()
        job.set_result(None)
        return job

    monkeypatch.setattr(ahead, "is_useful", lambda: True)
    monkeypatch.setattr(ahead, "_submit", submit)
    monkeypatch.setattr(ahead, "_jobs", {})
    return handed


def _generate_both(
    mask: flexhop.BlockMask | None = None, *, is_deterministic: bool = False, following: int = 0
) -> Generated:
    inputs = [
        torch.randn(1, 1, 128, 64, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)
    ]
    options = flexhop.KernelOptions(backend="hopper", deterministic=is_deterministic)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = flexhop.flex_attention(q, k, v, block_mask=mask, kernel_options=options)
        for _ in range(following):
            out = out.sin()
        return out

    return generate_code(attend, *inputs, grad=True)


def _generate(mask: flexhop.BlockMask | None = None, *, is_deterministic: bool = False) -> Kernel:
    generated = _generate_both(mask, is_deterministic=is_deterministic)
    return generated.kernel_with("differentiate")


def _compile(name: str, source: str, cache: str) -> str:
    """Compile as Inductor's workers do: "hit" or "miss", as Triton's cache had it or not."""
    os.environ["TRITON_CACHE_DIR"] = cache
    import triton
    from torch._inductor.runtime import triton_helpers

    found: list[str] = []
    triton.knobs.compilation.listener = lambda **report: found.append(
        "hit" if report["cache_hit"] else "miss"
    )
    triton_helpers.set_driver_to_gpu = lambda: None  # there is none
    getattr(PyCodeCache.load(source), name).precompile(warm_cache_only=True)
    return " ".join(found)


@pytest.fixture(scope="module")
def workers() -> Iterator[list[ProcessPoolExecutor]]:
    """Two processes: the second has nothing of what the first knows but its files."""
    with (
        ProcessPoolExecutor(1, new_processes()) as first,
        ProcessPoolExecutor(1, new_processes()) as second,
    ):
        yield [first, second]


@pytest.mark.parametrize("is_deterministic", [False, True])
@pytest.mark.parametrize("has_mask", [False, True])
def test_workers_find_the_kernel(
    has_mask: bool,
    is_deterministic: bool,
    begun: list[tuple[str, str]],
    workers: list[ProcessPoolExecutor],
    tmp_path: Path,
) -> None:
    mask = flexhop.create_block_mask(causal, None, None, 128, 128, "cpu") if has_mask else None
    kernel = _generate(mask, is_deterministic=is_deterministic)
    (early,) = begun
    texts = [early, (kernel.name, kernel.source)]
    found = [
        worker.submit(_compile, *text, str(tmp_path)).result()
        for worker, text in zip(workers, texts, strict=True)
    ]
    assert found == ["miss", "hit"]


def test_one_text_is_begun_once(begun: list[tuple[str, str]]) -> None:
    _generate()
    torch.compiler.reset()
    _generate()
    assert len(begun) == 1


def test_it_is_begun_again_when_caches_are_emptied() -> None:
    job: Future[None] = Future()
    job.set_result(None)
    ahead._jobs["text"] = job
    with fresh_cache():
        assert "text" not in ahead._jobs


class _Pool:
    """What `finish` asks Inductor's pool of workers."""

    def __init__(self, is_ready: bool) -> None:
        self.is_ready = is_ready

    def use_process_pool(self) -> bool:
        return self.is_ready


@pytest.mark.parametrize("is_ready", [False, True])
def test_backward_waits_for_workers_that_it_will_ask(
    is_ready: bool, begun: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the pool has not started, Inductor compiles in this process and finds nothing."""
    waited: list[Any] = []
    monkeypatch.setattr(ahead, "AsyncCompile", _Pool(is_ready))
    monkeypatch.setattr(ahead, "wait", waited.extend)
    _generate()
    assert len(begun) == 1
    assert waited == (list(ahead._jobs.values()) if is_ready else [])


class _StartingPool:
    """Workers that are starting: whoever sends them a kernel waits for `started`."""

    def __init__(self) -> None:
        self.started = threading.Event()

    def use_process_pool(self) -> bool:
        return False

    def process_pool(self) -> SimpleNamespace:
        return SimpleNamespace(submit=self._submit)

    def _submit(self, job: Any) -> Future[int]:
        assert self.started.wait(30)
        done: Future[int] = Future()
        done.set_result(16)
        return done


def test_nothing_waits_for_workers_that_are_starting(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = _StartingPool()
    monkeypatch.setattr(ahead, "AsyncCompile", pool)
    monkeypatch.setattr(ahead, "get_compile_threads", lambda: 2)
    job = ahead._submit("kernel", "text")
    assert not job.done()
    pool.started.set()
    assert job.result(30) == 16


def test_failure_is_left_to_inductor(
    begun: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    failed: Future[Any] = Future()
    failed.set_exception(RuntimeError("no compiler"))
    monkeypatch.setattr(ahead, "_submit", lambda name, source: failed)
    monkeypatch.setattr(ahead, "AsyncCompile", _Pool(is_ready=True))
    assert _generate().is_gluon
    (job,) = ahead._jobs.values()
    assert job.done()


def test_only_so_much_is_begun(
    begun: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ahead, "_MOST", 0)
    _generate()
    assert ahead._jobs == {}
    assert begun == []


def _stripes(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    """Its kernel is tried with visible keys first, and with hidden ones if that spills."""
    return torch.where((q - k) % 7 == 0, s, s * 0.5)


@pytest.mark.parametrize(("workers", "expected"), [(8, [False, True]), (2, [])])
def test_the_next_kernel_to_try_is_compiled_beside_the_first(
    workers: int,
    expected: list[bool],
    begun: list[tuple[str, str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Unless there are few workers."""
    counts: list[int] = []

    def refuse(choice: Any) -> int:
        counts.append(len(begun))
        return 10_000 if len(counts) == 1 else 0

    monkeypatch.setattr(ahead, "is_useful", lambda: False)
    monkeypatch.setattr(ahead, "_may_compile", lambda: True)
    monkeypatch.setattr(ahead, "get_compile_threads", lambda: workers)
    monkeypatch.setattr(ahead, "local_memory", refuse)
    inputs = [torch.zeros(1, 2, 1024, 128, dtype=torch.bfloat16) for _ in range(3)]
    options = flexhop.KernelOptions(backend="hopper")
    generated = generate_code(
        lambda q, k, v: flexhop.flex_attention(q, k, v, _stripes, kernel_options=options), *inputs
    )
    (kernel,) = generated.templates
    assert counts[0] == len(expected)
    hidden = "HIDES_KEYS = gl.constexpr(True)"
    assert hidden in kernel.source
    assert [hidden in text for _, text in begun] == expected


def test_nothing_is_begun_without_a_gpu() -> None:
    """The offline tools forbid caches, and there is no device."""
    if obstacle := gluon_versions.obstacle():
        pytest.skip(obstacle)
    before = dict(ahead._jobs)
    _generate()
    assert ahead._jobs == before


def test_launcher_is_built_for_the_kernel(
    begun: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the thread builds is what Triton asks its cache for when the kernel is there."""
    if not launcher.is_needed():
        pytest.skip("this Triton has one launcher for all kernels")
    choices: list[Any] = []
    texts: list[str] = []
    monkeypatch.setattr(launcher, "build", choices.append)
    driver = launcher._driver()

    def build(*, src: str, **_: Any) -> Any:
        texts.append(src)
        return SimpleNamespace(launch=None)

    monkeypatch.setattr(driver, "compile_module_from_src", build)
    monkeypatch.setattr(driver, "library_dirs", list)  # there is no libcuda
    _generate()
    assert len(choices) == 3  # the foretold one is filled twice
    for choice in choices:
        request = choice.bmreq
        module = PyCodeCache.load_by_key_path(request.module_cache_key, request.module_path)
        kernel = getattr(module, request.kernel_name)
        (config,) = kernel.configs
        meta = kernel._create_compile_meta(config)
        gluon = importlib.import_module("triton.experimental.gluon._runtime")
        source = gluon.GluonASTSource(
            kernel.fn, meta["signature"], meta["constants"], meta["configs"][0]
        )
        launcher._build_for(request.module_path)
        driver.CudaLauncher(source, launcher._METADATA)
        early, asked = texts[-2:]
        assert early == asked


def test_filling_a_template_executes_nothing(begun: list[tuple[str, str]]) -> None:
    """Only whoever compiles a kernel needs its functions."""
    with fresh_cache():
        _generate()
        assert begun
        assert PyCodeCache.modules == []


@pytest.mark.parametrize(("following", "is_begun"), [(0, False), (50, True)])
def test_forward_kernel_is_compiled_while_its_graph_is_lowered(
    following: int,
    is_begun: bool,
    begun: list[tuple[str, str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If much follows. Inductor's job for it waits: its text is the same for Triton's cache."""
    announced: list[tuple[str, str]] = []

    def submit(name: str, source: str) -> Future[Any]:
        begun.append((name, source))
        return Future()

    monkeypatch.setattr(ahead, "_submit", submit)
    monkeypatch.setattr(ahead, "_may_compile", lambda: True)
    monkeypatch.setattr(ahead, "get_compile_threads", lambda: 8)
    monkeypatch.setattr(ahead, "AsyncCompile", _Pool(is_ready=True))
    monkeypatch.setattr(ahead, "wait", lambda jobs: None)
    monkeypatch.setattr(
        chained_jobs, "announce", lambda name, source, job: announced.append((name, source))
    )
    mask = flexhop.create_block_mask(causal, None, None, 128, 128, "cpu")
    generated = _generate_both(mask, following=following)
    asked = [generated.kernel_with(name) for name in ("differentiate", "attend_steps")]
    asked = asked[: 1 + is_begun]
    assert [chained_jobs._functions(*k) for k in begun] == [
        chained_jobs._functions(k.name, k.source) for k in asked
    ]
    assert [read_kernel(*k).meta["signature"] for k in begun] == [
        k.meta["signature"] for k in asked
    ]
    assert announced == begun[1:]  # the backward kernel is begun first


def test_a_job_waits_for_another_that_compiles_its_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any other job is submitted at once."""
    submitted: list[Any] = []

    def submit(job: Any, *args: Any) -> Future[str]:
        submitted.append(args)
        done: Future[str] = Future()
        done.set_result("compiled")
        return done

    pool = SimpleNamespace(submit=submit)
    monkeypatch.setattr(chained_jobs, "AsyncCompile", SimpleNamespace(process_pool=lambda: pool))
    monkeypatch.setattr(chained_jobs, "_early", {})
    early: Future[int] = Future()
    text = "# {} \n@gluon.jit\ndef kernel(): pass\n{} = kernel\n"
    chained_jobs.announce("triton_a", text.format("a", "triton_a"), early)
    loads = [
        functools.partial(_load_triton_kernel_from_source, f"triton_{n}", body)
        for n, body in (("b", text.format("b", "triton_b")), ("c", "@gluon.jit\ndef f(): pass"))
    ]
    waits, other = (pool.submit(_worker_compile_triton, load, {}, {}) for load in loads)
    assert other.result(1) == "compiled"
    assert not waits.done()
    assert [args[0] for args in submitted] == [loads[1]]
    early.set_exception(RuntimeError("no compiler"))  # then Inductor compiles as ever
    assert waits.result(30) == "compiled"
    assert submitted[-1][0] is loads[0]
