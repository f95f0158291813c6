"""What a generated Gluon kernel imports, wherever Inductor compiles it.

Inductor's launcher makes an `ASTSource` of every kernel; a Gluon kernel needs a `GluonASTSource`.
Importing this file lets the launcher take the one that fits, also in Inductor's compile workers,
which know a kernel by its text alone. The name is the same in torch 2.11 to 2.15.
"""

from __future__ import annotations

from typing import Any

from torch._inductor.runtime import triton_heuristics
from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import tma

__all__ = ["add_async", "load_async", "store_async", "tanh"]


class _SourceByDialect:
    """Stands for `ASTSource`; calls make the source of a function in its own dialect."""

    def __init__(self, portable: Any) -> None:
        self.portable = portable

    def __call__(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        is_gluon = getattr(function, "is_gluon", None)
        made = GluonASTSource if is_gluon is not None and is_gluon() else self.portable
        return made(function, *args, **kwargs)


def _install() -> None:
    runtime: Any = triton_heuristics
    if not isinstance(runtime.ASTSource, _SourceByDialect):
        runtime.ASTSource = _SourceByDialect(runtime.ASTSource)


_install()

# Copies by the tensor memory accelerator; the second names are those of 3.6, gone in 3.9.
load_async: Any = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
store_async: Any = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global


@builtin
def add_async(tensor: Any, coordinates: Any, source: Any, _semantic: Any = None) -> None:
    """Start to add a tile of shared memory to a tensor; its language has no name for it."""
    coordinates = _semantic._convert_to_ir_values(coordinates, require_i64=False)
    _semantic.builder.create_async_tma_reduce(
        ir.DESCRIPTOR_REDUCE_KIND.ADD, tensor.handle, coordinates, source.handle
    )


@gluon.jit
def tanh(x):
    """tanh in fp32 without a branch; off by less than 4e-7, and less than 2e-6 of its value.

    CUDA's own function branches, and so would every one of a thread's scores for itself.
    """
    exponential = gl.exp2(x * 2.885390081777927)  # 2 log2 e: exp(2 x)
    reciprocal = gl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [exponential + 1.0],
        dtype=gl.float32, is_pure=True, pack=1,
    )  # fmt: skip
    # Near 0 the difference from 1 has no digits left: the series there, to x ** 7, below 0.2.
    square = x * x
    series = (-17.0 / 315.0 * square + 2.0 / 15.0) * square - 1.0 / 3.0
    # As text, because LLVM's vectoriser would pack the comparisons of a thread into bits first.
    return gl.inline_asm_elementwise(
        "{ .reg .pred near; setp.lt.f32 near, $1, 0f3D23D70A; selp.f32 $0, $2, $3, near; }",
        "=f,f,f,f", [square, x + x * (square * series), 1.0 - 2.0 * reciprocal],
        dtype=gl.float32, is_pure=True, pack=1,
    )  # fmt: skip
