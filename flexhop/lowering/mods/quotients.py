"""Quotients and remainders of positions in masks.

Comparisons of quotients are written with one position alone on one side.

`q_idx // 11 >= kv_idx // 11` divides for each query of a tile and for each key. `kv_idx <= q_idx
// 11 * 11 + 10` says the same and leaves the key as it is, so that a kernel whose threads hold
rows of queries divides once for each row, and compares for each score. In a kernel whose threads
hold keys, the query is to be alone: `q_idx >= kv_idx // 11 * 11`.

A magnitude becomes two comparisons, but only for rows of queries: in backward kernels they are
longer, as instructions of compiled steps say. So are equal quotients everywhere, and they stay.

Remainders may leave no block whole: `(q_idx % 3 != 1) & (q_idx >= kv_idx)` hides every third query
everywhere, so kernels ask such a mask about every score that they compute.
"""

from __future__ import annotations

import functools
from typing import Any, Literal

import torch
from torch import fx

from flexhop.analysis import (
    INDICES,
    All,
    Analysis,
    AtLeast,
    Form,
    Forms,
    Some,
    Truth,
    Writer,
    dtype_of,
    number_set,
    quotient_of,
    truth_of,
)
from flexhop.lowering.mods.analysed import analysed, per_graph
from flexhop.lowering.mods.separate import with_comparisons

aten = torch.ops.aten
Position = Literal["q", "k"]
_LARGEST = 2**30  # sums below it have 32 bits
_MOST_LEFT = 64  # remainders by up to this take all their values in a block of 128
_MOST = {"k": 2, "q": 1}  # comparisons for one, by what is left alone


@per_graph
def alone(mask: fx.GraphModule, position: Position) -> fx.GraphModule:
    """The same mask_mod, with quotients of a position compared without dividing it.

    Args:
        mask: (b, h, q_idx, kv_idx, *captures) -> bool; not changed.
        position: the one that is left alone: "k" if threads hold rows of queries, "q" if they
            hold rows of keys.
    """
    return with_comparisons(mask, functools.partial(_Comparisons, position=position))


class _Comparisons:
    """Writes comparisons to a copy of a graph.

    Args:
        found: the analysis of the graph.
        copies: the copy of each node.
        position: the one that is left alone.
    """

    def __init__(
        self, found: Analysis, copies: dict[fx.Node, fx.Node], position: Position
    ) -> None:
        self.found, self.copies, self.position = found, copies, position
        self.writer = Writer(found, copies)
        self.place = found.mod.inputs[position]

    def compare(self, node: fx.Node) -> fx.Node | None:
        """A comparison in other words; None if no quotient of the position decides it."""
        if not {"q", "k"} <= self.found[node].depends:
            return None
        truth = truth_of(self.found.forms, self.found.known[node])
        parts = truth.parts if isinstance(truth, (All, Some)) else (truth,)
        bounds = [self._bound(part) for part in parts]
        if not 0 < len(bounds) <= _MOST[self.position] or None in bounds:
            return None
        join = aten.bitwise_and.Tensor if isinstance(truth, All) else aten.bitwise_or.Tensor
        first, *rest = (self._write(self.copies[node], *bound) for bound in bounds if bound)
        return self.writer.call(self.copies[node], join, first, *rest) if rest else first

    def _bound(self, part: Any) -> tuple[bool, Form] | None:
        """Whether the position is at least a form, or at most; None for other conditions."""
        if not isinstance(part, AtLeast):
            return None
        rest = dict(part.form.terms)
        forms = self.found.forms
        atoms = [atom for atom in rest if self.position in forms.depends_on(atom)]
        quotient = quotient_of(forms, atoms[0]) if len(atoms) == 1 else None
        value = None if quotient is None else forms.form(quotient.value)
        if quotient is None or value is None or quotient.is_remainder:
            return None
        is_down = quotient.rounds_down or forms.range_of(quotient.value)[0] >= 0
        sign, other = rest.pop(atoms[0]), value.plus(Form({self.place: 1}, 0), -1)
        if abs(sign) != 1 or value.terms.get(self.place) != 1 or not is_down:
            return None
        # position + other, divided and rounded down, is at least limit, or at most.
        limit = Form(rest, part.form.offset).times(-sign)
        bound = limit.times(quotient.divisor).plus(other, -1)
        if sign < 0:
            bound = Form(bound.terms, bound.offset + quotient.divisor - 1)
        return (sign > 0, bound) if self._is_small(bound) else None

    def _is_small(self, form: Form) -> bool:
        """Whether a form has 32 bits, and is about the other position, or none."""
        total = abs(form.offset)
        for atom, factor in form.terms.items():
            is_integer = dtype_of(atom) in (torch.int32, torch.int64)
            is_other = self.position not in self.found.forms.depends_on(atom)
            if not is_integer or not is_other or atom not in self.writer.copies:
                return False
            total += abs(factor) * max(map(abs, self.found.forms.range_of(atom)))
        return total < _LARGEST

    def _write(self, copy: fx.Node, is_least: bool, bound: Form) -> fx.Node:
        kind = aten.ge.Tensor if is_least else aten.le.Tensor
        place = self.writer.copies[self.place]
        return self.writer.call(copy, kind, place, self.writer.write(copy, bound))


@per_graph
def is_scattered(mask: fx.GraphModule) -> bool:
    """Whether a mask_mod hides scores of every block by one position alone."""
    found = analysed(mask, INDICES)
    truth = truth_of(found.forms, found.mod.result)
    parts = truth.parts if isinstance(truth, All) else (truth,)
    return any(_hides_some_remainders(found.forms, part) for part in parts)


def _hides_some_remainders(forms: Forms, part: Truth) -> bool:
    """Whether a condition is about a remainder of one position, and false for some."""
    numbers = number_set(part)
    if numbers is None or len(numbers.form.terms) != 1:
        return False
    ((atom, factor),) = numbers.form.terms.items()
    remainder = quotient_of(forms, atom)
    if remainder is None or not remainder.is_remainder or remainder.divisor > _MOST_LEFT:
        return False
    value = forms.affine(remainder.value)
    if value is None or sorted((abs(value.q), abs(value.k))) != [0, 1]:
        return False
    if forms.of_all(value.rest.terms) & {"q", "k"}:
        return False
    seen = [
        any(low <= factor * left <= high for low, high in numbers.numbers)
        for left in range(remainder.divisor)
    ]
    return not all(seen)
