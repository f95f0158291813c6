"""Rules of operators: what they say of intervals holds for the values in them."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flexhop.analysis.apply import apply
from flexhop.analysis.interval import Interval, extent, is_int, point
from flexhop.analysis.operators import HARMLESS, OPERATORS, Trait

aten = torch.ops.aten
ONE = {aten.neg, aten.abs, aten.sign, aten.relu, aten.square, aten.bitwise_not, aten.logical_not}
ONE |= {aten.floor, aten.ceil, aten.trunc, aten.round, aten.sqrt, aten.exp, aten.exp2, aten.expm1}
ONE |= {aten.log, aten.log2, aten.log10, aten.log1p, aten.tanh, aten.sigmoid, aten.atan, aten.sin}
ONE |= {aten.cos, aten.reciprocal, aten.erf, aten.asinh}
OF_NUMBER = {aten.clamp_min, aten.clamp_max, aten.pow, aten.__lshift__, aten.__rshift__}
TWO = {aten.add, aten.sub, aten.rsub, aten.mul, aten.floor_divide, aten.div, aten.remainder}
TWO |= {
    aten.fmod,
    aten.minimum,
    aten.maximum,
    aten.lt,
    aten.le,
    aten.gt,
    aten.ge,
    aten.eq,
    aten.ne,
}
TWO |= {aten.bitwise_and, aten.bitwise_or, aten.bitwise_xor, aten.logical_and, aten.logical_or}
TWO |= {aten.logical_xor, aten.bitwise_left_shift, aten.bitwise_right_shift, aten.__and__}
TWO |= {aten.__or__, aten.__xor__, aten.true_divide}
CONVERSIONS = (torch.int16, torch.int32, torch.int64, torch.float32, torch.bfloat16, torch.bool)
DTYPES = (torch.int32, torch.int64, torch.int16, torch.float32, torch.bfloat16, torch.bool)
LARGE = {torch.int16: 2**15 - 1, torch.int32: 2**31 - 1, torch.int64: 2**40, torch.bool: 1}


def test_every_rule_is_tested_here():
    elsewhere = {aten.where, aten.clamp, aten._to_copy, torch.ops.prims.convert_element_type}
    factories = {p for p, operator in OPERATORS.items() if Trait.FACTORY in operator.traits}
    assert set(OPERATORS) == ONE | TWO | OF_NUMBER | elsewhere | factories


def values_of(draw, dtype):
    """A few values of a box, and a dtype's extremes now and then."""
    if dtype.is_floating_point:
        numbers = st.floats(-100, 100, width=16) | st.sampled_from([0.0, -0.0, 3e4, -1e30])
        numbers |= st.sampled_from([math.inf, -math.inf, math.nan])
    else:
        large = LARGE[dtype]
        numbers = st.integers(-9 if dtype != torch.bool else 0, min(9, large))
        numbers |= st.sampled_from([0, large]) | st.integers(-min(large, 2000), min(large, 2000))
        numbers = numbers.map(abs) if dtype == torch.bool else numbers
    return torch.tensor(draw(st.lists(numbers, min_size=1, max_size=6)), dtype=dtype)


def interval_of(draw, values, uses):
    """The interval of a box that has these values: ends as tensors, or as plain numbers."""
    known = values[~torch.isnan(values)] if values.is_floating_point() else values
    nan = bool((values != values).any())
    if known.numel() == 0:
        known = torch.tensor([-math.inf, math.inf], dtype=values.dtype)
    dtype = values.dtype
    carried = known.long() if is_int(dtype) else known
    low, high = carried.min(), carried.max()
    static = extent(dtype) if draw(st.booleans()) else (low.item(), high.item())
    if nan or draw(st.booleans()):
        return Interval(low, high, dtype, torch.tensor(nan) if nan else False, static, uses)
    low, high = low.item(), high.item()
    static = (low, high)
    if low == high and draw(st.booleans()):
        return point(low, dtype)
    return Interval(low, high, dtype, False, static, uses)


def check(target, operands, intervals, kwargs=None):
    """Every value that an operator gives lies in the interval that the analysis gives."""
    kwargs = kwargs or {}
    for values in itertools.product(*operands):
        try:
            found = target(*values, **kwargs)
        except (RuntimeError, NotImplementedError, TypeError):
            return  # PyTorch has no such operator of these dtypes
        result = apply(target, found.dtype, intervals, kwargs)
        value = found.item()
        if value != value:
            nan = result.nan
            assert bool(nan), (target, values, result)
            continue
        low, high = (float(e) if found.dtype.is_floating_point else int(e) for e in ends(result))
        assert low <= value <= high, (target, values, result)
        first, last = result.static
        assert first <= value <= last or found.dtype == torch.bool, (target, values, result)


def ends(result):
    return result.low, result.high


def overload(packet, is_number=False):
    """The overload of an operator for tensors, or for a tensor and a number."""
    names = packet.overloads()
    wanted = ("Scalar", "Tensor_Scalar", "default") if is_number else ("Tensor", "default", "self")
    return getattr(packet, next(name for name in wanted if name in names))


@pytest.mark.parametrize("packet", sorted(ONE, key=str), ids=str)
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_one_operand(packet, data):
    values = values_of(data.draw, data.draw(st.sampled_from(DTYPES)))
    interval = interval_of(data.draw, values, frozenset("q"))
    check(overload(packet), [values], [interval])


@pytest.mark.parametrize("packet", sorted(TWO, key=str), ids=str)
@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_two_operands(packet, data):
    dtypes = [data.draw(st.sampled_from(DTYPES)) for _ in "ab"]
    values = [values_of(data.draw, dtype) for dtype in dtypes]
    uses = [frozenset(data.draw(st.sampled_from(["q", "k", "qk", ""]))) for _ in "ab"]
    intervals = [interval_of(data.draw, v, u) for v, u in zip(values, uses, strict=True)]
    target = overload(packet)
    if data.draw(st.booleans()) and packet not in (aten.minimum, aten.maximum):
        number = values[1][0].item()
        if number == number and abs(number) != math.inf:
            operands, found = [values[0], [number]], [intervals[0], number]
            check(overload(packet, "Scalar" in packet.overloads()), operands, found)
            return
    rounding = data.draw(st.sampled_from([None, "floor", "trunc"])) if packet is aten.div else None
    if rounding:
        check(aten.div.Tensor_mode, values, intervals, {"rounding_mode": rounding})
        return
    check(target, values, intervals)


@pytest.mark.parametrize("packet", sorted(OF_NUMBER, key=str), ids=str)
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_a_number_of_the_program(packet, data):
    values = values_of(data.draw, data.draw(st.sampled_from(DTYPES)))
    interval = interval_of(data.draw, values, frozenset("q"))
    number = data.draw(st.integers(0, 7))
    check(overload(packet, is_number=True), [values, [number]], [interval, number])


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_conversions_and_choices(data):
    dtypes = [data.draw(st.sampled_from(DTYPES)) for _ in "ab"]
    a, b = (values_of(data.draw, dtype) for dtype in dtypes)
    condition = values_of(data.draw, torch.bool)
    found = [interval_of(data.draw, v, frozenset("q")) for v in (a, b, condition)]
    wanted = data.draw(st.sampled_from(CONVERSIONS))
    in_range = a.is_floating_point() and not wanted.is_floating_point and wanted != torch.bool
    if not in_range or bool((a.abs() < 3e4).all()):  # else what it gives is nobody's to say
        check(aten._to_copy.default, [a], found[:1], {"dtype": wanted})
    check(aten.where.self, [condition, a, b], [found[2], found[0], found[1]])
    low, high = sorted(data.draw(st.integers(-9, 9)) for _ in "ab")
    check(aten.clamp.default, [a, [low], [high]], [found[0], low, high])


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32])
def test_a_conversion_in_a_lowered_graph(dtype):
    """`keep[b, kv_idx].bool()`: Inductor's graphs pass the dtype by position."""
    convert = torch.ops.prims.convert_element_type.default
    result = apply(convert, dtype, (Interval(0, 1, torch.int64), dtype), {})
    assert (result.low, result.high, result.dtype) == (0, 1, dtype)


def test_what_has_no_rule_is_unknown():
    q = Interval(0, 5, torch.int32, False, (0, 5), frozenset("q"), True, True)
    found = apply(aten.bincount.default, torch.int64, [q], {})
    assert (found.low, found.high) == extent(torch.int64) and found.uses == {"q"}
    found = apply(aten.add.Tensor, torch.int32, [q, 1], {"surprise": 3})
    assert (found.low, found.high) == extent(torch.int32)
    assert "surprise" not in HARMLESS


def test_decided_means_known_to_occur():
    """Causal blocks: what is neither all nor nothing has both."""
    q0, k0 = torch.arange(0, 12, 4)[:, None], torch.arange(0, 12, 4)
    q = Interval(q0, q0 + 3, torch.int32, False, (0, 11), frozenset("q"), True, True)
    k = Interval(k0, k0 + 3, torch.int32, False, (0, 11), frozenset("k"), True, True)
    found = apply(aten.ge.Tensor, torch.bool, [q, k], {})
    assert found.decided
    assert torch.equal(found.some, found.high) and torch.equal(found.miss, ~found.low)
    keep = torch.ones(12, 12, dtype=torch.bool).tril().view(3, 4, 3, 4)
    assert torch.equal(found.low, keep.all(3).all(1))
    assert torch.equal(found.high, keep.any(3).any(1))
