"""Names that a generated Gluon kernel imports, wherever Inductor compiles it.

Inductor's launcher creates an `ASTSource` for every kernel; a Gluon kernel needs a
`GluonASTSource`. Importing this file makes the launcher pick the right one, also in Inductor's
compile workers, which know a kernel only by its text. The name is the same in torch 2.11 to 2.15.
"""

from __future__ import annotations

from typing import Any

from torch._inductor.runtime import triton_heuristics
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from flexhop.compat.kernels import isolated
from flexhop.compat.kernels.functions import FUNCTIONS, constant_name

__all__ = [
    "compared", "compared_by_mask", "equated_by_mask", "read_kept", "run_1", "run_2", "run_3",
]  # fmt: skip


class _SourceByDialect:
    """Replaces `ASTSource`; creates the source of a function in its own dialect."""

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
isolated.install()

# The texts of all functions, by names such as PTX_EXP.
globals().update((constant_name(name), gl.constexpr(f.text)) for name, f in FUNCTIONS.items())


@gluon.jit
def compared(x):
    """An operand of a comparison in a score_mod. A template may define its own instead."""
    return x


@gluon.jit
def compared_by_mask(x):
    """Like compared, in a mask_mod, of an order."""
    return x


@gluon.jit
def equated_by_mask(x):
    """Like compared, in a mask_mod, of an equality."""
    return x


@gluon.jit
def read_kept(pointers):
    """Captured numbers that a kernel needs twice, read once.

    Behind a barrier the compiler takes memory for changed, so it reads again, and computes again
    what follows. It does not see that this reads memory, which no kernel changes while it runs.
    """
    T: gl.constexpr = pointers.dtype.element_ty
    if T == gl.bfloat16 or T == gl.float16:
        x = gl.inline_asm_elementwise(
            "{ .reg .b16 t; ld.global.nc.b16 t, [$1]; cvt.u32.u16 $0, t; }", "=r,l", [pointers],
            dtype=gl.int32, is_pure=True, pack=1,
        ).to(gl.int16).to(T, bitcast=True)  # fmt: skip
    elif T == gl.float32 or T == gl.int32 or T == gl.float64 or T == gl.int64:
        TEXT: gl.constexpr = _read_text(T)
        REGISTERS: gl.constexpr = _registers(T)
        x = gl.inline_asm_elementwise(
            TEXT, REGISTERS, [pointers], dtype=pointers.dtype.element_ty, is_pure=True, pack=1
        )
    else:
        x = gl.load(pointers)
    return x


@gluon.constexpr_function
def _read_text(element):
    """Assembly that reads a number of this type."""
    return f"ld.global.nc.b{element.primitive_bitwidth} $0,[$1];"


@gluon.constexpr_function
def _registers(element):
    """Constraints of what it fills, and of a pointer."""
    letters = {"fp32": "f", "fp64": "d", "int32": "r", "int64": "l"}
    return f"={letters[str(element)]},l"


@gluon.jit
def run_1(x, TEXT: gl.constexpr):
    """A function of one number; TEXT: of functions.py."""
    return gl.inline_asm_elementwise(TEXT, "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def run_2(x, y, TEXT: gl.constexpr):
    """Like run_1, with two arguments."""
    return gl.inline_asm_elementwise(
        TEXT, "=f,f,f", [x, y], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def run_3(x, y, z, TEXT: gl.constexpr):
    """Like run_1, with three arguments."""
    return gl.inline_asm_elementwise(
        TEXT, "=f,f,f,f", [x, y, z], dtype=gl.float32, is_pure=True, pack=1
    )
