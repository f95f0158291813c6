"""Operators of Triton's tensors in one call of numpy.

Around each sum, Triton finds the types and shapes of both operands again, fills a block with a
number, and repeats rows as often as the other operand has them. All but the values follows from
the two types, so it is found once for a pair. The first operation of a pair runs as Triton does
it, and the short way must give the same bits, or that pair stays with Triton. Triton 3.6 to 3.9.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

__all__ = ["quick"]

Operator = Callable[[Any, Any], Any]

_ARITHMETIC = {"add": np.add, "sub": np.subtract, "mul": np.multiply}
_COMPARISONS = {
    "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
    "eq": np.equal, "ne": np.not_equal,
}  # fmt: skip
_BITWISE = {"and": np.bitwise_and, "or": np.bitwise_or}
_INTEGERS = {tl.int32: np.int32, tl.int64: np.int64}
_NUMBERS: dict[Any, type[np.generic]] = {
    tl.float16: np.float16, tl.float32: np.float32, tl.float64: np.float64, tl.int1: np.bool_,
    **_INTEGERS,
}  # fmt: skip
_LARGEST = float(np.finfo(np.float32).max)


_REVERSED = {f"r{name}": name for name in _ARITHMETIC}
# Read here, before any of them is replaced.
_OPERATORS = {
    vars(tl.tensor)[f"__{name}__"]: name
    for name in (*_ARITHMETIC, *_REVERSED, *_COMPARISONS, *_BITWISE)
}


class _Way(NamedTuple):
    """How a pair of types is computed.

    Args:
        function: of numpy.
        common: both operands get this type; None: pointers, which keep theirs.
        size: bytes of an element, for pointers.
        handle, tensor: what the result has besides its values.
    """

    function: Callable[..., np.ndarray]
    common: Any
    size: int
    handle: dict[str, Any]
    tensor: dict[str, Any]


def quick(member: Any, slow: Callable[..., Any]) -> Callable[..., Any]:
    """The short way of an operator of tensors; `slow` for other functions and operands."""
    name = _OPERATORS.get(member)
    return slow if name is None else _operator(name, slow)


def _operator(name: str, slow: Callable[..., Any]) -> Operator:
    is_reversed = name in _REVERSED
    plain = _REVERSED.get(name, name)
    ways: dict[Any, _Way | None] = {}

    def operate(own: Any, other: Any) -> Any:
        if other.__class__ is tl.constexpr:
            other = other.value
        kind = _kind(other)
        if kind is None:
            return slow(own, other)
        key = own.type.name, kind
        way = ways.get(key)
        if way is not None:
            return _run(way, other, own) if is_reversed else _run(way, own, other)
        result = slow(own, other)
        if key not in ways:
            pair = (other, own) if is_reversed else (own, other)
            ways[key] = _way(plain, *pair, result)
        return result

    return operate


def _kind(value: Any) -> Any:
    """The part of a key: the name of a tensor's type, or the class of a small number."""
    kind = value.__class__
    if kind is tl.tensor:
        return value.type.name
    if kind is int:
        return int if -(2**31) <= value < 2**31 else None
    return float if kind is float and _is_plain(value) else None


def _is_plain(value: float) -> bool:
    """Whether every Triton takes a number for the same one of fp32; of -0.0, 3.6 makes 0."""
    if value == 0:
        return math.copysign(1, value) > 0
    return not 0 < abs(value) < 2**-126 and not _LARGEST < abs(value) < np.inf


def _run(way: _Way, left: Any, right: Any) -> Any:
    values, attributes = _values(way, left, right)
    handle = interpreter.TensorHandle.__new__(interpreter.TensorHandle)
    handle.__dict__.update(way.handle, data=values, attr=attributes)
    result = tl.tensor.__new__(tl.tensor)
    result.__dict__.update(way.tensor)
    result.handle = handle
    return result


def _values(way: _Way, left: Any, right: Any) -> tuple[np.ndarray, dict[str, Any]]:
    if way.common is None:
        return _address(way.size, left.handle, right)
    return way.function(_array(left, way.common), _array(right, way.common)), {}


def _array(operand: Any, common: Any) -> Any:
    if operand.__class__ is not tl.tensor:
        return common(operand)
    data = operand.handle.data
    return data if data.dtype == common else data.astype(common)


def _address(size: int, pointer: Any, offset: Any) -> tuple[np.ndarray, dict[str, Any]]:
    """Addresses wrap around; a pointer goes on to belong to its argument."""
    argument = pointer.attr.get("argument")
    attributes = {} if argument is None else {"argument": argument}
    if offset.__class__ is tl.tensor:
        return pointer.data + size * offset.handle.data.astype(np.uint64), attributes
    return pointer.data + np.uint64(size * offset % 2**64), attributes


def _way(name: str, left: Any, right: Any, result: Any) -> _Way | None:
    """The short way for two types, if it gives what Triton gave."""
    found = _function(name, left, right, result)
    if found is None:
        return None
    way = _Way(*found, _without(result.handle, "data", "attr"), _without(result, "handle"))
    values, _ = _values(way, left, right)
    expected = result.handle.data
    same = values.dtype == expected.dtype and values.shape == expected.shape
    return way if same and values.tobytes() == expected.tobytes() else None


def _without(owner: Any, *names: str) -> dict[str, Any]:
    return {name: value for name, value in vars(owner).items() if name not in names}


def _function(name: str, left: Any, right: Any, result: Any) -> tuple[Any, Any, int] | None:
    """Function, common type, and bytes of an element."""
    types = [value.type.scalar for value in (left, right) if value.__class__ is tl.tensor]
    if any(one.is_ptr() for one in types):
        is_moved = name == "add" and left.__class__ is tl.tensor and types[0].is_ptr()
        is_offset = type(right) is int or (not types[-1].is_ptr() and types[-1] in _INTEGERS)
        if not (is_moved and is_offset):
            return None
        return np.add, None, max(1, types[0].element_ty.primitive_bitwidth // 8)
    common = result.handle.dtype.scalar
    if any(one not in _NUMBERS for one in (*types, common)):
        return None
    if name in _BITWISE:
        return (_BITWISE[name], _NUMBERS[common], 0) if types == [common] * 2 else None
    # Numpy has other sums of bools. Triton compares fp64 with numbers that were fp32 before.
    if common == tl.int1 or (len(types) == 1 and common == tl.float64 and name in _COMPARISONS):
        return None
    return _ARITHMETIC.get(name) or _COMPARISONS[name], _NUMBERS[common], 0
