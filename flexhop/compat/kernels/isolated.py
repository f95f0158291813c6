"""Triton: compile a kernel in a process of its own, whose end does not end this one.

LLVM aborts if one of its assertions fails. In this process that would end the user's program, and
in one of Inductor's workers it would fail all their jobs. Triton's Python part, from a function to
Triton's text, stays here: it is short, and it knows the user's modules. All stages behind it run
in the other process (compiler_process.py), which starts meanwhile. An error there is raised here,
and so is its end by a signal. Both processes mend what LLVM gets wrong (`mend`), and only in
flexhop's kernels. Inductor's own kernels beside them are compiled here, and mended with Triton 3.6
(compat/graphs/mended.py). Names are the same in torch 2.11 to 2.15 and in Triton 3.6 to 3.9.
"""

from __future__ import annotations

import functools
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from torch._inductor.runtime.triton_heuristics import CachingAutotuner

from flexhop.compat.kernels.compiler_process import mend

__all__ = ["MENDED", "CompilerDied", "Marked", "install", "isolated", "mended"]

# In Inductor's metadata of a kernel: compiled in isolation, or here; both as one of flexhop.
_ISOLATED, MENDED = "isolated", "mended"
_PROGRAM = Path(__file__).with_name("compiler_process.py")
_TELLING = ("Assertion", "LLVM ERROR", "UNREACHABLE")  # in the line of stderr that says why

# Whether Triton compiles a kernel of flexhop, and the processes that it started, if it may.
_is_own: ContextVar[bool] = ContextVar("is_own", default=False)
_open: ContextVar[list[_Process] | None] = ContextVar("open", default=None)


class CompilerDied(RuntimeError):
    """The compiler's process was ended by a signal."""


class Marked:
    """Part of a class of Inductor's kernels, which any process compiles in isolation."""

    @classmethod
    def inductor_meta_common(cls) -> dict[str, Any]:
        """What Inductor knows of a kernel when it compiles it."""
        return {**super().inductor_meta_common(), _ISOLATED: True}  # type: ignore[misc]


@contextmanager
def isolated() -> Iterator[None]:
    """What Triton compiles in here for NVIDIA GPUs, it compiles in processes of their own."""
    processes: list[_Process] = []
    token = _open.set(processes)
    try:
        with mended():
            yield
    finally:
        _open.reset(token)
        for process in processes:
            process.close()


@contextmanager
def mended() -> Iterator[None]:
    """What Triton compiles in here, it compiles as a kernel of flexhop."""
    install()
    token = _is_own.set(True)
    try:
        yield
    finally:
        _is_own.reset(token)


@functools.cache
def install() -> None:
    """Let Inductor compile marked kernels in isolation. They import this, also in a worker."""
    from triton.backends import backends

    precompile = CachingAutotuner._precompile_config

    @functools.wraps(precompile)
    def precompile_isolated(self: Any, *args: Any, **keywords: Any) -> Any:
        with _as_marked(self):
            return precompile(self, *args, **keywords)

    CachingAutotuner._precompile_config = precompile_isolated
    if "nvidia" in backends:
        compiler: Any = backends["nvidia"].compiler
        compiler.add_stages = _for_own_kernels(compiler.add_stages)
        compiler.hash = _with_mends(compiler.hash)


def _as_marked(kernel: CachingAutotuner) -> AbstractContextManager[None]:
    if kernel.inductor_meta.get(_ISOLATED):
        return isolated()
    is_own = kernel.inductor_meta.get(MENDED) and not kernel.custom_kernel  # the user's
    return mended() if is_own else nullcontext()


def _with_mends(backend_hash: Callable[[Any], str]) -> Callable[[Any], str]:
    """Part of the key of Triton's cache, where a graph without flexhop has the same kernels."""

    @functools.wraps(backend_hash)
    def own_hash(self: Any) -> str:
        return backend_hash(self) + ("-flexhop" if _is_own.get() else "")

    return own_hash


def _for_own_kernels(add_stages: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(add_stages)
    def add_own_stages(self: Any, stages: dict[str, Any], *arguments: Any) -> None:
        add_stages(self, stages, *arguments)
        if not _is_own.get():
            return
        mend(stages)
        processes = _open.get()
        if processes is None or not _may_isolate(self, arguments):
            return
        with suppress(OSError):  # no process, say: this one compiles
            process = _Process(self.target, arguments, dict(stages))
            processes.append(process)
            stages.update((name, functools.partial(process.stage, name)) for name in stages)

    return add_own_stages


def _may_isolate(backend: Any, arguments: tuple[Any, ...]) -> bool:
    """Whether nobody looks into the stages, or replaces what they make."""
    from triton import knobs

    looked_at = (
        getattr(knobs.runtime, "add_stages_inspection_hook", None),
        getattr(backend, "instrumentation", None),
        knobs.compilation.override,
        knobs.compilation.use_ir_loc,
        getattr(arguments[0], "ir_override", None),
    )
    return bool(sys.executable) and not getattr(sys, "frozen", False) and not any(looked_at)


class _Process:
    """A process that compiles one kernel; it starts at once.

    Args:
        target: the GPU.
        arguments: of the backend's `add_stages`.
        own: the stages of this process.
    """

    def __init__(self, target: Any, arguments: tuple[Any, ...], own: dict[str, Any]) -> None:
        self._target, self._arguments, self._own = target, arguments, own
        self._results: dict[str, Any] | None = None
        self._process = subprocess.Popen(
            [sys.executable, "-P", *_without_site(), str(_PROGRAM)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    def stage(self, name: str, module: Any, metadata: dict[str, Any]) -> Any:
        """A stage of Triton's compiler; the first one waits for all."""
        if self._results is None:
            self._results = self._run(name, module, metadata)
        if name in self._results:
            return self._results[name]
        return self._own[name](module, metadata)

    def _run(self, first: str, module: Any, metadata: dict[str, Any]) -> dict[str, Any]:
        """The results of the stages, none if the process did not get to work."""
        job = {
            "target": self._target, "arguments": self._arguments, "first": first,
            "text": str(module), "metadata": metadata,
        }  # fmt: skip
        output, errors = self._process.communicate(pickle.dumps(job))
        words = errors.decode(errors="replace")
        if self._process.returncode < 0:
            raise CompilerDied(_reason(-self._process.returncode, words))
        sys.stderr.write(words)
        if not output:
            return {}
        answer = pickle.loads(output)
        sys.stdout.write(answer["printed"])
        if "error" in answer:
            raise answer["error"]
        metadata.update(answer["metadata"])
        return answer["results"]

    def close(self) -> None:
        """End the process, if it has no job."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.communicate()


@functools.cache
def _without_site() -> list[str]:
    """The option not to look through installed packages at the start, if Triton is found so."""
    import triton

    return ["-S"] if str(Path(triton.__file__).parents[1]) in sys.path else []


def _reason(number: int, words: str) -> str:
    """Why a process ended, with the line of its output that says more."""
    lines = [line.strip() for line in words.splitlines() if line.strip()]
    found = (line[line.index(word) :] for line in lines for word in _TELLING if word in line)
    told = next(found, "").rstrip(".")
    try:
        name = signal.Signals(number).name
    except ValueError:  # a real-time signal
        name = f"signal {number}"
    return f"the compiler ended by {name}{': ' if told else ''}{told}"
