"""A mask's condition in normal form, however it is spelled.

Negations are pushed down to comparisons. Choices between constants and products of bools become
"and" or "or". Comparisons of absolute values, minima and maxima become two comparisons. Integer
comparisons say that a linear form is not negative. So equal masks have one `Truth`.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import fx

from flexhop.analysis.forms import Form, Forms
from flexhop.analysis.graph import dtype_of
from flexhop.analysis.interval import extent, is_int
from flexhop.analysis.operators import Trait, packet_of, traits_of

aten = torch.ops.aten


class All(NamedTuple):
    """Every part is true."""

    parts: tuple[Truth, ...]


class Some(NamedTuple):
    """At least one part is true."""

    parts: tuple[Truth, ...]


class AtLeast(NamedTuple):
    """form >= 0, in unbounded integers. Its coefficients have no common divisor."""

    form: Form


class Equals(NamedTuple):
    """Whether form == 0, or form != 0, in unbounded integers."""

    form: Form
    is_equal: bool


class Choice(NamedTuple):
    """One of two conditions, chosen by a node that is the same for all keys."""

    condition: fx.Node
    chosen: Truth
    other: Truth


class Leaf(NamedTuple):
    """A node that is true, or false."""

    node: fx.Node
    is_true: bool


Truth = All | Some | AtLeast | Equals | Choice | Leaf | bool


def truth_of(forms: Forms, value: Any, is_true: bool = True) -> Truth:
    """The condition that a node is true, or that it is false."""
    if not isinstance(value, fx.Node):
        return bool(value) == is_true
    known = _constant(value)
    if known is not None:
        return known == is_true
    if dtype_of(value) != torch.bool:
        return _not_zero(forms, value, is_true)
    return _by_operator(forms, value, is_true)


def _by_operator(forms: Forms, node: fx.Node, is_true: bool) -> Truth:
    packet, traits = packet_of(node.target), traits_of(node.target)
    if Trait.NOT in traits:
        return truth_of(forms, node.args[0], not is_true)
    if Trait.AND in traits or packet is aten.mul:
        parts = [truth_of(forms, a, is_true) for a in node.args]
        return all_of(*parts) if is_true else some_of(*parts)
    if Trait.OR in traits or packet is aten.add:
        parts = [truth_of(forms, a, is_true) for a in node.args]
        return some_of(*parts) if is_true else all_of(*parts)
    if Trait.CHOICE in traits:
        return _choice(forms, node, is_true)
    if packet in _COMPARISONS:
        return _comparison(forms, node, _COMPARISONS[packet], is_true)
    if Trait.CONVERSION in traits:
        return truth_of(forms, node.args[0], is_true)
    return Leaf(node, is_true)


def all_of(*parts: Truth) -> Truth:
    """The condition that all parts are true."""
    kept: list[Truth] = []
    for part in parts:
        if part is False:
            return False
        kept += part.parts if isinstance(part, All) else () if part is True else (part,)
    return kept[0] if len(kept) == 1 else All(tuple(kept)) if kept else True


def some_of(*parts: Truth) -> Truth:
    """The condition that one part is true."""
    kept: list[Truth] = []
    for part in parts:
        if part is True:
            return True
        kept += part.parts if isinstance(part, Some) else () if part is False else (part,)
    return kept[0] if len(kept) == 1 else Some(tuple(kept)) if kept else False


def _constant(node: fx.Node) -> bool | None:
    """The truth of a node that is one number from the program."""
    packet = packet_of(node.target)
    if packet in (aten.ones, aten.ones_like, aten.new_ones):
        return True
    if packet in (aten.zeros, aten.zeros_like, aten.new_zeros):
        return False
    value = node.args[-1] if Trait.FACTORY in traits_of(packet) and node.args else None
    return bool(value) if isinstance(value, (bool, int, float)) else None


def _not_zero(forms: Forms, node: fx.Node, is_true: bool) -> Truth:
    form = forms.form(node)
    if form is None or not forms.is_exact(node):
        return Leaf(node, is_true)
    return _equals(form, not is_true)


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
}


def _comparison(forms: Forms, node: fx.Node, order: _Order | bool, is_true: bool) -> Truth:
    a, b = node.args[:2]
    if isinstance(order, bool):
        return _equality(forms, node, order == is_true)
    if order.is_swapped:
        a, b = b, a
    if not is_true:  # not (a - b >= least) is b - a >= 1 - least
        a, b = b, a
    if not are_integers(forms, a, b):
        return Leaf(node, is_true)
    found = _ordered(forms, a, b, order.least if is_true else 1 - order.least)
    return Leaf(node, is_true) if found is None else found


def _equality(forms: Forms, node: fx.Node, is_equal: bool) -> Truth:
    a, b = node.args[:2]
    for side, other in ((a, b), (b, a)):  # bools, one of them constant
        if isinstance(other, bool) and dtype_of(side) == torch.bool:
            return truth_of(forms, side, other == is_equal)
    first, second = (_exact_form(forms, x) for x in (a, b))
    if not are_integers(forms, a, b) or first is None or second is None:
        return Leaf(node, (packet_of(node.target) is aten.eq) == is_equal)
    return _equals(first.plus(second, -1), is_equal)


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
        if packet is aten.abs and _sees_both(forms, value):
            return _magnitude(forms, value.args[0], b if is_first else a, (is_first, least))
    first, second = _exact_form(forms, a), _exact_form(forms, b)
    return None if first is None or second is None else at_least(first.plus(second, -1), least)


def _sees_both(forms: Forms, value: fx.Node) -> bool:
    return forms.depends_on(value) >= {"q", "k"}


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


def at_least(form: Form, least: int = 0) -> Truth:
    """form >= least."""
    offset = form.offset - least
    if not form.terms:
        return offset >= 0
    divisor = math.gcd(*form.terms.values())
    terms = {atom: coefficient // divisor for atom, coefficient in form.terms.items()}
    return AtLeast(Form(terms, offset // divisor))


def _equals(form: Form, is_equal: bool) -> Truth:
    if not form.terms:
        return (form.offset == 0) == is_equal
    divisor = math.gcd(*form.terms.values())
    if form.offset % divisor:
        return not is_equal
    terms = {atom: coefficient // divisor for atom, coefficient in form.terms.items()}
    return Equals(Form(terms, form.offset // divisor), is_equal)
