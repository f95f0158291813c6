"""A mask's condition in normal form, however it is spelled.

Negations are pushed down to comparisons. Choices between constants and products of bools become
"and" or "or". Comparisons of absolute values, minima and maxima become two comparisons. Integer
comparisons say that a linear form is not negative. So equal masks have one `Truth`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import fx

from flexhop.analysis.cases import Cases
from flexhop.analysis.conditions import (
    All,
    AtLeast,
    Choice,
    Equals,
    Leaf,
    Some,
    Truth,
    all_of,
    at_least,
    equals,
    size_of,
    some_of,
)
from flexhop.analysis.ends import quotient_of
from flexhop.analysis.forms import POSITIONS, Form, Forms
from flexhop.analysis.graph import constant_of, dtype_of, is_number
from flexhop.analysis.interval import extent, is_int
from flexhop.analysis.operators import Trait, packet_of, traits_of

aten = torch.ops.aten


def truth_of(forms: Forms, value: Any, is_true: bool = True) -> Truth:
    """The condition that a node is true, or that it is false."""
    known = constant_of(value)
    if known is not None:
        return bool(known) == is_true
    find = functools.partial(_truth, forms, is_true=is_true)
    return forms.answers.of(("truth", is_true), value, find)


def _truth(forms: Forms, node: fx.Node, is_true: bool) -> Truth:
    if not is_number(node):
        return Leaf(node, is_true)
    is_bool = dtype_of(node) == torch.bool
    found = (_by_operator if is_bool else _not_zero)(forms, node, is_true)
    # A condition is a tree: it may be far longer than the graph that it was made from.
    return found if size_of(found) <= forms.most_parts else Leaf(node, is_true)


def _by_operator(forms: Forms, node: fx.Node, is_true: bool) -> Truth:
    packet, traits = packet_of(node.target), traits_of(node.target)
    if Trait.NOT in traits:
        return truth_of(forms, node.args[0], not is_true)
    if Trait.AND in traits or packet in (aten.mul, aten.minimum):
        parts = [truth_of(forms, a, is_true) for a in node.args]
        return all_of(*parts) if is_true else some_of(*parts)
    if Trait.OR in traits or packet in (aten.add, aten.maximum):
        parts = [truth_of(forms, a, is_true) for a in node.args]
        return some_of(*parts) if is_true else all_of(*parts)
    if Trait.CHOICE in traits:
        return _choice(forms, node, is_true)
    if packet in _COMPARISONS:
        return _comparison(forms, node, _COMPARISONS[packet], is_true)
    if Trait.CONVERSION in traits:
        return truth_of(forms, node.args[0], is_true)
    return Leaf(node, is_true)


def _not_zero(forms: Forms, node: fx.Node, is_true: bool) -> Truth:
    form = forms.form(node)
    is_known = form is not None and forms.is_exact(node)
    found = equals(form, not is_true) if is_known else Leaf(node, is_true)  # type: ignore[arg-type]
    return _in_cases(forms, (node, 0), lambda form: _equals(forms, form, not is_true), found)


def _choice(forms: Forms, node: fx.Node, is_true: bool) -> Truth:
    arguments: Any = node.args
    condition, *choices = arguments
    a, b = (truth_of(forms, choice, is_true) for choice in choices)
    holds, fails = truth_of(forms, condition), truth_of(forms, condition, False)
    if a is True or b is True:  # (c and a) or (not c and True) is a or not c
        return some_of(holds, b) if a is True else some_of(fails, a)
    if a is False or b is False or isinstance(holds, bool):
        return some_of(all_of(holds, a), all_of(fails, b))
    if "k" not in forms.depends_on(condition):
        return Choice(condition, a, b)
    return some_of(all_of(holds, a), all_of(fails, b))


# Comparisons.


_WHOLE = 2**24  # integers up to here are compared with floats as they are


def _fits(value: int, dtype: torch.dtype) -> bool:
    """Whether an integer dtype can represent a number."""
    return is_int(dtype) and extent(dtype)[0] <= value <= extent(dtype)[1]


class _Order(NamedTuple):
    """a - b >= least, where a and b may be swapped; or an equality."""

    is_swapped: bool
    least: int


_COMPARISONS: dict[Any, _Order | bool] = {
    aten.ge: _Order(False, 0),
    aten.gt: _Order(False, 1),
    aten.le: _Order(True, 0),
    aten.lt: _Order(True, 1),
    aten.eq: True,
    aten.ne: False,
    **dict.fromkeys((aten.bitwise_xor, aten.__xor__, aten.logical_xor), False),
}


def _comparison(forms: Forms, node: fx.Node, order: _Order | bool, is_true: bool) -> Truth:
    a, b = node.args[:2]
    if isinstance(order, bool):
        is_equal = order == is_true
        found = _equality(forms, a, b, is_equal)
        other = Leaf(node, order if is_equal else not order)
        return _in_cases(
            forms, (a, b), lambda form: _equals(forms, form, is_equal), found or other
        )
    if order.is_swapped:
        a, b = b, a
    if not is_true:  # not (a - b >= least) is b - a >= 1 - least
        a, b = b, a
    least = order.least if is_true else 1 - order.least
    found = _ordered(forms, a, b, least) if are_integers(forms, a, b) else None
    if _is_fraction(a) or _is_fraction(b):  # an integer is above 0.5, or from 1 on
        a, b, least = _rounded(a, math.floor), _rounded(b, math.ceil), 0
    found = Leaf(node, is_true) if found is None else found
    return _in_cases(forms, (a, b), lambda form: _at_least(forms, form, least), found)


def _equality(forms: Forms, a: Any, b: Any, is_equal: bool) -> Truth | None:
    first, second = (_exact_form(forms, x) for x in (a, b))
    if not are_integers(forms, a, b) or first is None or second is None:
        return None
    return equals(first.plus(second, -1), is_equal)


def _in_cases(
    forms: Forms, pair: tuple[Any, Any], test: Callable[[Form], Truth], found: Truth
) -> Truth:
    """`found`, or a condition on forms in place of nodes that depend on both positions."""
    if not _is_open(forms, found) or not _are_comparable(forms, *pair):
        return found
    better = Cases(forms, truth_of).compared(*pair, test)
    return found if better is None else better


def _is_open(forms: Forms, truth: Truth) -> bool:
    """Whether a condition is about a node that depends on both positions."""
    if isinstance(truth, (All, Some)):
        return any(_is_open(forms, part) for part in truth.parts)
    if isinstance(truth, Leaf):
        return forms.depends_on(truth.node) >= POSITIONS
    terms = truth.form.terms if isinstance(truth, (AtLeast, Equals)) else ()
    return any(forms.depends_on(atom) >= POSITIONS for atom in terms)


def _are_comparable(forms: Forms, a: Any, b: Any) -> bool:
    """Whether operands are compared as they are: their common dtype represents both."""
    dtypes = [dtype_of(x) for x in (a, b)]
    if torch.bool in dtypes or are_integers(forms, a, b):
        return True
    numbers = (x for x in (a, b) if forms.is_integer(x) or not isinstance(x, fx.Node))
    return all(abs(end) <= _WHOLE for x in numbers for end in forms.range_of(x))


def _is_fraction(value: Any) -> bool:
    return isinstance(value, float) and math.isfinite(value) and not value.is_integer()


def _rounded(value: Any, rounding: Callable[[float], int]) -> Any:
    """A number of the program that is no integer, rounded as it is compared with integers."""
    return rounding(torch.tensor(value).item()) if _is_fraction(value) else value


def _at_least(forms: Forms, form: Form, least: int) -> Truth:
    """form >= least; x // 8 >= 3 is x >= 24."""
    found = at_least(form, least)
    if not isinstance(found, AtLeast) or len(found.form.terms) != 1:
        return found
    ((atom, sign),) = found.form.terms.items()
    of_atom = _quotient(forms, atom)
    if of_atom is None:
        return found
    inner, divisor, rounds_down = of_atom
    if sign < 0:  # the quotient is at most the offset: not from the next number on
        place = _first(found.form.offset + 1, divisor, rounds_down)
        return _at_least(forms, inner.times(-1), 1 - place)
    return _at_least(forms, inner, _first(-found.form.offset, divisor, rounds_down))


def _equals(forms: Forms, form: Form, is_equal: bool) -> Truth:
    """Whether form == 0, or form != 0; x // 8 == 3 is 24 <= x < 32, x % 8 == x is 0 <= x < 8."""
    for atom, factor in form.terms.items():
        of_atom = _quotient(forms, atom, is_remainder=True)
        if of_atom and form.times(factor) == Form({atom: factor * factor}, 0).plus(of_atom[0], -1):
            inner, divisor, _ = of_atom
            sides = at_least(inner), at_least(inner.times(-1), 1 - divisor)
            others = at_least(inner.times(-1), 1), at_least(inner, divisor)
            return all_of(*sides) if is_equal else some_of(*others)
    if len(form.terms) != 1 or _quotient(forms, *form.terms) is None:
        return equals(form, is_equal)
    least = 0 if is_equal else 1
    sides = (_at_least(forms, form.times(sign), least) for sign in (1, -1))
    return all_of(*sides) if is_equal else some_of(*sides)


def _first(quotient: int, divisor: int, rounds_down: bool) -> int:
    """The smallest number whose quotient is at least `quotient`."""
    if rounds_down or quotient > 0:
        return quotient * divisor
    return quotient * divisor - divisor + 1


def _quotient(
    forms: Forms, node: fx.Node, *, is_remainder: bool = False
) -> tuple[Form, int, bool] | None:
    """The form of what is divided, the number that divides it, and whether it rounds down."""
    found = quotient_of(forms, node) if forms.depends_on(node) >= POSITIONS else None
    form = _exact_form(forms, found.value) if found is not None else None
    if found is None or form is None or found.is_remainder != is_remainder:
        return None
    return form, found.divisor, found.rounds_down


def are_integers(forms: Forms, a: Any, b: Any) -> bool:
    """Whether operands are integers that their common dtype represents; otherwise PyTorch
    wraps."""
    for value, other in ((a, b), (b, a)):
        dtype = dtype_of(other)
        if type(value) is int and (dtype is None or not _fits(value, dtype)):
            return False
    values = (a, b)
    return all(forms.is_integer(v) if isinstance(v, fx.Node) else type(v) is int for v in values)


def _ordered(forms: Forms, a: Any, b: Any, least: int) -> Truth | None:
    """The condition that a - b >= least; None if it is not about forms."""
    for value, is_first in ((a, True), (b, False)):
        packet = packet_of(value.target) if isinstance(value, fx.Node) else None
        if packet in (aten.minimum, aten.maximum) and _sees_both(forms, value):
            pairs = [(x, b) if is_first else (a, x) for x in value.args]
            parts = [_ordered(forms, x, y, least) for x, y in pairs]
            if None in parts:
                return None
            every = (packet is aten.minimum) == is_first
            return all_of(*parts) if every else some_of(*parts)  # type: ignore[arg-type]
        if packet is aten.abs and (_sees_both(forms, value) or _is_fixed(forms, value.args[0])):
            return _magnitude(forms, value.args[0], b if is_first else a, (is_first, least))
    first, second = _exact_form(forms, a), _exact_form(forms, b)
    return None if first is None or second is None else at_least(first.plus(second, -1), least)


def _sees_both(forms: Forms, value: fx.Node) -> bool:
    return forms.depends_on(value) >= {"q", "k"}


def _is_fixed(forms: Forms, value: Any) -> bool:
    """Whether a value is one number, such as q - q."""
    form = _exact_form(forms, value) if isinstance(value, fx.Node) else None
    return form is not None and not form.terms


def _magnitude(forms: Forms, inner: Any, bound: Any, order: tuple[bool, int]) -> Truth | None:
    """|inner| - bound >= least, or bound - |inner| >= least."""
    is_first, least = order
    form, other = _exact_form(forms, inner), _exact_form(forms, bound)
    if form is None or other is None:
        return None
    if is_first:
        return some_of(*(at_least(form.times(s).plus(other, -1), least) for s in (1, -1)))
    return all_of(*(at_least(other.plus(form, s), least) for s in (-1, 1)))


def _exact_form(forms: Forms, value: Any) -> Form | None:
    return forms.form(value) if forms.is_exact(value) else None
