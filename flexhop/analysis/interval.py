"""Intervals: bounds of a mod's values, for many boxes of scores at once.

A box is a set of scores: a batch, a head, queries q0..q1 and keys k0..k1. The ends of an interval
are tensors that broadcast over the boxes, or plain numbers if all boxes agree. Rules never read
values, so nothing here synchronises.

For bools, low is "True everywhere" and high is "possibly True somewhere". Integers are computed in
int64, floats in their own dtype: rounding is monotone, so rounded ends bound rounded values.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

Number = Any  # a Tensor, or a plain bool, int or float
HUGE = 2**62  # magnitude above which int64 sums may overflow
INDICES = ("b", "h", "q", "k")
ANYTHING = frozenset(INDICES)
_INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Interval:
    """low <= value <= high in each box; low is high (the same object) for a single value.

    Args:
        low, high: the ends, tensors or plain numbers.
        dtype: dtype of the value.
        nan: whether the value may be NaN.
        static: plain bounds for all boxes.
        uses: which of b, h, q and k it depends on.
        tight: whether some score of each box has the value low, and some the value high.
        gapless: whether every integer between them is some score's value.
        some, miss: for bools, whether a score of the box is known to be True, and known to be
            False. They promise more than `high` and `not low`, which say what is possible.
        decided: for bools, whether some is high and miss is not low, in every box.
    """

    low: Number
    high: Number
    dtype: torch.dtype
    nan: Number = False
    static: tuple[Any, Any] = (-math.inf, math.inf)
    uses: frozenset[str] = ANYTHING
    tight: bool = False
    gapless: bool = False
    some: Number = False
    miss: Number = False
    decided: bool = False

    @property
    def is_point(self) -> bool:
        """Whether every box has one value."""
        return self.low is self.high


class Unsupported(Exception):
    """An operator has no rule, or its rule does not apply here: the result is unknown."""


def is_int(dtype: torch.dtype) -> bool:
    """Whether values of a dtype are integers; bools are not."""
    return dtype in _INTEGERS


def extent(dtype: torch.dtype) -> tuple[Any, Any]:
    """Smallest and largest number of a dtype."""
    if dtype == torch.bool:
        return False, True
    if is_int(dtype):
        info = torch.iinfo(dtype)
        return info.min, info.max
    return -math.inf, math.inf


def unknown(dtype: torch.dtype, uses: frozenset[str] = ANYTHING) -> Interval:
    """Any number of a dtype."""
    low, high = extent(dtype)
    return Interval(low, high, dtype, dtype.is_floating_point, (low, high), uses)


def point(
    value: Number, dtype: torch.dtype, static: tuple[Any, Any] | None = None, uses: str = ""
) -> Interval:
    """One value in each box, the same for all of its queries and keys."""
    if not isinstance(value, Tensor):
        static = (value, value)
    nan: Number = False
    if dtype.is_floating_point:
        nan = torch.isnan(value) if isinstance(value, Tensor) else value != value
    found = Interval(
        value, value, dtype, nan, static or extent(dtype), frozenset(uses), True, True
    )
    if dtype != torch.bool:
        return found
    return dataclasses.replace(found, some=value, miss=negate(value), decided=True)


def constant(value: bool | int | float) -> Interval:
    """A number from the program; its dtype is that of its kind."""
    kind = {bool: torch.bool, int: torch.int64, float: torch.float64}[type(value)]
    return point(value, kind)


def lift(value: Any) -> Interval:
    """An operand as an interval."""
    return value if isinstance(value, Interval) else constant(value)


def apart(values: Iterable[Interval]) -> bool:
    """Whether no two share a position: their values then occur in all pairs."""
    used = [use for value in values for use in value.uses if use in "qk"]
    return len(used) == len(set(used))


def uses_of(values: Iterable[Interval]) -> frozenset[str]:
    """The union of their dependences."""
    return frozenset[str]().union(*(value.uses for value in values))


# Numbers, as tensors or plain.


def least(*values: Number) -> Number:
    """The smallest number, per box."""
    return _fold(values, is_least=True)


def most(*values: Number) -> Number:
    """The largest number, per box."""
    return _fold(values, is_least=False)


def _fold(values: tuple[Number, ...], *, is_least: bool) -> Number:
    result = values[0]
    for value in values[1:]:
        if value is result:
            continue
        if isinstance(result, Tensor) and isinstance(value, Tensor):
            result = (torch.minimum if is_least else torch.maximum)(result, value)
        elif isinstance(result, Tensor):
            result = _bounded(result, value, is_least)
        elif isinstance(value, Tensor):
            result = _bounded(value, result, is_least)
        else:
            result = (min if is_least else max)(result, value)
    return result


def _bounded(tensor: Tensor, number: Any, is_least: bool) -> Number:
    """The minimum or maximum of a tensor and a plain number."""
    if not tensor.dtype.is_floating_point and not isinstance(number, int):
        if not math.isfinite(number):
            return tensor if (number > 0) == is_least else number
        tensor = tensor.double()
    return tensor.clamp(max=number) if is_least else tensor.clamp(min=number)


def select(condition: Number, a: Number, b: Number) -> Number:
    """a where a condition holds, else b."""
    if not isinstance(condition, Tensor):
        return a if condition else b
    return torch.where(condition, a, b)


def negate(a: Number) -> Number:
    """Not a."""
    return ~a if isinstance(a, Tensor) else not a


def both(a: Number, b: Number) -> Number:
    """a and b."""
    if not isinstance(a, Tensor):
        return b if a else False
    if not isinstance(b, Tensor):
        return a if b else False
    return a & b


def either(a: Number, b: Number) -> Number:
    """a or b."""
    if not isinstance(a, Tensor):
        return True if a else b
    if not isinstance(b, Tensor):
        return True if b else a
    return a | b


def like(end: Number, value: Any) -> Number:
    """Convert a plain number to the form of an end."""
    return torch.full_like(end, value) if isinstance(end, Tensor) else value


def cast(value: Number, dtype: torch.dtype) -> Number:
    """Convert a number to the dtype in which intervals of `dtype` are computed."""
    if isinstance(value, Tensor):
        return value.to(torch.int64 if is_int(dtype) else dtype)
    if dtype == torch.bool:
        return bool(value)
    if is_int(dtype):
        return int(value) if math.isfinite(value) else value
    if dtype == torch.float64:
        return float(value)
    return torch.tensor(float(value), dtype=dtype).item()


def are_finite(*values: Number) -> bool:
    """Whether plain numbers are finite; tensors pass."""
    return all(isinstance(v, Tensor) or math.isfinite(v) for v in values)


def promoted(*values: Any) -> torch.dtype:
    """The common dtype of 0-d tensors and numbers from the program."""
    dtypes = [v.dtype for v in values if isinstance(v, Interval)]
    found = dtypes[0] if dtypes else torch.float32
    for dtype in dtypes[1:]:
        found = found if dtype == found else torch.promote_types(found, dtype)
    for value in values:
        if isinstance(value, float) and not found.is_floating_point:
            found = torch.get_default_dtype()
        elif isinstance(value, int) and not isinstance(value, bool) and found == torch.bool:
            found = torch.int64
    return found


def ends(value: Any, dtype: torch.dtype) -> tuple[Number, Number]:
    """Both ends in the dtype of a computation.

    Raises:
        Unsupported: the dtype cannot represent a number from the program, and PyTorch wraps it.
    """
    if not isinstance(value, Interval) and is_int(dtype) and are_finite(value):
        if not extent(dtype)[0] <= value <= extent(dtype)[1]:
            raise Unsupported
    value = lift(value)
    is_double = isinstance(value.low, (int, float)) and dtype.is_floating_point
    if value.dtype == dtype and not is_double:
        return value.low, value.high
    low = cast(value.low, dtype)
    return low, low if value.is_point else cast(value.high, dtype)


def truth(value: Any) -> tuple[Number, Number]:
    """Whether a value is not 0: everywhere, and somewhere."""
    value = lift(value)
    if value.dtype == torch.bool:
        return value.low, value.high
    zero = both(value.low <= 0, value.high >= 0)
    only_zero = both(value.low >= 0, value.high <= 0)
    return negate(zero), negate(unless_nan(only_zero, value))


def unless_nan(always: Number, *operands: Any) -> Number:
    """True, unless an operand may be NaN."""
    for operand in operands:
        nan = lift(operand).nan
        if nan is not False:
            always = both(always, negate(nan))
    return always


def are_moderate(dtype: torch.dtype, *values: Any) -> bool:
    """Whether plain bounds show that floats are finite and far from overflow."""
    limit = torch.finfo(dtype).max / 4
    return all(all(abs(end) < limit for end in lift(v).static) for v in values)


def widened(dtype: torch.dtype, low: Number, high: Number) -> tuple[Number, Number]:
    """Widen by 8 ulps: libraries differ in the last bits and need not be monotone there."""
    slack, largest = 8 * torch.finfo(dtype).eps, torch.finfo(dtype).max

    def room(end: Number) -> Number:
        return least(abs(end), largest) * slack + slack * 2**-10

    low, high = low - room(low), high + room(high)
    if (
        not isinstance(low, Tensor) and abs(low) > largest
    ):  # doubles have a larger range than the dtype
        low = largest if low > 0 else -math.inf
    if not isinstance(high, Tensor) and abs(high) > largest:
        high = math.inf if high > 0 else -largest
    return low, high
