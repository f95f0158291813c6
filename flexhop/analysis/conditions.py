"""Conditions on the nodes of a mod, in normal form.

Comparisons of one linear form are sets of integers: `and` intersects them, `or` joins them. So a
sliding window has one condition, however many comparisons it is made of.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import fx

from flexhop.analysis.forms import Form


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


def all_of(*parts: Truth) -> Truth:
    """The condition that all parts are true."""
    return _joined(parts, All, _intersection)


def some_of(*parts: Truth) -> Truth:
    """The condition that one part is true."""
    return _joined(parts, Some, _union)


def at_least(form: Form, least: int = 0) -> Truth:
    """form >= least."""
    offset = form.offset - least
    if not form.terms:
        return offset >= 0
    divisor = math.gcd(*form.terms.values())
    terms = {atom: coefficient // divisor for atom, coefficient in form.terms.items()}
    return AtLeast(Form(terms, offset // divisor))


def equals(form: Form, is_equal: bool) -> Truth:
    """Whether form == 0, or form != 0."""
    if not form.terms:
        return (form.offset == 0) == is_equal
    divisor = math.gcd(*form.terms.values())
    if form.offset % divisor:
        return not is_equal
    terms = {atom: coefficient // divisor for atom, coefficient in form.terms.items()}
    return Equals(Form(terms, form.offset // divisor), is_equal)


def _joined(parts: Sequence[Truth], kind: type[All] | type[Some], join: Any) -> Truth:
    flat: list[Truth] = []
    for part in parts:
        flat += part.parts if isinstance(part, kind) else (part,)
    neutral = kind is All
    if any(part is (not neutral) for part in flat):
        return not neutral
    flat = [part for part in flat if part is not neutral]
    kept: list[Truth] = []
    while flat:
        first = flat.pop(0)
        known = number_set(first)
        same = [
            part for part in flat if known and (other := number_set(part)) and known.joins(other)
        ]
        if known and same:
            sets = [found.numbers for part in same if (found := number_set(part))]
            found = _write(known.form, join([known.numbers, *sets]))
            if found is (not neutral):
                return found
            flat = [part for part in flat if not any(part is other for other in same)]
            first = found
        kept += first.parts if isinstance(first, kind) else () if first is neutral else (first,)
    return kept[0] if len(kept) == 1 else kind(tuple(kept)) if kept else neutral


# Sets of integers: ranges that are sorted and do not touch; ends are inclusive.

Numbers = tuple[tuple[float, float], ...]


class NumberSet(NamedTuple):
    """The values of form, whose offset is 0, for which a condition is true."""

    form: Form
    numbers: Numbers

    def joins(self, other: NumberSet) -> bool:
        """Whether both are about the same form."""
        return self.form.terms == other.form.terms


def number_set(truth: Truth) -> NumberSet | None:
    """A condition as a set; None if it is about several forms."""
    if isinstance(truth, (All, Some)):
        sets = [number_set(part) for part in truth.parts]
        known = [found for found in sets if found is not None]
        if len(known) < len(sets) or not all(map(known[0].joins, known)):
            return None
        join = _intersection if isinstance(truth, All) else _union
        return NumberSet(known[0].form, join([found.numbers for found in known]))
    if not isinstance(truth, (AtLeast, Equals)):
        return None
    terms = truth.form.terms
    sign = 1 if terms[min(terms, key=lambda atom: atom.name)] > 0 else -1
    form, place = Form(truth.form.times(sign).terms, 0), -sign * truth.form.offset
    if isinstance(truth, AtLeast):
        return NumberSet(form, ((place, math.inf),) if sign > 0 else ((-math.inf, place),))
    point: Numbers = ((place, place),)
    return NumberSet(form, point if truth.is_equal else _complement(point))


def _write(form: Form, numbers: Numbers) -> Truth:
    """The condition that a form is in a set."""
    outside = _complement(numbers)
    if len(outside) == 1 and outside[0][0] == outside[0][1]:
        return Equals(Form(form.terms, -int(outside[0][0])), False)
    parts = [_between(form, low, high) for low, high in numbers]
    return parts[0] if len(parts) == 1 else Some(tuple(parts)) if parts else False


def _between(form: Form, low: float, high: float) -> Truth:
    if low == high:
        return Equals(Form(form.terms, -int(low)), True)
    ends: list[Truth] = []
    if low > -math.inf:
        ends.append(AtLeast(Form(form.terms, -int(low))))
    if high < math.inf:
        ends.append(AtLeast(Form(form.times(-1).terms, int(high))))
    return ends[0] if len(ends) == 1 else All(tuple(ends)) if ends else True


def _union(sets: Sequence[Numbers]) -> Numbers:
    found: list[tuple[float, float]] = []
    for low, high in sorted(part for numbers in sets for part in numbers):
        if found and low <= found[-1][1] + 1:
            found[-1] = (found[-1][0], max(high, found[-1][1]))
        else:
            found.append((low, high))
    return tuple(found)


def _intersection(sets: Sequence[Numbers]) -> Numbers:
    return _complement(_union([_complement(numbers) for numbers in sets]))


def _complement(numbers: Numbers) -> Numbers:
    found, low = [], -math.inf
    for first, last in numbers:
        if low < first:
            found.append((low, first - 1))
        low = last + 1
    return (*found, (low, math.inf)) if low < math.inf else tuple(found)
