"""Integers that are one linear form in each of a few cases: minima, choices, numbers of bools.

`where(q >= k, q - k, w)` is q - k if q >= k, and w otherwise. Comparing it compares the form of
each case, under the case's condition. Only nodes that depend on both positions have cases: the
others are values of a query, or of a key.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import fx

from flexhop.analysis.conditions import Truth, all_of, at_least, equals, size_of, some_of
from flexhop.analysis.forms import POSITIONS, Form, Forms
from flexhop.analysis.graph import dtype_of, is_number
from flexhop.analysis.operators import HARMLESS, packet_of
from flexhop.analysis.parts import Product, exact_sum_of, limits_of

aten, prims = torch.ops.aten, torch.ops.prims
_MOST = 16  # cases of one value


class Case(NamedTuple):
    """The form of a value where a condition is true."""

    condition: Truth
    form: Form


Found = list[Case] | None  # one of them holds; None: unknown, or too many


class Cases:
    """Finds the cases of nodes.

    Args:
        forms: their linear forms.
        truth_of: (forms, node, is_true) -> the condition that a node is true, or false.
        inputs: those that a node with several cases must depend on.
    """

    def __init__(
        self,
        forms: Forms,
        truth_of: Callable[..., Truth],
        inputs: frozenset[str] = POSITIONS,
    ) -> None:
        self.forms, self._truth_of, self._inputs = forms, truth_of, inputs

    def compared(self, a: Any, b: Any, test: Callable[[Form], Truth]) -> Truth | None:
        """The condition that `test` holds for a - b."""
        pairs = _pairs(self.of(a), self.of(b), lambda x, y: x.plus(y, -1))
        if pairs is None:
            return None
        return some_of(*(all_of(case.condition, test(case.form)) for case in pairs))

    def of(self, value: Any) -> Found:
        """The cases of a number that is an integer in all of them."""
        if isinstance(value, bool):
            return [Case(True, Form({}, int(value)))]
        if dtype_of(value) == torch.bool:
            return [
                Case(self.truth(value, is_true), Form({}, is_true)) for is_true in (True, False)
            ]
        form = self.forms.form(value)
        if form is None:  # a float, but perhaps an integer in each case
            return self._of_operator(value) if isinstance(value, fx.Node) else None
        found: Found = [Case(True, Form({}, form.offset))] if self.forms.is_whole(value) else None
        for atom, factor in form.terms.items():
            own = self._of_operator(atom) or [Case(True, Form({atom: 1}, 0))]
            found = _pairs(found, own, lambda x, y, factor=factor: x.plus(y, factor))
        return found

    def truth(self, node: Any, is_true: bool = True) -> Truth:
        """The condition that a node is true, or that it is false."""
        return self._truth_of(self.forms, node, is_true)

    def _of_operator(self, node: fx.Node) -> Found:
        """The cases of a node by its operator, if it has several."""
        return self.forms.answers.of(("cases", self._inputs), node, self._find)

    def _find(self, node: fx.Node) -> Found:
        if not is_number(node):
            return None
        is_plain = set(node.kwargs) <= HARMLESS and self.forms.depends_on(node) >= self._inputs
        is_exact = not self.forms.is_integer(node) or self.forms.is_exact(node)
        rule = _RULES.get(packet_of(node.target)) if node.op == "call_function" else None
        found: Found = None
        if is_plain and is_exact and rule is not None:
            found = rule(self, *node.args)
        elif is_plain and is_exact and (limits := limits_of(node)) is not None:
            found = _limited(self, *limits)
        elif is_plain and is_exact and (products := exact_sum_of(node)) is not None:
            found = _summed(self, products)
        most = self.forms.most_parts
        holds = found is not None and all(
            self.forms.can_hold(node, form) and size_of(condition) <= most
            for condition, form in found
        )
        return found if holds else None


def _pairs(first: Found, second: Found, join: Callable[[Form, Form], Form | None]) -> Found:
    """The cases of a function of two values; `join` returns None if it has no linear form."""
    if first is None or second is None or len(first) * len(second) > _MOST:
        return None
    found: list[Case] = []
    for a, b in itertools.product(first, second):
        condition, form = all_of(a.condition, b.condition), join(a.form, b.form)
        if form is None:
            return None
        if condition is not False:
            found.append(Case(condition, form))
    return found


def _given(condition: Truth, cases: Found) -> list[Case]:
    together = ((all_of(condition, case.condition), case.form) for case in cases or ())
    return [Case(truth, form) for truth, form in together if truth is not False]


# Rules: the cases of an operator's result.


def _choice(cases: Cases, condition: Any, a: Any, b: Any) -> Found:
    first, second = cases.of(a), cases.of(b)
    if first is None or second is None or len(first) + len(second) > _MOST:
        return None
    return _given(cases.truth(condition), first) + _given(cases.truth(condition, False), second)


def _larger(first: Found, second: Found, sign: int = 1) -> Found:
    """The larger one of two values; sign -1: the smaller one."""
    if first is None or second is None or 2 * len(first) * len(second) > _MOST:
        return None
    found: list[Case] = []
    for a, b in itertools.product(first, second):
        ahead = a.form.plus(b.form, -1).times(sign)
        given = all_of(a.condition, b.condition)
        found += _given(given, [Case(at_least(ahead), a.form)])
        found += _given(given, [Case(at_least(ahead.times(-1), 1), b.form)])
    return found


def _limited(cases: Cases, value: Any, low: Any, high: Any) -> Found:
    found = cases.of(value)
    found = found if low is None else _larger(found, cases.of(low))
    return found if high is None else _larger(found, cases.of(high), -1)


def _magnitude(cases: Cases, value: Any) -> Found:
    found = cases.of(value)
    return (
        None
        if found is None
        else [
            case
            for condition, form in found
            for case in _given(
                condition, _larger([Case(True, form)], [Case(True, form.times(-1))])
            )
        ]
    )


def _sign(cases: Cases, value: Any) -> Found:
    found: list[Case] = []
    for condition, form in cases.of(value) or ():
        found += _given(condition, [Case(at_least(form, 1), Form({}, 1))])
        found += _given(condition, [Case(at_least(form.times(-1), 1), Form({}, -1))])
        found += _given(condition, [Case(equals(form, True), Form({}, 0))])
    return found if 0 < len(found) <= _MOST else None


def _summed(cases: Cases, products: list[Product]) -> Found:
    found: Found = [Case(True, Form({}, 0))]
    for product in products:
        part: Found = [Case(True, Form({}, 1))]
        for operand in product:
            part = _pairs(part, cases.of(operand), Form.of_product)
        found = _pairs(found, part, Form.plus)
    return found


def _of_numbers(function: Callable[[int, int], int]) -> Callable[[Form, Form], Form | None]:
    def join(a: Form, b: Form) -> Form | None:
        return None if a.terms or b.terms else Form({}, function(a.offset, b.offset))

    return join


def _by_pairs(join: Callable[[Form, Form], Form | None]) -> Callable[..., Found]:
    return lambda cases, a, b: _pairs(cases.of(a), cases.of(b), join)


_RULES: dict[Any, Callable[..., Found]] = {
    aten.where: _choice,
    aten.abs: _magnitude,
    aten.sign: _sign,
    aten.bitwise_and: _by_pairs(_of_numbers(operator.and_)),
    aten.bitwise_or: _by_pairs(_of_numbers(operator.or_)),
    aten.bitwise_xor: _by_pairs(_of_numbers(operator.xor)),
    aten._to_copy: lambda cases, a, *_: cases.of(a),
    prims.convert_element_type: lambda cases, a, *_: cases.of(a),
}
