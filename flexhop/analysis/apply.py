"""Apply one operator to intervals: its rule, and the consequences of its traits.

Wrap-around, NaN and rounding are handled here, once for all rules. So are the values known to
occur.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from flexhop.analysis.interval import (
    HUGE,
    Interval,
    Number,
    Unsupported,
    apart,
    both,
    either,
    ends,
    extent,
    is_int,
    lift,
    like,
    negate,
    point,
    promoted,
    select,
    unknown,
    uses_of,
    widened,
)
from flexhop.analysis.operators import HARMLESS, OPERATORS, Operator, Trait, packet_of

aten = torch.ops.aten
_LARGEST_FACTOR = 2**31  # limit for products in int64


def apply(
    target: Any, dtype: torch.dtype, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Interval:
    """The interval of one operator's result.

    Args:
        target: an operator, or an overload of one.
        dtype: dtype of the result.
        args: its operands, each an Interval or a plain number from the program.
        kwargs: its keywords.
    """
    packet = packet_of(target)
    operator = OPERATORS.get(packet)
    found = [a for a in args if isinstance(a, Interval)]
    if operator is None or set(kwargs) - HARMLESS - set(operator.options):
        return unknown(dtype, uses_of(found))
    if _is_complex(dtype, args):
        return unknown(dtype, uses_of(found))
    options = {name: kwargs[name] for name in operator.options if name in kwargs}
    if any(isinstance(option, Interval) for option in options.values()):
        return unknown(dtype)
    try:
        low, high, *nan = operator.ends(dtype, *args, **options)
    except Unsupported:
        return unknown(dtype, uses_of(found))
    plain = [_plain(a) if isinstance(a, Interval) else a for a in args]
    static = _static(operator, dtype, plain, options)
    if Trait.FACTORY in operator.traits:
        return point(low, dtype, static)
    result = Interval(low, high, dtype, nan[0] if nan else False, static, uses_of(found))
    result, is_safe = _settled(operator, result, found)
    return _attained(packet, operator.traits, result, args) if is_safe else result


def _is_complex(dtype: torch.dtype, args: Sequence[Any]) -> bool:
    """Whether numbers without an order are among the operands or results."""
    kinds = (a.dtype for a in args if isinstance(a, Interval))
    is_number = any(isinstance(a, complex) for a in args)
    return is_number or dtype.is_complex or any(kind.is_complex for kind in kinds)


def _plain(a: Interval) -> Interval:
    return Interval(*a.static, a.dtype, a.nan if isinstance(a.nan, bool) else True, a.static)


def _static(
    operator: Operator, dtype: torch.dtype, args: list[Any], options: dict[str, Any]
) -> tuple[Any, Any]:
    """Plain bounds, from the same rule applied to plain bounds."""
    try:
        low, high, *_ = operator.ends(dtype, *args, **options)
    except (Unsupported, OverflowError, ValueError):
        return extent(dtype)
    if isinstance(low, Tensor) or isinstance(high, Tensor) or low != low or high != high:
        return extent(dtype)
    if dtype.is_floating_point:
        return widened(dtype, low, high)  # ours are doubles, those of mods are rounded
    return low, high


def _settled(operator: Operator, result: Interval, found: list[Interval]) -> tuple[Interval, bool]:
    """The result in its dtype, and whether its ends are still those of the rule."""
    dtype = result.dtype
    is_one = Trait.EXACT in operator.traits and all(a.is_point for a in found)
    if dtype.is_floating_point:
        return _settled_float(result, found)
    if is_one:
        result = dataclasses.replace(result, high=result.low)
    if not is_int(dtype) or _fits(result.static, dtype):
        return result, True
    low, high = result.low, result.high
    if low is high and isinstance(low, Tensor):
        low = high = low.to(dtype).to(torch.int64)  # one value: wraps around exactly
    else:
        low, high = _guarded(operator, result, found)
    return dataclasses.replace(result, low=low, high=high, static=extent(dtype)), False


def _settled_float(result: Interval, found: list[Interval]) -> tuple[Interval, bool]:
    """Ends without NaN: if one is NaN, the value is unknown."""
    low, high, nan = result.low, result.high, result.nan
    for a in found:
        nan = either(nan, a.nan)
    is_plain = not isinstance(low, Tensor) and not isinstance(high, Tensor)
    if is_plain:
        if low != low or high != high:
            low, high, nan = -math.inf, math.inf, True
    else:
        bad = either(_is_nan(low), _is_nan(high))
        low = select(bad, _infinity(low, high, -1), _float_end(low, high))
        high = select(bad, _infinity(low, high, 1), _float_end(high, low))
        nan = either(nan, bad)
    is_rounded = is_plain or result.dtype.itemsize == 2
    if is_rounded:
        # Plain numbers are doubles. 16-bit values are rounded inconsistently: eager mode may or
        # may not round a number from the program, and compiled code computes everything in fp32.
        low, high = widened(result.dtype, low, high)
    return dataclasses.replace(result, low=low, high=high, nan=nan), not is_rounded


def _is_nan(a: Number) -> Number:
    return torch.isnan(a) if isinstance(a, Tensor) else a != a


def _float_end(end: Number, other: Number) -> Number:
    return end if isinstance(end, Tensor) else like(other, end)


def _infinity(a: Number, b: Number, sign: int) -> Tensor:
    tensor = a if isinstance(a, Tensor) else b
    return torch.full_like(tensor, sign * math.inf)


def _fits(static: tuple[Any, Any], dtype: torch.dtype) -> bool:
    low, high = extent(dtype)
    return low <= static[0] and static[1] <= high


def _guarded(operator: Operator, result: Interval, found: list[Interval]) -> tuple[Number, Number]:
    """Integers that wrap around may be anything: check in each box that they do not."""
    low, high = result.low, result.high
    first, last = extent(result.dtype)
    ok: Number = True
    if result.dtype == torch.int64:  # our own arithmetic would wrap too: check the operands
        limit = _LARGEST_FACTOR if Trait.PRODUCT in operator.traits else HUGE
        for a in found:
            ok = both(ok, both(a.low >= -limit, a.high <= limit))
    else:
        ok = both(low >= first, high <= last)
    if ok is True:
        return low, high
    return select(ok, low, like(low, first)), select(ok, high, like(high, last))


# Values known to occur in each box; others are only possible.


def _attained(packet: Any, traits: Trait, result: Interval, args: Sequence[Any]) -> Interval:
    """Operands that depend on different positions take all pairs of their values.

    So a function that is monotone in each of them reaches its ends where they reach theirs.
    """
    found = [a for a in args if isinstance(a, Interval)]
    if result.is_point and result.dtype != torch.bool:
        return dataclasses.replace(result, tight=True, gapless=not result.dtype.is_floating_point)
    tight = Trait.TIGHT in traits and apart(found) and all(a.tight for a in found)
    gapless = tight and Trait.GAPLESS in traits and all(a.gapless for a in found)
    first = args[0] if isinstance(args[0], Interval) else result
    if Trait.STEP in traits:
        others = (a for a in args[1:] if isinstance(a, Interval))
        gapless = gapless and not any(a.uses & {"q", "k"} for a in others)
    if Trait.MAGNITUDE in traits:
        tight = tight and first.gapless
    if Trait.CONVERSION in traits:
        tight = tight and torch.bool not in (result.dtype, first.dtype)
        gapless = gapless and is_int(result.dtype) and is_int(first.dtype)
    if result.dtype == torch.bool:
        return dataclasses.replace(result, **_occurs(packet, traits, result, args))
    return dataclasses.replace(result, tight=tight, gapless=gapless)


def _occurs(packet: Any, traits: Trait, result: Interval, args: Sequence[Any]) -> dict[str, Any]:
    """Whether a box is known to contain True, and to contain False."""
    if result.is_point:
        return {"some": result.low, "miss": negate(result.low), "decided": True}
    operands = [lift(a) for a in args if not isinstance(a, torch.dtype)]  # of a conversion
    some, miss, decided = False, False, False
    is_whole = True  # some includes low, and miss includes not high
    if Trait.COMPARISON in traits:
        some, miss, decided = _compared(packet, result, operands)
        is_whole = some is not False or miss is not False
    elif Trait.NOT in traits and operands[0].dtype == torch.bool:
        some, miss, decided = operands[0].miss, operands[0].some, operands[0].decided
    elif traits & (Trait.AND | Trait.OR) and all(a.dtype == torch.bool for a in operands):
        some, miss = _joined(Trait.OR in traits, *operands)
        decided = apart(operands) and all(a.decided for a in operands)
    elif Trait.CHOICE in traits and operands[0].dtype == torch.bool:
        c, a, b = operands
        some = either(both(c.low, a.some), both(negate(c.high), b.some))
        miss = either(both(c.low, a.miss), both(negate(c.high), b.miss))
        is_whole = False
    else:
        is_whole = False
    if not is_whole:
        some, miss = either(some, result.low), either(miss, negate(result.high))
    return {"some": some, "miss": miss, "decided": decided}


def _compared(
    packet: Any, result: Interval, operands: list[Interval]
) -> tuple[Number, Number, bool]:
    """For two operands that reach their ends, and all pairs of them."""
    if not apart(operands) or not all(a.tight and a.nan is False for a in operands):
        return False, False, False
    if packet not in (aten.eq, aten.ne):
        return result.high, negate(result.low), True
    gapless = all(a.gapless for a in operands)
    if packet is aten.eq:
        met = result.high if gapless else _meets(*operands)
        return met, negate(result.low), gapless
    met = negate(result.low) if gapless else _meets(*operands)
    return result.high, met, gapless


def _meets(a: Interval, b: Interval) -> Number:
    """Whether the operands share an end."""
    dtype = promoted(a, b)
    (p, q), (r, s) = ends(a, dtype), ends(b, dtype)
    return either(either(p == r, p == s), either(q == r, q == s))


def _joined(is_or: bool, a: Interval, b: Interval) -> tuple[Number, Number]:
    """Known to contain True, and False: one part suffices for one, parts that meet for the
    other."""
    if not is_or:  # the same for the negation
        a, b = (_inverse(x) for x in (a, b))
    enough = either(a.some, b.some)
    if apart([a, b]):
        together = both(a.miss, b.miss)
    else:
        together = either(both(negate(a.high), b.miss), both(negate(b.high), a.miss))
    return (enough, together) if is_or else (together, enough)


def _inverse(a: Interval) -> Interval:
    return dataclasses.replace(a, low=negate(a.high), high=negate(a.low), some=a.miss, miss=a.some)
