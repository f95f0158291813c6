"""Comparisons of a mask_mod with the query on one side and the key on the other.

`q_idx - kv_idx < width[h]` subtracts for every score, and a magnitude takes one more instruction.
`kv_idx > q_idx - width[h]` subtracts once for each query, and says the same. So does every
comparison whose linear form adds a part of the query and a part of the key.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from flexhop.analysis import (
    INDICES,
    All,
    Analysis,
    AtLeast,
    Equals,
    Form,
    Some,
    Writer,
    analyse,
    copied,
    dtype_of,
    name_of,
    truth_of,
)
from flexhop.lowering.mods.graphs import convert

aten = torch.ops.aten
_COMPARISONS = frozenset(("eq", "ne", "lt", "le", "gt", "ge"))
_SIZES: dict[str, int] = dict.fromkeys(INDICES, 2**23)  # bounds on positions, as in arithmetic.py
_MOST = 2  # comparisons that one may become: a magnitude has two sides
# A captured number from here on outweighs a sum below it, and may as well be this. The sum of both
# has 32 bits.
_FAR = 2**30


def separated(mask: fx.GraphModule) -> fx.GraphModule:
    """The same mask_mod, with comparisons between a part of the query and a part of the key.

    Args:
        mask: (b, h, q_idx, kv_idx, *captures) -> bool; not changed.
    """
    module, copies = copied(mask)
    writer = _Comparisons(analyse(mask, INDICES, _SIZES), copies)
    for node, copy in copies.items():
        if name_of(node) in _COMPARISONS and (new := writer.compare(node)) is not None:
            copy.replace_all_uses_with(new)
    module.graph.eliminate_dead_code()
    module.recompile()
    return module


class _Comparisons:
    """Writes comparisons to a copy of a graph.

    Args:
        found: the analysis of the graph.
        copies: the copy of each node.
    """

    def __init__(self, found: Analysis, copies: dict[fx.Node, fx.Node]) -> None:
        self.found, self.copies = found, copies
        self.writer = Writer(found, copies)
        self._bounded = set[fx.Node]()

    def compare(self, node: fx.Node) -> fx.Node | None:
        """A comparison in other words; None if it cannot be said so, or is no shorter."""
        if not any(self._sees_both(operand) for operand in node.all_input_nodes):
            return None
        truth = truth_of(self.found.forms, self.found.known[node])
        parts = truth.parts if isinstance(truth, (All, Some)) else (truth,)
        if len(parts) > _MOST or not all(map(self._is_separable, parts)):
            return None
        copy = self.copies[node]
        new, *others = [self._write(copy, part) for part in parts]
        join = aten.bitwise_and.Tensor if isinstance(truth, All) else aten.bitwise_or.Tensor
        for other in others:
            new = self.writer.call(copy, join, new, other)
        return new

    def _sees_both(self, node: fx.Node) -> bool:
        return {"q", "k"} <= self.found[node].depends

    def _is_separable(self, truth: Any) -> bool:
        """Whether a condition is about a part of the query and a part of the key, both small."""
        if not isinstance(truth, (AtLeast, Equals)):
            return False
        forms, total, far = self.found.forms, abs(truth.form.offset), 0
        seen = frozenset[str]()
        for atom, factor in truth.form.terms.items():
            depends = forms.depends_on(atom)
            is_integer = dtype_of(atom) in (torch.int32, torch.int64)
            if {"q", "k"} <= depends or not is_integer or atom not in self.writer.copies:
                return False
            seen, most = seen | depends, self._most(atom)
            far += most >= _FAR
            if most >= _FAR and abs(factor) != 1:
                return False
            total += 0 if most >= _FAR else abs(factor) * most
        return {"q", "k"} <= seen and far <= 1 and total < _FAR

    def _write(self, copy: fx.Node, truth: AtLeast | Equals) -> fx.Node:
        terms, depends = truth.form.terms, self.found.forms.depends_on
        for atom in terms:
            self._bound(copy, atom)
        of_key = {atom: factor for atom, factor in terms.items() if "k" in depends(atom)}
        rest = {atom: factor for atom, factor in terms.items() if atom not in of_key}
        sign = 1 if next(iter(of_key.values())) > 0 else -1
        key = self.writer.write(copy, Form(of_key, 0).times(sign))
        query = self.writer.write(copy, Form(rest, truth.form.offset).times(-sign))
        if isinstance(truth, Equals):
            kind = aten.eq.Tensor if truth.is_equal else aten.ne.Tensor
        else:
            kind = aten.ge.Tensor if sign > 0 else aten.le.Tensor
        return self.writer.call(copy, kind, key, query)

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
