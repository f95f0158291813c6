"""The tangent of a score_mod as a graph: the directional derivative of the mod's own graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from flexhop.analysis import value_of
from flexhop.compat.graphs import inline
from flexhop.compat.kernels import pointwise
from flexhop.compat.mods.indexing import IndexMode
from flexhop.compat.operators import transforms
from flexhop.lowering.mods.analysed import SCORE, kernel_graph, per_graph
from flexhop.lowering.mods.arithmetic import cheaper
from flexhop.lowering.mods.indices import wrap_reads
from flexhop.lowering.mods.lower import position_sizes, score_inputs
from flexhop.ops.derivatives.smooth import smooth
from flexhop.ops.graphs.reads import NUM_SCORE_INPUTS


def lower_push(
    device: torch.device, score: Any, captures: Sequence[Any], moved: dict[int, Any]
) -> Any:
    """Lower the tangent of score_mod.

    Args:
        device: device of the call.
        score: score_mod, as an operand.
        captures: its captures, lowered.
        moved: tangents of captured tensors, lowered, by position.
    """
    inputs = score_inputs(device, "score_dot")
    graph = trace_push(kernel_graph(score, SCORE), tuple(sorted(moved)))
    safe = wrap_reads(cheaper(graph, SCORE), SCORE, position_sizes())
    tangents = [moved[i] for i in sorted(moved)]
    (buffer,) = pointwise.lower(safe, [*inputs, *captures, *tangents], "the tangent of score_mod")
    return buffer


def is_additive(score: Any) -> bool:
    """Whether a score_mod leaves the tangent of its score unchanged."""
    graph = trace_push(kernel_graph(score, SCORE), ())
    return value_of(graph.graph.output_node().args[0]) is _placeholder(graph, NUM_SCORE_INPUTS)


def _placeholder(graph: fx.GraphModule, position: int) -> fx.Node:
    return graph.graph.find_nodes(op="placeholder")[position]


def lower_bend(
    device: torch.device, score: Any, captures: Sequence[Any], moved: dict[int, Any]
) -> Any:
    """Lower the tangent of score_mod's derivative by its score, times a number.

    Args: see `lower_push`.
    """
    inputs = score_inputs(device, "score_dot", "grad_score")
    traced = _trace_bend(kernel_graph(score, SCORE), tuple(sorted(moved)))
    count = len(traced.graph.find_nodes(op="placeholder")) - len(inputs) - len(moved)
    safe = wrap_reads(traced, SCORE, position_sizes())
    tangents = [moved[i] for i in sorted(moved)]
    (buffer,) = pointwise.lower(
        cheaper(safe, SCORE), [*inputs, *captures[:count], *tangents],
        "the second derivative of score_mod",
    )  # fmt: skip
    return buffer


# A second-order pass asks for the same graphs once per kind of result.
@per_graph
def _trace_bend(graph: fx.GraphModule, moved: tuple[int, ...]) -> fx.GraphModule:
    """(score, b, h, q_idx, kv_idx, score_dot, grad_score, *captures, *tangents) -> the tangent of
    the derivative by score; args of `trace_push`."""
    graph = smooth(graph)
    examples = [node.meta["val"] for node in graph.graph.find_nodes(op="placeholder")]
    count = len(examples) - NUM_SCORE_INPUTS

    def bent(*values: Any) -> Tensor:
        score, *index = values[:NUM_SCORE_INPUTS]
        score_dot, grad, *rest = values[NUM_SCORE_INPUTS:]
        held, dots = rest[:count], rest[count:]

        def slope(score: Tensor, *chosen: Tensor) -> Tensor:
            known = dict(zip(moved, chosen, strict=True))

            def once(score: Tensor) -> Tensor:
                with IndexMode():
                    return graph(score, *index, *(known.get(i, c) for i, c in enumerate(held)))

            return transforms.jvp(once, (score,), (grad,))[1]

        primals = (score, *(held[i] for i in moved))
        return transforms.jvp(slope, primals, (score_dot, *dots))[1].to(torch.float32)

    first, read = examples[:NUM_SCORE_INPUTS], examples[NUM_SCORE_INPUTS:]
    likes = [*first, first[0], first[0], *read, *(read[i] for i in moved)]
    traced = inline.trace_fresh(bent, likes)
    transforms.write_zeros(traced)
    return traced


@per_graph
def trace_push(graph: fx.GraphModule, moved: tuple[int, ...]) -> fx.GraphModule:
    """(score, b, h, q_idx, kv_idx, score_dot, *captures, *tangents) -> tangent of the score.

    Args:
        graph: graph of (score, b, h, q_idx, kv_idx, *captures) -> score.
        moved: positions of the captures that have tangents.
    """
    graph = smooth(graph)
    examples = [node.meta["val"] for node in graph.graph.find_nodes(op="placeholder")]
    captures = examples[NUM_SCORE_INPUTS:]
    tangents = [captures[i] for i in moved]
    inputs = [*examples[:NUM_SCORE_INPUTS], examples[0], *captures, *tangents]

    def pushed(*values: Any) -> Tensor:
        score, *index = values[:NUM_SCORE_INPUTS]
        score_dot, *rest = values[NUM_SCORE_INPUTS:]
        held, dots = rest[: len(captures)], rest[len(captures) :]

        def restricted(score: Tensor, *chosen: Tensor) -> Tensor:
            known = dict(zip(moved, chosen, strict=True))
            with IndexMode():
                return graph(score, *index, *(known.get(i, c) for i, c in enumerate(held)))

        primals = (score, *(held[i] for i in moved))
        return transforms.jvp(restricted, primals, (score_dot, *dots))[1].to(torch.float32)

    return inline.trace_fresh(pushed, inputs)
