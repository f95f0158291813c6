"""How large the scores may be that a score_mod returns.

fp32 has 24 bits. A weight is 2**(score * factor - shift), and if score and shift are far above
2**16, the rounding of the shift makes another number of the weight; above 2**30, one that is
infinite. Scores are that large if a user hides some by a number such as -1e9, and some row has no
others.
"""

from __future__ import annotations

import math
from typing import Any, cast

import torch
from torch import fx
from torch.fx.node import map_aggregate

from flexhop.analysis import Analysis, Interval, copied, evaluate, plain_inputs
from flexhop.lowering.mods.analysed import SCORE, analyse_kernel, per_graph
from flexhop.lowering.problem import Large

# Scores before score_mod that count as ordinary: a choice by their sign is then known.
_SCORES = ((-64.0, 0.0), (0.0, 64.0))
# Sizes that do: farther keys are pushed down by more, but they are not the largest of their row.
_SIZES = {"b": 64, "h": 64, "q": 2**14, "k": 2**14}
_LARGE = 2.0**17  # of 24 bits, 7 are left behind the point


@per_graph
def large_scores(graph: fx.GraphModule) -> Large:
    """Whether a score_mod may return scores that are large though its argument is not.

    Numbers of captured tensors may be large. A score of -inf has a weight of 0 in any case, so it
    does not count.

    Args:
        graph: a score_mod in the form that kernels compute.
    """
    finite = _without_infinity(graph)
    found = analyse_kernel(finite, SCORE)
    kinds = {_large_between(found, ends) for ends in _SCORES}
    return "growth" if "growth" in kinds else "offset" if "offset" in kinds else "no"


def _large_between(found: Analysis, ends: tuple[float, float]) -> Large:
    """The same, for scores between two numbers."""
    mod = found.mod
    inputs = plain_inputs(mod, _SIZES)
    inputs["score"] = Interval(*ends, torch.float32, False, ends)
    values = evaluate(mod, inputs)
    if not (isinstance(mod.result, fx.Node) and _is_large(values[mod.result])):
        return "no"
    for node in mod.operators:
        if not _is_large(values[node]) or any(map(_is_large, _operands(node, values))):
            continue
        if "score" in found.forms.of_all([node]):
            return "growth"
    return "offset"


def _without_infinity(graph: fx.GraphModule) -> fx.GraphModule:
    """The graph with 0 in place of -inf."""
    module, _ = copied(graph)
    for node in module.graph.nodes:
        node.args = map_aggregate(node.args, _finite)
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
