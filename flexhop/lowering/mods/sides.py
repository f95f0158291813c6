"""Conditions on positions that most tiles of scores decide as a whole.

`q_idx - kv_idx < 128` is true in some tiles, false in others, and only tiles at the edge contain
both. It compares numbers whose difference never turns along queries or along keys, so if the four
corners of a tile are on one side, everything between them is. Conditions joined by logic are
decided if each of them is.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from flexhop.analysis import Forms, Writer, agreed, dtype_of, name_of
from flexhop.analysis.written import convert

aten = torch.ops.aten
_ORDER = ("lt", "le", "gt", "ge")
_LOGIC = tuple(
    f"{kind}_{name}" for kind in ("bitwise", "logical") for name in ("and", "or", "xor", "not")
)
_MOST = 20  # their number is exact in fp32


class NotDecided(Exception):
    """A condition may change more than once along queries or keys."""


class Sides:
    """The conditions of a mod, as nodes of a copy of its graph."""

    def __init__(self, forms: Forms, writer: Writer, output: fx.Node) -> None:
        self._forms, self._writer, self._output = forms, writer, output
        self._found: dict[fx.Node, None] = {}
        self._decided: set[fx.Node] = set()

    def decide(self, condition: Any) -> fx.Node:
        """Note what a Boolean node depends on; returns its copy.

        Raises:
            NotDecided: it depends on the score, or corners do not tell.
        """
        if condition in self._decided:
            return self._writer.copies[condition]
        depends, kind = self._forms.depends_on(condition), name_of(condition)
        if "score" in depends:
            raise NotDecided
        if "k" not in depends:
            pass  # a query has a line of its own
        elif kind in _LOGIC or kind == "where":
            for operand in condition.args:
                if not isinstance(operand, fx.Node) or operand.meta["val"].dtype != torch.bool:
                    raise NotDecided
                self.decide(operand)
        elif kind in _ORDER:
            self.check(*condition.args)
            self.note(self._writer.copies[condition])
        # Equality has two edges: where `<` turns and where `<=` does.
        elif kind in ("eq", "ne"):
            for order in (aten.lt, aten.le):
                self.compare(order, *condition.args)
        else:
            raise NotDecided
        self._decided.add(condition)
        return self._writer.copies[condition]

    def compare(self, order: Any, a: Any, b: Any) -> fx.Node:
        """A comparison of two values, noted and in the copy.

        Raises:
            NotDecided: as `decide`.
        """
        self.check(a, b)
        copies = self._writer.copies
        overload = order.Scalar if dtype_of(b) is None else order.Tensor
        found = self._call(overload, copies[a], copies.get(b, b))
        return self.note(found)

    def check(self, a: Any, b: Any) -> None:
        """Raise NotDecided unless a difference is monotone along queries and along keys."""
        nodes = [value for value in (a, b) if isinstance(value, fx.Node)]
        if any("score" in self._forms.depends_on(node) for node in nodes):
            raise NotDecided
        for position in ("q", "k"):
            one, other = (
                self._forms.grows(value, position) if isinstance(value, fx.Node) else 0
                for value in (a, b)
            )
            if agreed([one, other and -other]) is None:
                raise NotDecided

    def note(self, condition: fx.Node) -> fx.Node:
        """Note a condition of the copy whose corners tell, and return it."""
        self._found[condition] = None
        if len(self._found) > _MOST:
            raise NotDecided
        return condition

    def number(self) -> fx.Node | None:
        """A node that numbers the sides on which a score is; None if nothing was noted."""
        total: Any = 0
        for place, condition in enumerate(self._found):
            bit = self._call(convert, condition, torch.float32)
            bit = self._writer.times(self._output, bit, float(1 << place))
            total = self._writer.plus(self._output, total, bit)
        return total if self._found else None

    def _call(self, target: Any, *args: Any) -> fx.Node:
        return self._writer.call(self._output, target, *args)
