"""score_mods that add a line over keys, such as ALiBi: recognise them, and find the slopes.

A mod returns score + f * kv_idx + g, where f and g depend on neither the score nor kv_idx: it adds
f more from one key to the next. A kernel then evaluates the mod once per query and tile of keys,
and follows the line from there (the templates named line). f is the derivative of the mod, by the
rules for sums and products. Any other dependence on kv_idx is not a line.

A line may have bends and steps: absolute values of lines over keys and over queries, such as
q_idx - kv_idx; choices by conditions such as q_idx - kv_idx < 128 (see sides.py); the larger or
the smaller of two positions. What it adds then depends on the sides on which a score is, which are
constant in most tiles.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple, cast

import torch
from torch import fx

from flexhop.analysis import Writer, copied, dtype_of, is_conversion, limits_of, name_of, sum_of
from flexhop.analysis.written import convert, returning
from flexhop.lowering.mods.analysed import SCORE, analysed, kernel_graph, per_graph
from flexhop.lowering.mods.large import adds_large, large_scores
from flexhop.lowering.mods.sides import NotDecided, Sides

aten = torch.ops.aten
# Dtypes in which kernels compute as written. Eager mode would round 16-bit ones.
_EXACT = (torch.float32, torch.int32, torch.int64)
_OF_LINE, _OF_PLANE = frozenset({"score", "k"}), frozenset({"score", "q", "k"})
Slope = Any  # a number, or a node of the copy


class Line(NamedTuple):
    """Functions of the inputs of a score_mod, fp32.

    slope: the slope on the sides on which a score is. bend: numbers these sides; None if the line
    has neither bends nor steps.
    """

    slope: fx.GraphModule
    bend: fx.GraphModule | None


@per_graph
def key_line(score: fx.GraphModule) -> Line | None:
    """The line over keys that a score_mod adds; None if it adds anything else.

    Args:
        score: (score, b, h, q_idx, kv_idx, *captures) -> fp32 score.
    """
    slopes = _Slopes(kernel_graph(score, SCORE))
    try:
        if slopes.of(slopes.result, "score", frozenset({"score"})) != 1:
            return None
        rise = slopes.of(slopes.result, "k", _OF_LINE)
    except (_NoLine, NotDecided):
        return None
    # Added to all scores of a row, a number cancels: unless it is so large that it swallows them.
    graph = kernel_graph(score, SCORE)
    if large_scores(graph) != "no" if rise == 0 else adds_large(graph):
        return None
    slope = returning(slopes.module, rise)
    sides = slopes.sides.number()
    return Line(slope, None if sides is None else returning(slopes.module, sides))


def zero(score: fx.GraphModule) -> fx.GraphModule:
    """The number 0, as a function of the inputs of a score_mod."""
    return returning(score, 0.0)


class _NoLine(Exception):
    """A value is not linear in an input."""


class _Slopes:
    """The derivatives of a score_mod's values, and a copy of it to which they are written.

    sides: the conditions on which they depend.
    """

    def __init__(self, score: fx.GraphModule) -> None:
        found = analysed(score, SCORE)
        self.forms, self.result = found.forms, found.mod.result
        self.module, copies = copied(score)
        self.writer = Writer(found, copies)
        output = self.module.graph.output_node()
        self.sides = Sides(self.forms, self.writer, output)
        self._call, self._times, self._plus = (
            functools.partial(write, output)
            for write in (self.writer.call, self.writer.times, self.writer.plus)
        )
        self._known: dict[Any, Slope] = {}

    def of(self, value: Any, name: str, held: frozenset[str]) -> Slope:
        """The derivative of a node by an input.

        held: inputs that the derivative must not depend on, other than by sides.
        """
        if name not in self.forms.depends_on(value):
            return 0
        if value is self.forms.mod.inputs[name]:
            return 1
        if value.meta["val"].dtype == torch.bool and held == _OF_LINE:
            self.sides.decide(value)  # a step
            return 0
        if value.meta["val"].dtype not in _EXACT:
            raise _NoLine
        if (value, name, held) not in self._known:
            self._known[value, name, held] = self._of_operator(value, name, held)
        return self._known[value, name, held]

    def _of_operator(self, node: fx.Node, name: str, held: frozenset[str]) -> Slope:
        if name_of(node) == "where":
            return self._of_where(node, name, held)
        if held == _OF_LINE and (limits := limits_of(node)) is not None:
            return self._of_limited(*limits, name)
        slope: Slope = 0
        for product in self._products(node, held):
            for place, value in enumerate(product):
                part = self.of(value, name, held)
                others = product[:place] + product[place + 1 :] if part != 0 else []
                for other in others:
                    part = self._times(part, self._factor(other, held))
                slope = self._plus(slope, part)
        return slope

    def _of_where(self, node: fx.Node, name: str, held: frozenset[str]) -> Slope:
        condition, *values = node.args
        one, other = (self.of(value, name, held) for value in values)
        if name == "score" and one == other:
            return one
        if held != _OF_LINE:
            raise _NoLine
        return self._chosen(self.sides.decide(condition), one, other)

    def _of_limited(self, value: Any, least: Any, most: Any, name: str) -> Slope:
        slope = self.of(value, name, _OF_LINE)
        for order, limit in ((aten.lt, least), (aten.gt, most)):
            if limit is not None:
                beyond = self.sides.compare(order, value, limit)
                slope = self._chosen(beyond, self.of(limit, name, _OF_LINE), slope)
        return slope

    def _chosen(self, condition: fx.Node, one: Slope, other: Slope) -> Slope:
        """One slope where a condition of the copy is true, else the other."""
        if one is other or (one == other and not isinstance(one, fx.Node)):
            return one
        step = self._plus(one, self._times(-1, other))
        return self._plus(other, self._times(self._call(convert, condition, torch.float32), step))

    def _products(self, node: fx.Node, held: frozenset[str]) -> list[list[Any]]:
        """The products whose sum a node is; an absolute value is one on each side of its bend."""
        kind, operands = name_of(node), cast("Any", node.args)
        if is_conversion(node) and _keeps_value(operands[0], node):
            return [[operands[0]]]
        if (products := sum_of(node)) is not None:
            return [list(product) for product in products]
        if kind == "abs" and held == _OF_LINE:
            return [[self._side(operands[0]), operands[0]]]
        if kind == "div" and not node.kwargs:
            value, divisor = operands
            if not isinstance(divisor, fx.Node):
                return [[1.0 / divisor, value]]
            return [[value, self._call(aten.reciprocal.default, self._factor(divisor, held))]]
        raise _NoLine

    def _side(self, value: fx.Node) -> Slope:
        """-1 or 1, the sign of a value that is a line over keys and over queries."""
        if "score" in self.forms.depends_on(value):
            raise _NoLine
        for name in ("q", "k"):
            self.of(value, name, _OF_PLANE)
        is_negative = self.sides.note(self._call(aten.lt.Scalar, self.writer.copies[value], 0))
        return self._chosen(is_negative, -1, 1)

    def _factor(self, value: Any, held: frozenset[str]) -> Any:
        """An operand that multiplies a slope, as a node of the copy."""
        if not isinstance(value, fx.Node):
            return value
        depends = self.forms.depends_on(value)
        is_constant = not depends & held or (held == _OF_LINE and self._has_steps_alone(value))
        # Operators take a symbolic number only together with a tensor.
        if not is_constant or dtype_of(value) is None:
            raise _NoLine
        return self.writer.copies.get(value, value)

    def _has_steps_alone(self, value: fx.Node) -> bool:
        """Whether a value changes over keys by nothing but steps."""
        return "score" not in self.forms.depends_on(value) and self.of(value, "k", _OF_LINE) == 0


def _keeps_value(source: Any, node: fx.Node) -> bool:
    """Whether a conversion keeps the value: of integers, and of integers as fp32."""
    was_float, is_float = (value.meta["val"].dtype.is_floating_point for value in (source, node))
    return is_float or not was_float
