"""A compiler that aborts costs a candidate, not the process."""

import os
import signal
import warnings
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl
from torch._inductor.codecache import _load_triton_kernel_from_source
from torch._inductor.runtime.compile_tasks import _worker_compile_triton
from triton.runtime.errors import PTXASError

import flexhop
from flexhop import errors, flex_attention
from flexhop.compat.kernels import isolated
from flexhop.lowering import fallback
from flexhop.offline import generate_code
from flexhop.offline.codegen import compiled_by
from flexhop.offline.cubin import compile_kernel, compile_source
from tests.needs import needs_hopper
from tests.processes import new_processes

pytestmark = pytest.mark.filterwarnings("ignore:Please add support for subgraph args")

# A compiler that ends so, as often as there are files beside it, and then compiles.
DYING = """
import os, runpy
from pathlib import Path

lives = sorted(Path(__file__).parent.glob("life*"))
if lives:
    lives[0].unlink()
    print("LLVM ERROR: no luck.", file=__import__("sys").stderr)
    os.kill(os.getpid(), {number})
runpy.run_path({program!r}, run_name="__main__")
"""


def dying(folder: Path, times: int, number: int = signal.SIGABRT) -> Path:
    """A compiler that dies of a signal a few times."""
    for n in range(times):
        (folder / f"life{n}").touch()
    text = DYING.format(number=int(number), program=str(isolated._PROGRAM))
    path = folder / "compiler.py"
    path.write_text(text)
    return path


@pytest.fixture(autouse=True)
def _fresh(tmp_path, monkeypatch):
    """Nothing is in Triton's cache, and nothing is known of failures."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    yield
    fallback.forget()


def score(s, b, h, i, j):
    return s + 0.1 * (i - j)


def operands(dtype=torch.float32):
    return [torch.randn(1, 2, 128, 64, dtype=dtype, requires_grad=True) for _ in range(3)]


def attend(q, k, v):
    return flex_attention(q, k, v, score_mod=score)


def compile_isolated(kernel):
    with isolated.isolated():
        return compile_kernel(kernel, 90)


@needs_hopper
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_machine_code_is_the_same(dtype, tmp_path, monkeypatch):
    (kernel,) = generate_code(attend, *operands(dtype)).templates
    assert kernel.is_gluon is (dtype == torch.bfloat16)
    here = compile_kernel(kernel, 90)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "other"))
    there = compile_isolated(kernel)
    assert (there.binary, there.ptx, there.shared) == (here.binary, here.ptx, here.shared)
    assert "registers" in there.log  # what the compiler prints comes through


@pytest.mark.parametrize("number", [signal.SIGABRT, signal.SIGSEGV])
def test_the_end_of_a_compiler_is_an_error(number, tmp_path, monkeypatch):
    (kernel,) = generate_code(attend, *operands()).templates
    monkeypatch.setattr(isolated, "_PROGRAM", dying(tmp_path, 1, number))
    words = f"^the compiler ended by {number.name}: LLVM ERROR: no luck$"
    with pytest.raises(isolated.CompilerDied, match=words):
        compile_isolated(kernel)
    assert compile_isolated(kernel).registers > 0  # the next process lives


def _serve(strict, tmp_path, monkeypatch):
    """Kernels and warnings of a call whose compiler aborts twice."""
    monkeypatch.setenv("FLEXHOP_STRICT", strict)
    monkeypatch.setattr(isolated, "_PROGRAM", dying(tmp_path, 2))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with compiled_by(compile_isolated):
            found = generate_code(attend, *operands()).templates
    ours = [w for w in caught if issubclass(w.category, errors.KernelFallbackWarning)]
    return found, [str(w.message) for w in ours]


def _tile(kernel):
    return kernel.constants, kernel.num_warps, kernel.num_stages


def test_another_tile_serves(tmp_path, monkeypatch):
    (chosen,) = generate_code(attend, *operands()).templates
    # The graph's own compilation aborts, and so does the same tile when it is tried again.
    (served,), (message,) = _serve("0", tmp_path, monkeypatch)
    assert not list(tmp_path.glob("life*"))
    assert _tile(served) != _tile(chosen)
    assert "CompilerDied: the compiler ended by SIGABRT: LLVM ERROR: no luck. FLEX" in message
    notes = " ".join(flexhop.explain(*operands(), score_mod=score, capability=(9, 0)).notes)
    assert "the compiler ended by SIGABRT" in notes


def test_strict(tmp_path, monkeypatch):
    with pytest.raises(Exception, match="the compiler ended by SIGABRT: LLVM ERROR: no luck"):
        _serve("1", tmp_path, monkeypatch)


def _in_worker(folder, name, source, cache):
    """As Inductor's worker compiles for a GPU that is not there."""
    from torch._inductor.runtime import triton_helpers

    triton_helpers.set_driver_to_gpu = lambda: None
    isolated._PROGRAM = Path(folder) / "compiler.py"
    load = partial(_load_triton_kernel_from_source, name, source)
    try:
        _worker_compile_triton(load, {"TRITON_CACHE_DIR": cache}, {})
    except isolated.CompilerDied as error:
        return str(error), os.getpid()
    return "", os.getpid()


def test_a_worker_lives_on(tmp_path):
    (kernel,) = generate_code(attend, *operands()).templates
    dying(tmp_path, 1)
    job = (_in_worker, str(tmp_path), kernel.name, kernel.source, str(tmp_path / "cache"))
    with ProcessPoolExecutor(1, new_processes()) as worker:
        (first, one), (second, other) = (worker.submit(*job).result() for _ in range(2))
    assert "the compiler ended by SIGABRT" in first
    assert second == "" and one == other


def test_only_our_kernels_are_isolated():
    """Those of Inductor compile as they do without flexhop."""
    q, k, v = operands()
    kernels = generate_code(lambda q, k, v: attend(q.sin(), k.sin(), v).sum(0), q, k, v).kernels
    marks = {kernel.is_template: kernel.inductor_meta.get("isolated") for kernel in kernels}
    assert marks == {True: True, False: None}


def test_this_process_compiles_if_no_other_can(tmp_path, monkeypatch):
    (kernel,) = generate_code(attend, *operands()).templates
    for program in (tmp_path / "none.py", dying(tmp_path, 0)):
        monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / program.stem))
        monkeypatch.setattr(isolated, "_PROGRAM", program)
        assert compile_isolated(kernel).registers > 0
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "no_process"))
    monkeypatch.setattr(isolated._Process, "__init__", _refuse)
    assert compile_isolated(kernel).registers > 0


def _refuse(*_, **__):
    raise OSError("no more processes")


@triton.jit
def wrong(x):
    tl.store(x, tl.inline_asm_elementwise("nonsense $0;", "=r", [], tl.int32, True, 1))


def test_errors_keep_their_class(capsys):
    with isolated.isolated(), pytest.raises(PTXASError, match="nonsense"):
        compile_source(wrong, {"x": "*i32"}, {}, 90)


def test_an_error_before_the_compiler_ends_its_process(monkeypatch):
    started = []
    plain = isolated.subprocess.Popen
    monkeypatch.setattr(
        isolated.subprocess, "Popen", lambda *a, **k: started.append(plain(*a, **k)) or started[-1]
    )

    @triton.jit
    def unknown(x):
        tl.store(x, there_is_none)  # noqa: F821

    with isolated.isolated(), pytest.raises(Exception, match="there_is_none"):
        compile_source(unknown, {"x": "*i32"}, {}, 90)
    (process,) = started
    assert process.returncode is not None
