"""Conditions on the nodes of a mod, in normal form.

Comparisons of one linear form are sets of integers: `and` intersects them, `or` joins them. So a
sliding window has one condition, however many comparisons it is made of.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import fx

from flexhop.analysis.forms import Form


class _Compared:
    """A condition that is perhaps about one linear form."""

    @functools.cached_property
    def numbers(self) -> NumberSet | None:
        """As `number_set`; found once, because a long condition is joined many times."""
        return _find_numbers(self)  # type: ignore[arg-type]


@dataclass(frozen=True)
class All(_Compared):
    """Every part is true."""

    parts: tuple[Truth, ...]


@dataclass(frozen=True)
class Some(_Compared):
    """At least one part is true."""

    parts: tuple[Truth, ...]


@dataclass(frozen=True)
class AtLeast(_Compared):
    """form >= 0, in unbounded integers. Its coefficients have no common divisor."""

    form: Form


@dataclass(frozen=True)
class Equals(_Compared):
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
    for sets in _by_form(flat):
        found, numbers = sets[0]
        if numbers is not None and len(sets) > 1:
            all_numbers = [of_part.numbers for _, of_part in sets if of_part is not None]
            found = _write(numbers.form, join(all_numbers))
        if found is (not neutral):
            return found
        kept += found.parts if isinstance(found, kind) else () if found is neutral else (found,)
    return kept[0] if len(kept) == 1 else kind(tuple(kept)) if kept else neutral


def _by_form(parts: Sequence[Truth]) -> Iterable[list[tuple[Truth, NumberSet | None]]]:
    """Different conditions with their sets; those about one form together."""
    found: dict[Any, list[tuple[Truth, NumberSet | None]]] = {}
    for part in parts:
        numbers = number_set(part)
        if numbers is not None:
            found.setdefault(numbers.key, []).append((part, numbers))
        else:
            found.setdefault(part if isinstance(part, Leaf) else id(part), [(part, None)])
    return found.values()


def size_of(truth: Truth) -> int:
    """How many parts a condition has."""
    if isinstance(truth, (All, Some)):
        return sum(map(size_of, truth.parts))
    return size_of(truth.chosen) + size_of(truth.other) if isinstance(truth, Choice) else 1


# Sets of integers: ranges that are sorted and do not touch; ends are inclusive.

Numbers = tuple[tuple[float, float], ...]


class NumberSet(NamedTuple):
    """The values of form, whose offset is 0, for which a condition is true."""

    form: Form
    numbers: Numbers

    @property
    def key(self) -> frozenset[tuple[fx.Node, int]]:
        """Equal for sets of one form."""
        return frozenset(self.form.terms.items())


def number_set(truth: Truth) -> NumberSet | None:
    """A condition as a set; None if it is about several forms."""
    return truth.numbers if isinstance(truth, _Compared) else None


def _find_numbers(truth: All | Some | AtLeast | Equals) -> NumberSet | None:
    if isinstance(truth, (All, Some)):
        sets = [number_set(part) for part in truth.parts]
        known = [found for found in sets if found is not None]
        if len(known) < len(sets) or any(one.form.terms != known[0].form.terms for one in known):
            return None
        join = _intersection if isinstance(truth, All) else _union
        return NumberSet(known[0].form, join([found.numbers for found in known]))
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
