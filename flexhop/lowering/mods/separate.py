"""Comparisons of a mask_mod with the query on one side and the key on the other.

`q_idx - kv_idx < width[h]` subtracts for every score. `kv_idx > q_idx - width[h]` subtracts once
for each query, and says the same. So does every comparison of the distance with what heads and
batches have. Magnitudes stay: two comparisons are longer in the backward kernel. So do distances
of rows of an image: their numbers for each key take registers, and a forward step spilled.
quotients.py writes some of these without such numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeGuard

import torch
from torch import fx

from flexhop.analysis import (
    INDICES,
    Analysis,
    AtLeast,
    Equals,
    Form,
    Writer,
    copied,
    dtype_of,
    is_comparison,
    settled,
    truth_of,
)
from flexhop.analysis.written import convert
from flexhop.lowering.mods.analysed import SIZES, analyse_kernel, per_graph

aten = torch.ops.aten
# A captured number from here on outweighs a sum below it, and may as well be this. The sum of both
# has 32 bits.
_FAR = 2**30


@per_graph
def separated(mask: fx.GraphModule) -> fx.GraphModule:
    """The same mask_mod, with comparisons between a part of the query and a part of the key.

    Args:
        mask: (b, h, q_idx, kv_idx, *captures) -> bool; not changed.
    """
    return with_comparisons(mask, _Comparisons)


class Comparisons(Protocol):
    """Comparisons of a graph in other words."""

    def compare(self, node: fx.Node) -> fx.Node | None:
        """A new one, written to the copy of the graph; None if this one stays."""


def with_comparisons(
    mask: fx.GraphModule, writer: Callable[[Analysis, dict[fx.Node, fx.Node]], Comparisons]
) -> fx.GraphModule:
    """The same mask_mod with other comparisons.

    writer: given the analysis of the graph, and the copy of each of its nodes.
    """
    module, copies = copied(mask)
    comparisons = writer(analyse_kernel(mask, INDICES), copies)
    for node, copy in copies.items():
        if is_comparison(node) and (new := comparisons.compare(node)) is not None:
            copy.replace_all_uses_with(new)
    return settled(module, mask)


class _Comparisons:
    """Writes comparisons to a copy of a graph.

    Args:
        found: the analysis of the graph.
        copies: the copy of each node.
    """

    def __init__(self, found: Analysis, copies: dict[fx.Node, fx.Node]) -> None:
        self.found, self.copies = found, copies
        self.writer = Writer(found, copies)
        self.key = found.mod.inputs["k"]
        self._bounded = set[fx.Node]()

    def compare(self, node: fx.Node) -> fx.Node | None:
        """A comparison in other words; None if it cannot be said so, or is no shorter."""
        if not any(self._sees_both(operand) for operand in node.all_input_nodes):
            return None
        truth = truth_of(self.found.forms, self.found.known[node])
        return self._write(self.copies[node], truth) if self._is_separable(truth) else None

    def _sees_both(self, node: fx.Node) -> bool:
        return {"q", "k"} <= self.found[node].depends

    def _is_separable(self, truth: Any) -> TypeGuard[AtLeast | Equals]:
        """Whether a condition is about the distance, and small numbers besides."""
        if not isinstance(truth, (AtLeast, Equals)):
            return False
        place = self.found.forms.affine(truth.form)
        if place is None or not place.distance:
            return False
        total, far = 2 * SIZES["q"] + abs(truth.form.offset), 0
        for atom, factor in place.rest.terms.items():
            is_integer = dtype_of(atom) in (torch.int32, torch.int64)
            if {"q", "k"} & self.found.forms.depends_on(atom) or not is_integer:
                return False
            is_far = self._most(atom) >= _FAR
            if atom not in self.writer.copies or (is_far and abs(factor) != 1):
                return False
            far, total = far + is_far, total + (0 if is_far else abs(factor) * self._most(atom))
        return far <= 1 and total < _FAR

    def _write(self, copy: fx.Node, truth: AtLeast | Equals) -> fx.Node:
        rest = dict(truth.form.terms)
        for atom in rest:
            self._bound(copy, atom)
        sign = rest.pop(self.key)
        query = self.writer.write(copy, Form(rest, truth.form.offset).times(-sign))
        if isinstance(truth, Equals):
            kind = aten.eq.Tensor if truth.is_equal else aten.ne.Tensor
        else:
            kind = aten.ge.Tensor if sign > 0 else aten.le.Tensor
        return self.writer.call(copy, kind, self.writer.copies[self.key], query)

    def _bound(self, copy: fx.Node, atom: fx.Node) -> None:
        """Let an integer that may be anything be at most _FAR, and of 32 bits."""
        if atom not in self._bounded and self._most(atom) >= _FAR:
            node = self.writer.copies[atom]
            node = self.writer.call(copy, aten.clamp_min.default, node, -_FAR)
            node = self.writer.call(copy, aten.clamp_max.default, node, _FAR)
            self.writer.copies[atom] = self.writer.call(copy, convert, node, torch.int32)
        self._bounded.add(atom)

    def _most(self, atom: fx.Node) -> Any:
        return max(map(abs, self.found.forms.range_of(atom)))
