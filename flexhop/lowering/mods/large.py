"""How large the scores may be that a score_mod returns.

fp32 has 24 bits. A weight is 2**(score * factor - shift), and if score and shift are far above
2**15, the rounding of the shift makes another number of the weight; above 2**30, one that is
infinite. Scores are that large if a user hides some by a number such as -1e9, and some row has no
others.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple, cast

import torch
from torch import fx
from torch.fx.node import map_aggregate

from flexhop.analysis import (
    Analysis,
    Interval,
    copied,
    dependents,
    dtype_of,
    evaluate,
    is_float,
    plain_inputs,
    reached,
)
from flexhop.analysis.operators import packet_of
from flexhop.lowering.mods.analysed import SCORE, analyse_kernel, per_graph
from flexhop.lowering.problem import Large

aten = torch.ops.aten
# Scores before score_mod that count as ordinary: a choice by their sign is then known.
_SCORES = ((-64.0, 0.0), (0.0, 64.0))
_ALL_SCORES = (-64.0, 64.0)
# Sizes that do: farther keys are pushed down by more, but they are not the largest of their row.
_SIZES = {"b": 64, "h": 64, "q": 2**12, "k": 2**12}
# Of 24 bits, 9 are left behind the point. The lowest number of float16 is above this.
_LARGE = 2.0**15
_CONVERSIONS = {aten._to_copy, torch.ops.prims.convert_element_type}
_SUMS = {*_CONVERSIONS, aten.add, aten.addcmul, aten.sub, aten.rsub, aten.neg, aten.abs}
_CHOICES = {aten.where, aten.clamp, aten.minimum, aten.maximum, aten.relu}
_PRODUCTS = {aten.mul, aten.div}


@per_graph
def large_scores(graph: fx.GraphModule) -> Large:
    """Whether a score_mod may return scores that are large though its argument is not.

    Numbers of captured tensors may be large. A score of -inf has a weight of 0 in any case, so it
    does not count.

    Args:
        graph: a score_mod in the form that kernels compute.
    """
    found = analyse_kernel(_undecided(graph), SCORE)
    kinds = {_large_between(found, ends) for ends in _SCORES}
    return "growth" if "growth" in kinds else "offset" if "offset" in kinds else "no"


@per_graph
def adds_large(graph: fx.GraphModule) -> bool:
    """Whether a score_mod that adds a line over keys may add large numbers as well.

    What is in proportion to positions is not: only what far keys get is large then. A captured
    number that all scores of a head get cancels.

    Args:
        graph: a score_mod in the form that kernels compute.
    """
    found = analyse_kernel(graph, SCORE)
    return _Added(found, _values(found, _ALL_SCORES)).is_large(found.mod.result)


class _Added(NamedTuple):
    """A sum that a score_mod computes, and intervals of all values."""

    found: Analysis
    values: Mapping[fx.Node, Any]

    def is_large(self, value: Any, is_chosen: bool = False, is_slope: bool = False) -> bool:
        """Whether a part of the sum may be large.

        Args:
            value: the part.
            is_chosen: only some keys get it.
            is_slope: it is in proportion to positions, for which captured numbers are small.
        """
        if not isinstance(value, fx.Node):
            return _is_large(value)
        if value in self.found.mod.inputs.values():
            return False
        name = packet_of(value.target)
        parts = [x for x in value.args if isinstance(x, (fx.Node, int, float))]
        is_moved = self._is_moved(value)
        if name in _PRODUCTS and any(map(self._is_step, parts)):
            is_chosen = True
        elif name in _PRODUCTS and is_moved:
            is_slope = True
            parts = [x for x in parts if not isinstance(x, fx.Node) or self._is_moved(x)]
        elif name in _CHOICES:
            is_chosen, parts = True, parts[name is aten.where :]
        elif name not in _SUMS and self._reads(value):
            return (is_chosen or is_moved) and not is_slope
        elif name not in _SUMS:
            return is_float(value) and _is_large(self.values[value])
        return any(self.is_large(x, is_chosen, is_slope) for x in parts)

    def _is_moved(self, value: Any) -> bool:
        names = self.found.forms.depends_on(value) if isinstance(value, fx.Node) else ""
        return not frozenset("qk").isdisjoint(names)

    def _is_step(self, value: Any) -> bool:
        """Whether a factor depends on positions, but is in proportion to none."""
        if not self._is_moved(value):
            return False
        if packet_of(value.target) in _CONVERSIONS:
            return self._is_step(value.args[0])
        is_choice = packet_of(value.target) is aten.where
        return dtype_of(value) == torch.bool or (
            is_choice and not any(map(self._is_moved, value.args[1:]))
        )

    def _reads(self, node: fx.Node) -> bool:
        """Whether a value is of captured tensors."""
        captures = self.found.mod.captures
        return is_float(node) and any(
            source in captures
            for part in (*reached(node), node)
            for source in (part, *part.all_input_nodes)
        )


def _values(found: Analysis, ends: tuple[float, float]) -> dict[fx.Node, Any]:
    """Intervals of all values, for scores between two numbers."""
    inputs = plain_inputs(found.mod, _SIZES)
    inputs["score"] = Interval(*ends, torch.float32, False, ends)
    return evaluate(found.mod, inputs)


def _large_between(found: Analysis, ends: tuple[float, float]) -> Large:
    """The same, for scores between two numbers."""
    mod, values = found.mod, _values(found, ends)
    if not (isinstance(mod.result, fx.Node) and _is_large(values[mod.result])):
        return "no"
    for node in mod.operators:
        if not _is_large(values[node]) or any(map(_is_large, _operands(node, values))):
            continue
        if "score" in found.forms.of_all([node]):
            return "growth"
    return "offset"


def _undecided(graph: fx.GraphModule) -> fx.GraphModule:
    """The graph with 0 in place of -inf, whose comparisons of positions have either result.

    A call may have more tokens than _SIZES says.
    """
    module, _ = copied(graph)
    given = module.graph.find_nodes(op="placeholder")
    moved, scored = dependents(given[3:5]), dependents(given[:1])
    for node in list(module.graph.nodes):
        node.args = map_aggregate(node.args, _finite)
        value = node.meta.get("val")
        is_flag = isinstance(value, torch.Tensor) and value.dtype == torch.bool
        if not (is_flag and value.dim() == 0 and node in moved and node not in scored):
            continue
        with module.graph.inserting_before(node):
            either = module.graph.call_function(aten.gt.Scalar, (given[1], 0))
        either.meta = dict(node.meta)
        node.replace_all_uses_with(either)
    module.recompile()
    return module


def _finite(value: Any) -> Any:
    return 0.0 if isinstance(value, float) and value == -math.inf else value


def _operands(node: fx.Node, values: Any) -> list[Any]:
    """Intervals of a node's operands; its numbers are among them."""
    numbers = [x for x in cast("tuple[Any, ...]", node.args) if isinstance(x, int | float)]
    return [*(values[source] for source in node.all_input_nodes), *numbers]


def _is_large(value: Any) -> bool:
    if isinstance(value, Interval):
        return not (-_LARGE < value.low and value.high < _LARGE)
    return isinstance(value, int | float) and abs(value) >= _LARGE
