"""Inductor: how kernels print functions and known sizes.

CUDA's own functions branch, separately for every score that a thread holds. Names are the same in
torch 2.11 to 2.15.
"""

from __future__ import annotations

from typing import Any

import sympy
import torch
from torch._inductor import ir
from torch._inductor.codegen.triton import TritonKernelOverrides
from torch._inductor.lowering import register_lowering
from torch._inductor.virtualized import V, ops

from flexhop.compat.kernels.functions import FUNCTIONS, constant_name, import_from, scaled_tanh

__all__ = [
    "IMPORT",
    "Functions",
    "Overrides",
    "has_texts",
    "register_scaled_tanh",
    "register_tanh_approx",
]

IMPORT = import_from("flexhop.compat.kernels.triton_runtime")


def has_texts(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether kernels of queries of this dtype compute functions by the texts of functions.py."""
    return device.type == "cuda" and not torch.version.hip and dtype.itemsize == 2


class Numbers(TritonKernelOverrides):
    """How templates print numbers and order."""

    @classmethod
    def index_expr(cls, expr: Any, dtype: torch.dtype) -> Any:
        """An index, such as a size, of this dtype; a known one as a constant.

        Inductor would give it the shape of its own kernels' blocks, XBLOCK, which templates lack.
        """
        known = V.graph.sizevars.simplify(sympy.sympify(expr))
        if not known.is_number:
            return super().index_expr(expr, dtype)
        text = cls.constant(int(known), dtype)
        return V.kernel.cse.generate(V.kernel.compute, text, dtype=dtype, shape=())

    @staticmethod
    def maximum(a: Any, b: Any) -> str:
        """The larger number in one instruction; NaN wins. Triton's helper takes three or more."""
        return f"tl.maximum({a}, {b}, tl.PropagateNan.ALL)"

    @staticmethod
    def minimum(a: Any, b: Any) -> str:
        """The smaller number; NaN wins."""
        return f"tl.minimum({a}, {b}, tl.PropagateNan.ALL)"


class Functions(Numbers):
    """Prints functions in fp32 as the texts of functions.py, in kernels of 16-bit operands."""

    @classmethod
    def has_texts(cls) -> bool:
        """Whether the kernel being printed may use them."""
        return has_texts(
            V.graph.get_current_device_or_throw(), V.kernel.input_nodes[0].get_dtype()
        )

    @classmethod
    def truediv(cls, x: Any, y: Any) -> str:
        """A quotient; Triton turns division by a number from the program into a product."""
        if _is_number(y) or not (_are_floats(x, y) and cls.has_texts()):
            return str(super().truediv(x, y))
        return _call("divide", x, y)

    @classmethod
    def isnan(cls, x: Any) -> str:
        """Without the library's call, whose integer is compared once more."""
        return f"({x} != {x})" if _are_floats(x) else str(super().isnan(x))

    @classmethod
    def pow(cls, a: Any, b: Any) -> str:
        """A power."""
        if not (_are_floats(a, b) and cls.has_texts()):
            return str(super().pow(a, b))
        return _call("power", _call("log2_of_size", a), a, b)


def _is_number(x: Any) -> bool:
    """Whether a value is known when the kernel is printed."""
    bounds = getattr(x, "bounds", None)
    return bounds is not None and bool(bounds.is_singleton())


def _are_floats(*values: Any) -> bool:
    return all(getattr(value, "dtype", None) == torch.float32 for value in values)


def _call(name: str, *arguments: Any) -> str:
    given = ", ".join(map(str, arguments))
    return f"run_{len(arguments)}({given}, {constant_name(name)})"


def _printer(name: str) -> classmethod[Any, Any, str]:
    """Prints the function of that name, of one or two numbers."""

    def print_call(cls: type[Functions], *args: Any) -> str:
        if _are_floats(*args) and cls.has_texts():
            return _call(name, *args)
        return str(getattr(super(Functions, cls), name)(*args))

    print_call.__name__ = name
    return classmethod(print_call)


for _name, _function in FUNCTIONS.items():
    if _name not in ("divide", "power", "log2_of_size"):
        setattr(Functions, _name, _printer(_name))


class Overrides(Functions):
    """How portable kernels print operations; others are printed by Inductor."""


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


def register_scaled_tanh(op: Any) -> None:
    """Lower outer * tanh(inner * x) to one text, for kernels that have texts."""

    def lower(x: Any, inner: float, outer: float) -> Any:
        loader, text = x.make_loader(), scaled_tanh(inner, outer).text

        def inner_fn(index: Any) -> Any:
            value = ops.to_dtype(loader(index), torch.float32)
            return ops.inline_asm_elementwise(
                value, asm=text, constraints="=f,f", dtype=torch.float32
            )

        return ir.Pointwise.create(
            device=x.get_device(), dtype=torch.float32, inner_fn=inner_fn, ranges=x.get_size()
        )

    register_lowering(op, type_promotion_kind=None)(lower)
