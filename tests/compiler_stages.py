"""Triton's compiler as far as a test needs it: machine code takes more than half of the time."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

from triton.backends.nvidia import compiler

from benchmarks.ways import Ways, ways
from flexhop.offline import Kernel
from flexhop.offline.cubin import Cubin, compile_kernel


class _FarEnough(Exception):
    """Triton has done its part: the next is NVIDIA's."""


def compile_to_llvm(kernel: Kernel, architecture: int) -> None:
    """Compile a kernel to optimised LLVM code, and no further."""
    with _stops_before_ptx(), contextlib.suppress(_FarEnough):
        compile_kernel(kernel, architecture)


def compile_to_layouts(kernel: Kernel, architecture: int) -> None:
    """Compile a kernel to Triton's own code with layouts, before it becomes LLVM's."""
    far_enough = mock.patch.object(compiler.CUDABackend, "make_llir", side_effect=_FarEnough)
    with far_enough, contextlib.suppress(_FarEnough):
        compile_kernel(kernel, architecture)


def shared_memory(kernel: Kernel, architecture: int) -> int:
    """Bytes of shared memory of a kernel. Triton allocates them before its code becomes LLVM's."""
    passes = compiler.nvidia.passes.ttgpuir
    unconverted = mock.patch.object(passes, "add_to_llvmir")
    far_enough = mock.patch.object(compiler.llvm, "to_module", side_effect=_FarEnough)
    # Triton's cache would hand over the kernel, and lines are told of LLVM's code.
    knobs = {"TRITON_ALWAYS_COMPILE": "1", "TRITON_DISABLE_LINE_INFO": "1"}
    told = mock.patch.dict("os.environ", knobs)
    with unconverted, far_enough as to_module, told, contextlib.suppress(_FarEnough):
        compile_kernel(kernel, architecture)
    (code, _), _ = to_module.call_args
    return code.get_int_attr("ttg.shared")


@contextlib.contextmanager
def _stops_before_ptx() -> Iterator[Any]:
    with mock.patch.object(compiler.CUDABackend, "make_ptx", side_effect=_FarEnough) as make_ptx:
        yield make_ptx


def steps_of(cubin: Cubin, products: int) -> list[Ways]:
    """A step without a mask and one with, of each of two consumers of a Hopper forward kernel.

    They are two ways through one loop, or loops of their own. Without a mask they are the same. A
    tile's first step, which has fewer products, is not among them.
    """
    loops = sorted((x for x in cubin.loops() if x.count("HGMMA") == products), key=len)
    # One loop has one copy of a step for each consumer, and the product behind the last one.
    if cubin.wgmma > 4 * products:
        first, second, *masked = loops[:4]
        return [
            Ways(ways(full).shortest, m) for full, m in zip((first, second), masked, strict=True)
        ]
    found = [ways(loop) for loop in loops[:2]]
    assert len(found) == 2
    assert all(way.count("HGMMA") == products for both in found for way in both)
    return found
