"""Inductor: how tanh is computed in the kernels, and how sizes that are known are printed.

CUDA's own tanh has a branch, which every score that a thread holds takes for itself. Names are the
same in torch 2.11 to 2.15.
"""

from __future__ import annotations

from typing import Any

import sympy
import torch
from torch._inductor import ir
from torch._inductor.codegen.triton import TritonKernelOverrides
from torch._inductor.lowering import register_lowering
from torch._inductor.virtualized import V, ops

__all__ = ["IMPORT", "Numbers", "Overrides", "register_tanh_approx"]

IMPORT = "from flexhop.compat.triton_runtime import branchless_tanh\n"


class Numbers(TritonKernelOverrides):
    """Prints an index that is a number as a constant.

    Inductor gives it the shape of a block of its own kernels, XBLOCK, which templates lack.
    """

    @classmethod
    def index_expr(cls, expr: Any, dtype: torch.dtype) -> Any:
        """An index, such as a size, of this dtype."""
        known = V.graph.sizevars.simplify(sympy.sympify(expr))
        if not known.is_number:
            return super().index_expr(expr, dtype)
        text = cls.constant(int(known), dtype)
        return V.kernel.cse.generate(V.kernel.compute, text, dtype=dtype, shape=())


class Overrides(Numbers):
    """How operations are printed; all but these as Inductor prints them."""

    @staticmethod
    def tanh(x: Any) -> str:
        """Without a branch where results are rounded to 16 bits; see triton_runtime.py."""
        if x.dtype == torch.float32 and V.kernel.input_nodes[0].get_dtype().itemsize == 2:
            return f"branchless_tanh({x})"
        return str(TritonKernelOverrides.tanh(x))


def register_tanh_approx(op: Any) -> None:
    """Lower an approximate tanh to one PTX instruction on the GPU, and to tanh elsewhere."""

    def lower(x: Any) -> Any:
        dtype = torch.float64 if x.get_dtype() == torch.float64 else torch.float32
        exact = x.get_device().type != "cuda" or dtype == torch.float64
        loader = x.make_loader()

        def inner(index: Any) -> Any:
            value = ops.to_dtype(loader(index), dtype)
            if exact:
                return ops.tanh(value)
            return ops.inline_asm_elementwise(
                value, asm="tanh.approx.f32 $0, $1;", constraints="=f,f", dtype=torch.float32
            )

        return ir.Pointwise.create(
            device=x.get_device(), dtype=dtype, inner_fn=inner, ranges=x.get_size()
        )

    register_lowering(op, type_promotion_kind=None)(lower)
