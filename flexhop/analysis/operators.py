"""The table of operators that the analysis knows. All others are unknown.

An operator has an interval rule (arithmetic.py, logic.py, functions.py) and traits. The traits
determine which values are known to occur, the linear form of the result, and whether it grows.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from flexhop.analysis import arithmetic, functions, logic

aten, prims = torch.ops.aten, torch.ops.prims


class Trait(enum.Flag):
    """Properties of an operator."""

    NONE = 0
    EXACT = enum.auto()  # single-valued operands give a single value
    TIGHT = enum.auto()  # operands that occur in all pairs reach the ends of its rule
    GAPLESS = enum.auto()  # and all integers between them
    STEP = enum.auto()  # GAPLESS only if its other operands are the same for the whole box
    MAGNITUDE = enum.auto()  # TIGHT only if its operand is gapless: 0 must be taken
    CONVERSION = enum.auto()  # the same number in another dtype
    FACTORY = enum.auto()  # it has only the form of its operands
    COMPARISON = enum.auto()
    NOT = enum.auto()
    AND = enum.auto()
    OR = enum.auto()
    CHOICE = enum.auto()
    PRODUCT = enum.auto()  # may overflow int64 even if its operands are far from it
    GROWS = enum.auto()  # non-decreasing if no operand decreases


class Operator(NamedTuple):
    """ends: the rule for intervals. options: keywords that it takes."""

    ends: Callable[..., tuple[Any, ...]]
    traits: Trait = Trait.NONE
    options: tuple[str, ...] = ()


_SUM = Trait.EXACT | Trait.TIGHT | Trait.GAPLESS
_ORDER = _SUM | Trait.STEP | Trait.GROWS
_COMPARE = Trait.EXACT | Trait.COMPARISON
_CONVERT = _SUM | Trait.CONVERSION | Trait.GROWS
_AND, _OR = Trait.AND, Trait.OR
_TRUE_AND, _TRUE_OR = logic.of_truth(logic.and_), logic.of_truth(logic.or_)
_DIVIDE = Operator(arithmetic.divide, options=("rounding_mode",))
_ABS = Operator(arithmetic.magnitude, _SUM | Trait.MAGNITUDE)
_FULL = Operator(logic.full, Trait.FACTORY)
_ZEROS = Operator(logic.filled_with(0), Trait.FACTORY)
_ONES = Operator(logic.filled_with(1), Trait.FACTORY)
_LOGARITHM = {"inside": functions.POSITIVE}

# Keywords that do not change a value.
HARMLESS = frozenset(
    {"dtype", "device", "layout", "pin_memory", "memory_format", "non_blocking", "implicit"}
)
# Operators that return the value of their first argument, for 0-d tensors.
TRANSPARENT = frozenset(
    {aten.clone, aten.alias, aten.detach, aten.lift_fresh_copy, aten.lift_fresh, aten.view}
    | {aten.expand, aten.unsqueeze, aten.squeeze, aten.reshape, aten._unsafe_view}
    | {aten.contiguous}
)
OPERATORS: dict[Any, Operator] = {
    # sums and products
    aten.add: Operator(arithmetic.add, _SUM | Trait.GROWS, ("alpha",)),
    aten.sub: Operator(arithmetic.subtract, _SUM, ("alpha",)),
    aten.rsub: Operator(arithmetic.subtract_from, _SUM, ("alpha",)),
    aten.neg: Operator(arithmetic.negative, _SUM),
    aten.mul: Operator(arithmetic.multiply, Trait.EXACT | Trait.TIGHT | Trait.PRODUCT),
    aten.pow: Operator(arithmetic.power, Trait.PRODUCT),
    aten.square: Operator(arithmetic.square, Trait.PRODUCT),
    # quotients
    aten.floor_divide: Operator(arithmetic.floor_divide, _SUM | Trait.STEP),
    aten.div: _DIVIDE,
    aten.true_divide: _DIVIDE,
    aten.remainder: Operator(arithmetic.remainder),
    aten.fmod: Operator(arithmetic.fmod),
    aten.reciprocal: Operator(arithmetic.reciprocal),
    # order
    aten.minimum: Operator(arithmetic.minimum, _ORDER),
    aten.maximum: Operator(arithmetic.maximum, _ORDER),
    aten.clamp: Operator(arithmetic.clamp, _ORDER, ("min", "max")),
    aten.clamp_min: Operator(arithmetic.clamp, _ORDER),
    aten.clamp_max: Operator(arithmetic.clamp_max, _ORDER),
    aten.relu: Operator(arithmetic.relu, Trait.GROWS),
    aten.abs: _ABS,
    aten.sign: Operator(arithmetic.sign, Trait.GROWS),
    # comparisons
    aten.lt: Operator(logic.less, _COMPARE),
    aten.le: Operator(logic.less_equal, _COMPARE),
    aten.gt: Operator(logic.greater, _COMPARE),
    aten.ge: Operator(logic.greater_equal, _COMPARE),
    aten.eq: Operator(logic.equal, Trait.COMPARISON),
    aten.ne: Operator(logic.not_equal, Trait.COMPARISON),
    # bits
    aten.bitwise_and: Operator(logic.and_, _AND),
    aten.bitwise_or: Operator(logic.or_, _OR),
    aten.bitwise_xor: Operator(logic.xor),
    aten.bitwise_not: Operator(logic.not_, Trait.NOT),
    aten.__and__: Operator(logic.and_, _AND),
    aten.__or__: Operator(logic.or_, _OR),
    aten.__xor__: Operator(logic.xor),
    aten.logical_and: Operator(_TRUE_AND, _AND),
    aten.logical_or: Operator(_TRUE_OR, _OR),
    aten.logical_xor: Operator(logic.of_truth(logic.xor)),
    aten.logical_not: Operator(logic.of_truth(logic.not_), Trait.NOT),
    aten.bitwise_left_shift: Operator(functions.shift_left, Trait.PRODUCT),
    aten.__lshift__: Operator(functions.shift_left, Trait.PRODUCT),
    aten.bitwise_right_shift: Operator(functions.shift_right),
    aten.__rshift__: Operator(functions.shift_right),
    # choice, conversion, constants
    aten.where: Operator(logic.where, Trait.EXACT | Trait.CHOICE),
    aten._to_copy: Operator(logic.convert, _CONVERT),
    prims.convert_element_type: Operator(logic.convert, _CONVERT),
    aten.full: _FULL,
    aten.scalar_tensor: _FULL,
    aten.full_like: _FULL,
    aten.new_full: _FULL,
    aten.zeros: _ZEROS,
    aten.zeros_like: _ZEROS,
    aten.new_zeros: _ZEROS,
    aten.ones: _ONES,
    aten.ones_like: _ONES,
    aten.new_ones: _ONES,
    # functions
    aten.floor: Operator(functions.rounding(torch.floor), Trait.GROWS),
    aten.ceil: Operator(functions.rounding(torch.ceil), Trait.GROWS),
    aten.trunc: Operator(functions.rounding(torch.trunc), Trait.GROWS),
    aten.round: Operator(functions.rounding(torch.round)),
    aten.sqrt: Operator(functions.growing(torch.sqrt, (0.0, torch.inf), inside=(0.0, torch.inf))),
    aten.exp: Operator(functions.growing(torch.exp, (0.0, torch.inf))),
    aten.exp2: Operator(functions.growing(torch.exp2, (0.0, torch.inf))),
    aten.expm1: Operator(functions.growing(torch.expm1, (-1.0, torch.inf))),
    aten.log: Operator(functions.growing(torch.log, **_LOGARITHM)),
    aten.log2: Operator(functions.growing(torch.log2, **_LOGARITHM)),
    aten.log10: Operator(functions.growing(torch.log10, **_LOGARITHM)),
    aten.log1p: Operator(functions.growing(torch.log1p, inside=(-0.999, torch.inf))),
    aten.tanh: Operator(functions.growing(torch.tanh, (-1.0, 1.0))),
    aten.sigmoid: Operator(functions.growing(torch.sigmoid, (0.0, 1.0))),
    aten.atan: Operator(functions.growing(torch.atan, (-1.571, 1.571))),
    aten.asinh: Operator(functions.growing(torch.asinh)),
    aten.erf: Operator(functions.growing(torch.erf, (-1.0, 1.0))),
    aten.sin: Operator(functions.wave),
    aten.cos: Operator(functions.wave),
}
EMPTY = Operator(logic.full)


def packet_of(target: Any) -> Any:
    """The operator of one of its overloads."""
    return getattr(target, "overloadpacket", target)


def traits_of(target: Any) -> Trait:
    """The traits of an operator; none if it has no rule."""
    return OPERATORS.get(packet_of(target), EMPTY).traits
