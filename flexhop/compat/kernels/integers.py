"""Powers of integers by squaring, and quotients by products. torch 2.11 to 2.15.

Inductor calls PyTorch's own operator for powers with integer exponents, which a kernel cannot do
for each score: `2**distance` in radial attention. Results are PyTorch's: products wrap, and a
negative exponent gives 0 unless the base is 1 or -1.

LLVM divides a signed integer in three or four instructions. A quotient of one that is not negative
is the upper half of a product: a step that reads a table by two quotients and two remainders has
875 instructions instead of 1523.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch._inductor import ir
from torch._inductor.lowering import broadcast_tensors, lowerings
from torch._inductor.virtualized import ops

__all__ = ["INTEGER_POWERS", "lower_quotient", "note_quotient"]

aten = torch.ops.aten
_convert = torch.ops.prims.convert_element_type.default
_KEY = "flexhop_reciprocal"


def _power(inductor_rule: Any, base: Any, exponent: Any) -> Any:
    """The power of an integer, or what Inductor's rule makes of other operands."""
    is_boxed = isinstance(exponent, ir.IRNode)  # a number as exponent is few products
    if not is_boxed or not all(map(_is_integer, (base, exponent))):
        return inductor_rule(base, exponent)
    if isinstance(base, int):
        return _of_elements(functools.partial(_of_number, base), exponent.get_dtype(), [exponent])
    dtype = torch.promote_types(base.get_dtype(), exponent.get_dtype())
    return _of_elements(_of_tensor, dtype, broadcast_tensors(base, exponent))


def _is_integer(value: Any) -> bool:
    if not isinstance(value, ir.IRNode):
        return type(value) is int
    dtype = value.get_dtype()
    return dtype != torch.bool and not dtype.is_floating_point and not dtype.is_complex


def _of_elements(rule: Any, dtype: torch.dtype, tensors: Sequence[Any]) -> Any:
    """A rule of numbers, element by element, in the wider one of int32 and `dtype`."""
    wide = torch.int64 if dtype in (torch.int64, torch.uint64, torch.uint32) else torch.int32
    loaders = [tensor.make_loader() for tensor in tensors]

    def load(index: Sequence[Any]) -> Any:
        numbers = [ops.to_dtype(loader(index), wide) for loader in loaders]
        return ops.to_dtype(rule(*numbers, _Integers(wide)), dtype)

    return ir.Pointwise.create(
        device=tensors[0].get_device(), dtype=dtype, inner_fn=load,
        ranges=list(tensors[0].get_size()),
    )  # fmt: skip


class _Integers:
    """Arithmetic of signed integers of one dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype, self.bits = dtype, dtype.itemsize * 8

    def number(self, value: int) -> Any:
        """A constant, which wraps."""
        half = 1 << (self.bits - 1)
        return ops.constant((value + half) % (2 * half) - half, self.dtype)

    def has_bit(self, value: Any, place: int) -> Any:
        return ops.ne(ops.bitwise_and(value, self.number(1 << place)), self.number(0))

    def or_one(self, condition: Any, value: Any) -> Any:
        return ops.where(condition, value, self.number(1))


def _of_number(base: int, exponent: Any, integers: _Integers) -> Any:
    """A power of a constant: its squares are constants."""
    zero = integers.number(0)
    if base > 1 and base & (base - 1) == 0:
        step = base.bit_length() - 1
        last = integers.number((integers.bits - 1) // step)
        is_in_range = ops.logical_and(ops.ge(exponent, zero), ops.le(exponent, last))
        places = ops.mul(ops.where(is_in_range, exponent, zero), integers.number(step))
        one = integers.number(1)
        return ops.where(is_in_range, ops.bitwise_left_shift(one, places), zero)
    result, square = integers.number(1), base % (1 << integers.bits)
    for place in range(integers.bits - 1):
        if square == 1:  # so are all that follow
            break
        factor = integers.or_one(integers.has_bit(exponent, place), integers.number(square))
        result = ops.mul(result, factor)
        square = square * square % (1 << integers.bits)
        if square == 0:  # any higher bit makes the product 0
            most = integers.number((2 << place) - 1)
            result = ops.where(ops.gt(exponent, most), zero, result)
            break
    return result if abs(base) == 1 else ops.where(ops.lt(exponent, zero), zero, result)


def _of_tensor(base: Any, exponent: Any, integers: _Integers) -> Any:
    """A power of a number that is not known."""
    result, square = integers.number(1), base
    for place in range(integers.bits - 1):
        factor = integers.or_one(integers.has_bit(exponent, place), square)
        result = factor if place == 0 else ops.mul(result, factor)
        if place < integers.bits - 2:
            square = ops.mul(square, square)
    is_unit = ops.eq(ops.abs(base), integers.number(1))
    inverse = ops.where(
        is_unit, integers.or_one(integers.has_bit(exponent, 0), base), integers.number(0)
    )
    return ops.where(ops.lt(exponent, integers.number(0)), inverse, result)


INTEGER_POWERS = {
    op: functools.partial(_power, lowerings[op])
    for op in (aten.pow.Scalar, aten.pow.Tensor_Tensor)
}


def note_quotient(node: fx.Node, divisor: int, most: Any) -> fx.Node:
    """Let `lower_quotient` compute a quotient that rounds to zero, or its remainder, by a product.

    Args:
        node: `aten.div.Tensor_mode` or `aten.fmod.Scalar` by `divisor`.
        most: bound of the dividend, which is not negative; perhaps infinite.
    """
    found = _reciprocal(divisor, int(most)) if math.isfinite(most) else None
    if found is not None:
        node.meta[_KEY] = (divisor, *found)
    return node


def _reciprocal(divisor: int, most: int) -> tuple[int, int] | None:
    """Factor and shift with `n // divisor == n * factor >> shift` for n of 0 to `most`, or None.

    The factor is rounded up, so the quotient is too large by n * off / divisor / 2**shift. That
    must stay below 1 / divisor.
    """
    for shift in range(32, 31 + divisor.bit_length()):  # factors of 31 bits
        off = -(1 << shift) % divisor
        if most * off < 1 << shift and most < 1 << 31:
            return ((1 << shift) + off) // divisor, shift
    return None


def lower_quotient(node: fx.Node, value: Any) -> Any:
    """Lower a node that `note_quotient` knows, of this dividend; None for others."""
    found = node.meta.get(_KEY)
    if found is None:
        return None
    divisor, factor, shift = found
    wide = lowerings[aten.mul](lowerings[_convert](value, torch.int64), factor)
    quotient = lowerings[aten.bitwise_right_shift](wide, shift)
    quotient = lowerings[_convert](quotient, value.get_dtype())
    if node.target is not aten.fmod.Scalar:
        return quotient
    return lowerings[aten.sub](value, lowerings[aten.mul](quotient, divisor))
