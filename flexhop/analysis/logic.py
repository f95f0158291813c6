"""Interval rules for comparisons, bits, choices and conversions; see arithmetic.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flexhop.analysis.interval import (
    Interval,
    Number,
    Unsupported,
    are_finite,
    both,
    cast,
    constant,
    either,
    ends,
    extent,
    is_int,
    least,
    lift,
    like,
    most,
    negate,
    promoted,
    select,
    truth,
    unless_nan,
)

Ends = tuple[Any, ...]


def less(_: Any, a: Any, b: Any, *, strict: bool = True) -> Ends:
    """a < b."""
    dtype = promoted(a, b)
    (p, q), (r, s) = ends(a, dtype), ends(b, dtype)
    always, maybe = (q < r, p < s) if strict else (q <= r, p <= s)
    return unless_nan(always, a, b), maybe


def less_equal(dtype: Any, a: Any, b: Any) -> Ends:
    """a <= b."""
    return less(dtype, a, b, strict=False)


def greater(dtype: Any, a: Any, b: Any) -> Ends:
    """a > b."""
    return less(dtype, b, a)


def greater_equal(dtype: Any, a: Any, b: Any) -> Ends:
    """a >= b."""
    return less(dtype, b, a, strict=False)


def equal(_: Any, a: Any, b: Any) -> Ends:
    """a == b."""
    dtype = promoted(a, b)
    (p, q), (r, s) = ends(a, dtype), ends(b, dtype)
    if dtype == torch.bool:
        p, q, r, s = (cast(x, torch.int64) for x in (p, q, r, s))
    always = both(q <= r, s <= p)  # p <= q and r <= s: all four are equal
    return unless_nan(always, a, b), both(p <= s, r <= q)


def not_equal(dtype: Any, a: Any, b: Any) -> Ends:
    """a != b."""
    always, maybe = equal(dtype, a, b)
    return negate(maybe), negate(always)


# Bits.


def and_(dtype: Any, a: Any, b: Any) -> Ends:
    """a & b."""
    if dtype == torch.bool:
        (p, q), (r, s) = truth(a), truth(b)
        return both(p, r), both(q, s)
    (p, q), (r, s) = _bits(dtype, a), _bits(dtype, b)
    return _in_order(dtype, p & r, q & s)


def or_(dtype: Any, a: Any, b: Any) -> Ends:
    """a | b."""
    if dtype == torch.bool:
        (p, q), (r, s) = truth(a), truth(b)
        return either(p, r), either(q, s)
    (p, q), (r, s) = _bits(dtype, a), _bits(dtype, b)
    return _in_order(dtype, p | r, q | s)


def xor(dtype: Any, a: Any, b: Any) -> Ends:
    """a ^ b."""
    if dtype == torch.bool:
        (p, q), (r, s) = truth(a), truth(b)
        always = either(both(p, negate(s)), both(negate(q), r))
        never = either(both(p, r), both(negate(q), negate(s)))
        return always, negate(never)
    (p, q), (r, s) = _bits(dtype, a), _bits(dtype, b)
    return _in_order(dtype, (p & ~s) | (r & ~q), (q | s) & ~(p & r))


def not_(dtype: Any, a: Any) -> Ends:
    """~a."""
    if dtype == torch.bool:
        low, high = truth(a)
        return negate(high), negate(low)
    low, high = ends(a, dtype)
    return -1 - high, -1 - low


def of_truth(rule: Callable[..., Ends]) -> Callable[..., Ends]:
    """A rule for bools, from whether its operands are nonzero."""

    def rule_of_truth(_: Any, *values: Any) -> Ends:
        return rule(torch.bool, *(Interval(*truth(v), torch.bool) for v in values))

    return rule_of_truth


def _bits(dtype: Any, a: Any) -> tuple[Number, Number]:
    """The bits that are set in all numbers of an interval, and those set in any.

    Numbers share the bits above the highest one in which the ends differ.
    """
    low, high = ends(a, dtype)
    if not is_int(dtype) or not are_finite(low, high):
        raise Unsupported
    free = _filled(low ^ high)
    return low & ~free, low | free


def _in_order(dtype: Any, low: Number, high: Number) -> Ends:
    """Bits as ends: of any number of the dtype if the sign is among those that differ."""
    is_mixed, (first, last) = low > high, extent(dtype)
    return select(is_mixed, like(low, first), low), select(is_mixed, like(high, last), high)


def _filled(a: Number) -> Number:
    """Set all bits below the highest set one."""
    if not isinstance(a, Tensor):
        return (1 << int(a).bit_length()) - 1 if a >= 0 else -1
    # Looked up, because each `a = a | (a >> n)` would use `a` twice: Inductor copies what computes
    # it into both, and compiled six of them inside of six others for minutes. The numbers are
    # computed, because a list would be copied from the host, which CUDA graphs forbid.
    bits = torch.arange(-1, 64, device=a.device)
    half = 1 << (bits - 1).clamp(min=0)
    filled = half - 1 + torch.where(bits > 0, half, bits)  # -1, 0, 1, 3, ..., 2**63 - 1
    # In another dimension, because an index without any would be read as a number on the host.
    return filled[torch.searchsorted(filled, a.long()[None].contiguous())][0]


def shift_count(value: Any, limit: int) -> int:
    """A plain shift count.

    Raises:
        Unsupported: it is not a single number, or out of range.
    """
    low, high = lift(value).low, lift(value).high
    if isinstance(low, Tensor) or isinstance(high, Tensor) or low != high or not 0 <= low < limit:
        raise Unsupported
    return int(low)


# Choice and conversion.


def where(dtype: Any, condition: Any, a: Any, b: Any) -> Ends:
    """a where a condition holds, else b."""
    always, maybe = truth(condition)
    (p, q), (r, s) = ends(a, dtype), ends(b, dtype)
    if dtype == torch.bool:
        low = either(both(always, p), either(both(negate(maybe), r), both(p, r)))
        return low, either(both(maybe, q), both(negate(always), s))
    if always is maybe:
        return _chosen(dtype, always, (p, r)), _chosen(dtype, always, (q, s))
    p, q, r, s = (_beside(x, dtype, always, maybe) for x in (p, q, r, s))
    low = select(always, p, select(negate(maybe), r, least(p, r)))
    high = select(always, q, select(negate(maybe), s, most(q, s)))
    return low, high


def _chosen(dtype: torch.dtype, condition: Number, choices: tuple[Number, Number]) -> Number:
    return select(condition, *(_beside(x, dtype, condition, condition) for x in choices))


def _beside(value: Number, dtype: torch.dtype, *conditions: Number) -> Number:
    """A plain number in the dtype of the ends, to combine with tensors."""
    tensors = [c for c in conditions if isinstance(c, Tensor)]
    if isinstance(value, Tensor) or not tensors:
        return value
    carrier = torch.int64 if is_int(dtype) else dtype
    return torch.full((), value, dtype=carrier, device=tensors[0].device)


def convert(dtype: Any, a: Any, *_: Any) -> Ends:
    """a in another dtype."""
    a = lift(a)
    if dtype == torch.bool:
        return truth(a)
    if a.dtype == torch.bool:
        low, high = (cast(end, torch.int64) for end in (a.low, a.high))
        return ends(Interval(low, high, torch.int64), dtype)
    if is_int(dtype) and a.dtype.is_floating_point:
        return _truncated(dtype, a)
    return ends(a, dtype)


def _truncated(dtype: torch.dtype, a: Interval) -> Ends:
    """Truncate floats towards 0; values that are not finite may become any integer."""
    first, last = extent(dtype)
    if not isinstance(a.low, Tensor) and not isinstance(a.high, Tensor):
        if not are_finite(a.low, a.high) or a.nan is not False:
            raise Unsupported
        return int(a.low), int(a.high)
    ok = both(negate(a.nan), both(a.low > -(2.0**31) + 1, a.high < 2.0**31 - 256))
    other = a.low if isinstance(a.low, Tensor) else a.high
    low, high = (
        (end if isinstance(end, Tensor) else like(other, end)).trunc() for end in (a.low, a.high)
    )
    if not isinstance(ok, Tensor):
        if not ok:
            raise Unsupported
        return low.to(torch.int64), high.to(torch.int64)
    low, high = (torch.where(ok, end, 0.0).to(torch.int64) for end in (low, high))
    return torch.where(ok, low, first), torch.where(ok, high, last)


def full(dtype: Any, *args: Any) -> Ends:
    """The last operand, regardless of the others."""
    low, _ = ends(lift(args[-1]), dtype)
    return low, low


def filled_with(value: int) -> Callable[..., Ends]:
    """A rule for operators that create zeros or ones."""

    def rule(dtype: Any, *_: Any) -> Ends:
        return ends(constant(bool(value) if dtype == torch.bool else value), dtype)

    return rule
