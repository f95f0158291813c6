"""Interval rules for sums, products, quotients and order.

A rule takes the dtype of the result and the operands, each an Interval or a plain number from the
program. It returns low, high and, for floats, whether NaN is possible. It is sound if, for all
operands inside their intervals, the value that PyTorch computes lies between the ends. Every rule
works on tensors and on plain numbers alike.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flexhop.analysis import logic
from flexhop.analysis.interval import (
    Interval,
    Number,
    Unsupported,
    are_finite,
    are_moderate,
    both,
    ends,
    is_int,
    least,
    lift,
    like,
    most,
    select,
    widened,
)

Ends = tuple[Any, ...]  # low, high, and whether it may be NaN


def add(dtype: Any, a: Any, b: Any, *, alpha: Any = 1) -> Ends:
    """a + alpha * b."""
    if dtype == torch.bool:
        return logic.or_(dtype, a, b)
    if alpha != 1:
        low, high = multiply(dtype, b, alpha)[:2]
        b = Interval(low, high, dtype)
    (p, q), (r, s) = ends(a, dtype), ends(b, dtype)
    return p + r, q + s, dtype.is_floating_point and not are_moderate(dtype, a, b)


def subtract(dtype: Any, a: Any, b: Any, *, alpha: Any = 1) -> Ends:
    """a - alpha * b."""
    if dtype == torch.bool:
        raise Unsupported
    if not isinstance(b, Interval):
        return add(dtype, a, -b, alpha=alpha)
    low, high = ends(b, dtype)
    flipped = (-b.static[1], -b.static[0])
    return add(dtype, a, Interval(-high, -low, dtype, b.nan, flipped), alpha=alpha)


def subtract_from(dtype: Any, a: Any, b: Any, alpha: Any = 1) -> Ends:
    """b - alpha * a."""
    return subtract(dtype, b, lift(a) if isinstance(a, Interval) else a, alpha=alpha)


def negative(dtype: Any, a: Any) -> Ends:
    """-a."""
    low, high = ends(a, dtype)
    return -high, -low


def multiply(dtype: Any, a: Any, b: Any) -> Ends:
    """a * b."""
    if dtype == torch.bool:
        return logic.and_(dtype, a, b)
    (p, q), (r, s) = ends(a, dtype), ends(b, dtype)
    nan = dtype.is_floating_point and not are_moderate(dtype, a, b)
    for (low, high), other in (((p, q), (r, s)), ((r, s), (p, q))):
        if not isinstance(low, Tensor) and not isinstance(high, Tensor) and low == high:
            x, y = other[0] * low, other[1] * low  # by a number from the program
            return (x, y, nan) if low >= 0 else (y, x, nan)
    if lift(a).static[0] >= 0 and lift(b).static[0] >= 0:
        return p * r, q * s, nan
    corners = (p * r, p * s, q * r, q * s)
    return least(*corners), most(*corners), nan


def power(dtype: Any, a: Any, exponent: Any) -> Ends:
    """a to a small positive integer."""
    if isinstance(exponent, float) and exponent.is_integer():
        exponent = int(exponent)
    if not isinstance(exponent, int) or not 1 <= exponent <= 8 or dtype == torch.bool:
        raise Unsupported
    low, high = ends(a, dtype)
    x, y = low**exponent, high**exponent
    if exponent % 2 == 0:
        crosses = both(low <= 0, high >= 0)
        x, y = select(crosses, like(x, 0), least(x, y)), most(x, y)
    return widened(dtype, x, y) if dtype.is_floating_point else (x, y)


def square(dtype: Any, a: Any) -> Ends:
    """a * a."""
    return power(dtype, a, 2)


# Quotients: if the divisor may be 0, nothing is known.


def floor_divide(dtype: Any, a: Any, b: Any) -> Ends:
    """The quotient, rounded down."""
    return _quotient(dtype, a, b, "floor")


def divide(dtype: Any, a: Any, b: Any, *, rounding_mode: str | None = None) -> Ends:
    """The quotient, exact or rounded down or towards 0."""
    return _quotient(dtype, a, b, rounding_mode)


def reciprocal(dtype: Any, a: Any) -> Ends:
    """1 / a."""
    return _quotient(dtype, 1.0, a, None)


def _quotient(dtype: Any, a: Any, b: Any, mode: str | None) -> Ends:
    (p, q), (r, s) = ends(a, dtype), ends(b, dtype)
    low, high = lift(b).static if isinstance(r, Tensor) or isinstance(s, Tensor) else (r, s)
    if low <= 0 <= high:
        raise Unsupported
    nan = dtype.is_floating_point and not are_moderate(dtype, a)
    if not isinstance(r, Tensor) and not isinstance(s, Tensor) and r == s:
        x, y = _divided(p, r, mode), _divided(q, r, mode)
        found = (x, y) if r > 0 else (y, x)
    else:
        corners = [_divided(x, y, mode) for x in (p, q) for y in (r, s)]
        found = least(*corners), most(*corners)
    if dtype.is_floating_point and mode is not None:
        found = widened(dtype, found[0] - 1, found[1] + 1)  # rounds twice
    elif dtype.is_floating_point:
        found = widened(dtype, *found)  # kernels multiply by the reciprocal, or approximate
    return (*found, nan)


def _divided(a: Number, b: Number, mode: str | None) -> Number:
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        if mode is None:
            return a / b
        return torch.div(a if isinstance(a, Tensor) else like(b, a), b, rounding_mode=mode)
    if not are_finite(a, b):
        raise Unsupported
    if mode is None:
        return a / b
    if mode == "floor":
        return a // b
    return -(-a // b) if (a < 0) != (b < 0) else a // b


def remainder(dtype: Any, a: Any, b: Any) -> Ends:
    """The remainder with the divisor's sign, as in Python."""
    (p, q), (r, s) = ends(a, dtype), ends(b, dtype)
    if not isinstance(r, Tensor) and not isinstance(s, Tensor) and r == s and is_int(dtype):
        if r == 0 or not are_finite(p, q):
            raise Unsupported
        first, last = (0, r - 1) if r > 0 else (r + 1, 0)
        same = _divided(p, r, "floor") == _divided(q, r, "floor")
        if isinstance(p, Tensor) or isinstance(q, Tensor):
            return select(same, p % r, first), select(same, q % r, last)
        return select(same, int(p) % r, first), select(same, int(q) % r, last)
    low, high = lift(b).static
    if low <= 0 <= high or not are_finite(low, high):
        raise Unsupported
    step = 1 if is_int(dtype) else 0  # rounding may return the divisor itself
    first, last = (0, high - step) if low > 0 else (low + step, 0)
    if is_int(dtype):
        return first, last
    return float(first), float(last), not are_moderate(dtype, a)


def fmod(dtype: Any, a: Any, b: Any) -> Ends:
    """The remainder with the dividend's sign, as in C."""
    low, high = lift(b).static
    if low <= 0 <= high or not are_finite(low, high) or not is_int(dtype):
        raise Unsupported
    if lift(a).static[0] >= 0 and low > 0:
        return remainder(dtype, a, b)
    largest = max(abs(low), abs(high)) - 1
    return (0 if lift(a).static[0] >= 0 else -largest), largest


# Order.


def minimum(dtype: Any, a: Any, b: Any) -> tuple[Any, Any]:
    """The smaller one."""
    (p, q), (r, s) = ends(a, dtype), ends(b, dtype)
    if dtype == torch.bool:
        return both(p, r), both(q, s)
    return least(p, r), least(q, s)


def maximum(dtype: Any, a: Any, b: Any) -> tuple[Any, Any]:
    """The larger one."""
    if dtype == torch.bool:
        return logic.or_(dtype, a, b)
    (p, q), (r, s) = ends(a, dtype), ends(b, dtype)
    return most(p, r), most(q, s)


def clamp(dtype: Any, a: Any, low: Any = None, high: Any = None, **options: Any) -> Ends:
    """min(max(a, low), high), also if low is above high."""
    low, high = options.get("min", low), options.get("max", high)
    found = Interval(*ends(a, dtype), dtype, False, lift(a).static)
    if low is not None:
        found = Interval(*maximum(dtype, found, low), dtype)
    if high is not None:
        found = Interval(*minimum(dtype, found, high), dtype)
    return found.low, found.high


def clamp_max(dtype: Any, a: Any, high: Any) -> Ends:
    """min(a, high)."""
    return clamp(dtype, a, None, high)


def relu(dtype: Any, a: Any) -> Ends:
    """max(a, 0)."""
    return clamp(dtype, a, 0)


def magnitude(dtype: Any, a: Any) -> Ends:
    """abs(a)."""
    low, high = ends(a, dtype)
    if lift(a).static[0] >= 0:
        return low, high
    return most(low, -high, 0 if is_int(dtype) else 0.0), most(-low, high)


def sign(dtype: Any, a: Any) -> Ends:
    """-1, 0 or 1."""
    if dtype == torch.bool:
        raise Unsupported
    low, high = (_sign(end) for end in ends(a, dtype))
    if lift(a).nan is False:
        return low, high
    return least(low, 0), most(high, 0)  # the sign of NaN is 0, or NaN since PyTorch 2.13


def _sign(a: Number) -> Number:
    if isinstance(a, Tensor):
        return torch.sign(a)
    return (a > 0) - (a < 0)
