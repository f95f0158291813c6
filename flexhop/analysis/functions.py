"""Interval rules for functions of one number; see arithmetic.py."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flexhop.analysis import arithmetic
from flexhop.analysis.interval import (
    Number,
    Unsupported,
    are_finite,
    are_moderate,
    ends,
    least,
    like,
    most,
    widened,
)
from flexhop.analysis.logic import shift_count

Ends = tuple[Any, ...]
EVERYWHERE = (-math.inf, math.inf)
POSITIVE = (1e-37, math.inf)  # where logarithms are defined and numbers are normal


def growing(
    function: Callable[..., Any],
    value_range: tuple[float, float] = EVERYWHERE,
    *,
    inside: tuple[float, float] = EVERYWHERE,
) -> Callable[..., Ends]:
    """A rule for a non-decreasing function.

    Args:
        function: a function of a tensor.
        value_range: its range of values.
        inside: its domain.
    """
    lowest, highest = value_range

    def rule(dtype: Any, a: Any) -> Ends:
        found = ends(a, dtype)
        if all(map(math.isfinite, value_range)) and _is_open(*found):
            return value_range
        low, high = widened(dtype, *_values(function, found, inside))
        low = most(low, lowest) if lowest > -math.inf else low
        return low, least(high, highest) if highest < math.inf else high

    return rule


def rounding(function: Callable[..., Any]) -> Callable[..., Ends]:
    """A rule for floor and similar functions, whose results are exact."""

    def rule(dtype: Any, a: Any) -> Ends:
        return _values(function, ends(a, dtype), EVERYWHERE)

    return rule


def _is_open(low: Number, high: Number) -> bool:
    """Whether nothing is known: plain ends that are not finite."""
    return not (isinstance(low, Tensor) or isinstance(high, Tensor) or are_finite(low, high))


def _values(
    function: Callable[..., Any], found: tuple[Number, Number], inside: tuple[float, float]
) -> tuple[Number, Number]:
    """Apply a function to both ends; NaN outside its domain."""
    low, high = found
    if isinstance(low, Tensor) or isinstance(high, Tensor):
        return _call(function, low, high), _call(function, high, low)
    if not are_finite(low, high) or low < inside[0] or high > inside[1]:
        raise Unsupported
    return _item(function, low), _item(function, high)


def _item(function: Callable[..., Any], value: float) -> float:
    return function(torch.tensor(float(value), dtype=torch.float64)).item()


def _call(function: Callable[..., Any], value: Number, other: Number) -> Number:
    return function(value if isinstance(value, Tensor) else like(other, value))


def wave(dtype: Any, a: Any) -> Ends:
    """sin and cos."""
    return -1.0001, 1.0001, not are_moderate(dtype, a)


def shift_left(dtype: Any, a: Any, b: Any) -> Ends:
    """a << b, of a plain b."""
    return arithmetic.multiply(dtype, a, 1 << shift_count(b, 31))


def shift_right(dtype: Any, a: Any, b: Any) -> Ends:
    """a >> b, of a plain b."""
    return arithmetic.floor_divide(dtype, a, 1 << shift_count(b, 63))
