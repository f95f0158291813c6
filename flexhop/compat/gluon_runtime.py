"""What a generated Gluon kernel imports, wherever Inductor compiles it.

Inductor's launcher makes an `ASTSource` of every kernel; a Gluon kernel needs a `GluonASTSource`.
Importing this file lets the launcher take the one that fits, also in Inductor's compile workers,
which know a kernel by its text alone. The name is the same in torch 2.11 to 2.15.
"""

from __future__ import annotations

from typing import Any

from torch._inductor.runtime import triton_heuristics
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

__all__ = ["tanh"]


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
