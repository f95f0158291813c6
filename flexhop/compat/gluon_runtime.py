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

__all__ = ["add_async", "load_async", "set_aside", "store_async", "take_back", "tanh"]


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
    # As one text: LLVM takes as long for a kernel as it has instructions, and its vectoriser would
    # pack the comparisons of a thread into bits. Far from 0 it is 1 - 2 / (exp(2 x) + 1), and the
    # first factor 2 log2 e. Below 0.2 that has too few digits: there it is the series to x ** 7.
    return gl.inline_asm_elementwise(
        """{
        .reg .f32 far, near, square;
        .reg .pred is_near;
        mul.f32 far, $1, 0f4038AA3B;
        ex2.approx.ftz.f32 far, far;
        add.f32 far, far, 0f3F800000;
        rcp.approx.ftz.f32 far, far;
        fma.rn.f32 far, far, 0fC0000000, 0f3F800000;
        mul.f32 square, $1, $1;
        fma.rn.f32 near, square, 0fBD5D0DD1, 0f3E088889;
        fma.rn.f32 near, near, square, 0fBEAAAAAB;
        mul.f32 near, near, square;
        fma.rn.f32 near, near, $1, $1;
        setp.lt.f32 is_near, square, 0f3D23D70A;
        selp.f32 $0, near, far, is_near;
        }""",
        "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1,
    )  # fmt: skip


# Of scores [64, 64] as a product leaves them: four neighbours for each lane, then its next four.
_ASIDE = gl.constexpr(
    gl.SharedLinearLayout(
        [[0, 1], [8, 0], [0, 2], [0, 4], [1, 0], [2, 0], [4, 0], [16, 0], [32, 0],
         [0, 8], [0, 16], [0, 32]]
    )
)  # fmt: skip


@builtin
def _as_scores(memory: Any, _semantic: Any = None) -> Any:
    """64 x 64 numbers of shared memory as `_ASIDE`; its own method has two names by version."""
    return _semantic.memdesc_reinterpret(memory, gl.float32, [64, 64], _ASIDE.value)


@gluon.jit
def set_aside(memory, x):
    """Keep scores [64, 64] in shared memory [1, 1, 64, 64], where each thread finds its own."""
    _as_scores(memory).store(x)


@gluon.jit
def take_back(memory, layout: gl.constexpr):
    """What was set aside, as new values: what was computed of them before is computed again."""
    return _as_scores(memory).load(layout)
