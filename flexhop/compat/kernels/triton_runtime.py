"""Names that a generated Triton kernel imports, wherever Inductor compiles it."""

from __future__ import annotations

import triton
import triton.language as tl

from flexhop.compat.kernels import isolated
from flexhop.compat.kernels.functions import FUNCTIONS, constant_name

__all__ = ["run_1", "run_2", "run_3"]

isolated.install()

# The texts of all functions, by names such as PTX_EXP.
globals().update((constant_name(name), tl.constexpr(f.text)) for name, f in FUNCTIONS.items())


@triton.jit
def run_1(x, TEXT: tl.constexpr):
    """A function of one number; TEXT: of functions.py."""
    return tl.inline_asm_elementwise(TEXT, "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def run_2(x, y, TEXT: tl.constexpr):
    """Like run_1, with two arguments."""
    return tl.inline_asm_elementwise(
        TEXT, "=f,f,f", [x, y], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def run_3(x, y, z, TEXT: tl.constexpr):
    """Like run_1, with three arguments."""
    return tl.inline_asm_elementwise(
        TEXT, "=f,f,f,f", [x, y, z], dtype=tl.float32, is_pure=True, pack=1
    )
