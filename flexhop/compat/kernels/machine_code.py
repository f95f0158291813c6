"""Inductor: inspect a kernel's machine code before choosing it, with NVIDIA's tools.

ptxas silently spills to local memory. Names are the same in torch 2.11 to 2.15 and in Triton 3.6
to 3.9.
"""

from __future__ import annotations

import logging
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch._inductor.codecache import _load_triton_kernel_from_source
from torch._inductor.runtime import triton_heuristics
from torch._inductor.runtime.compile_tasks import _worker_compile_triton

__all__ = [
    "compile_by_worker", "compile_here", "find_tool", "resource_usage", "run_tool",
    "shared_memory",
]  # fmt: skip


def compile_by_worker(load: Callable[[], Any], environment: Mapping[str, str]) -> int:
    """Compile a kernel as Inductor would, in a worker; returns local memory per thread in bytes.

    Args:
        load: creates Inductor's kernel from its text.
        environment: variables that the worker needs.
    """
    kernel, _ = _worker_compile_triton(load, dict(environment), {})
    return _largest(kernel)


def compile_here(load: Callable[[], Any]) -> int:
    """The same in this process, where Inductor will find the compiled kernel."""
    kernel = load()
    kernel.precompile(warm_cache_only=True)
    return _largest(kernel)


def shared_memory(choice: Any) -> int:
    """Compile a template choice in this process; returns shared memory per program in bytes."""
    request = choice.bmreq
    text = Path(request.module_path).read_text()
    kernel = _load_triton_kernel_from_source(request.kernel_name, text)
    with _unlogged():
        kernel.precompile(warm_cache_only=True)
    kernels = [result.kernel for result in kernel.compile_results]
    # Kernels launched from C++ have a number in place of Triton's metadata.
    return max(getattr(kernel, "metadata", kernel).shared for kernel in kernels)


@contextmanager
def _unlogged() -> Iterator[None]:
    """Without Inductor's log of a kernel that fails, with its whole text: a warning names it."""
    log = logging.getLogger(triton_heuristics.__name__)
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


def _largest(kernel: Any) -> int:
    cubins = (result.kernel.asm["cubin"] for result in kernel.compile_results)
    return max(resource_usage(cubin)["STACK"] for cubin in cubins)


def resource_usage(cubin: bytes) -> dict[str, int]:
    """Resources per thread of a kernel: registers (REG), bytes of local memory (STACK, LOCAL)."""
    usage = run_tool("cuobjdump", cubin, "--dump-resource-usage")
    return {name: int(number) for name, number in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", usage)}


def run_tool(name: str, binary: bytes, *options: str) -> str:
    """Run a tool on a cubin and return its output."""
    tool = find_tool(name)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        done = subprocess.run([tool, *options, file.name], capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{name} {' '.join(options)} failed: {done.stderr.strip()}")
    return done.stdout


def find_tool(name: str) -> str:
    """Path of a tool."""
    import triton  # calls on a CPU import this module, and need no Triton

    bundled = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    tool = str(bundled) if bundled.exists() else shutil.which(name)
    if tool is None:
        raise FileNotFoundError(f"{name} is neither in Triton's package nor on PATH.")
    return tool
