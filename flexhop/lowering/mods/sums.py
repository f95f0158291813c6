"""Tangents of captured tensors' gradients, as functions that second-order kernels call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from flexhop.analysis import copied
from flexhop.compat.graphs import inline
from flexhop.compat.kernels import pointwise
from flexhop.compat.mods.indexing import IndexMode
from flexhop.compat.operators import transforms
from flexhop.lowering.mods.analysed import JOINT, SCORE, kernel_graph, per_graph
from flexhop.lowering.mods.arithmetic import cheaper
from flexhop.lowering.mods.indices import wrap_reads
from flexhop.lowering.mods.lower import position_sizes, score_inputs
from flexhop.ops.args import Site, unpack_sites
from flexhop.ops.derivatives.smooth import smooth
from flexhop.ops.graphs.reads import NUM_SCORE_INPUTS, SplitReads, compose_reads, split_reads


class Sums(NamedTuple):
    """What kernels add to the tangents of captured tensors' gradients.

    graph: (score, b, h, q_idx, kv_idx, grad_score, *captures, score_dot, grad_dot, *tangents) ->
    grad_score, values, indices. sites: its reads. functions: its outputs, lowered.
    """

    graph: fx.GraphModule
    sites: tuple[Site, ...]
    functions: list[Any]


def lower_sums(
    device: torch.device, score: Any, captures: Sequence[Any], wanted: Sequence[int],
    moved: dict[int, Any],
) -> Sums:  # fmt: skip
    """Lower the tangents of the gradients that score_mod's captures get from one score.

    Args:
        device: device of the call.
        score: score_mod, as an operand.
        captures: its captures, lowered.
        wanted: positions of the captures that get gradients.
        moved: tangents of captured tensors, lowered, by position.

    Raises:
        UnsupportedFeatureError: one is read in other ways than ops/graphs/reads.py says.
    """
    graph, sites = _trace_sums(kernel_graph(score, SCORE), tuple(wanted), tuple(sorted(moved)))
    *first, score_dot, grad_dot = score_inputs(device, "grad_score", "score_dot", "grad_dot")
    count = len(graph.graph.find_nodes(op="placeholder")) - len(first) - 2 - len(moved)
    tangents = [moved[i] for i in sorted(moved)]
    inputs = [*first, *captures[:count], score_dot, grad_dot, *tangents]
    fast = cheaper(kernel_graph(graph, JOINT), JOINT)
    safe = wrap_reads(fast, JOINT, position_sizes(), sites)
    functions = pointwise.lower(safe, inputs, "the second derivative of score_mod")
    return Sums(graph, sites, functions)


@per_graph
def _trace_sums(
    score: fx.GraphModule, wanted: tuple[int, ...], moved: tuple[int, ...]
) -> tuple[fx.GraphModule, tuple[Site, ...]]:
    graph, _ = copied(smooth(score))
    # Chains of reads become single ones, so that each site has indices of its own.
    compose_reads(graph)
    examples = [node.meta["val"] for node in graph.graph.find_nodes(op="placeholder")]
    captures = examples[NUM_SCORE_INPUTS:]
    split = split_reads(graph, [i in wanted for i in range(len(captures))])
    one = examples[0]

    def pushed(*values: Any) -> tuple[Tensor, ...]:
        inputs, grad = values[:NUM_SCORE_INPUTS], values[NUM_SCORE_INPUTS]
        rest = values[NUM_SCORE_INPUTS + 1 :]
        held, (score_dot, grad_dot, *tangents) = rest[: len(captures)], rest[len(captures) :]
        with IndexMode():
            _, indices = split.read(*inputs, *held)

        def added(score: Tensor, grad: Tensor, *chosen: Tensor) -> tuple[Tensor, ...]:
            known = dict(zip(moved, chosen, strict=True))
            own = (score, *inputs[1:], *(known.get(i, c) for i, c in enumerate(held)))
            with IndexMode():
                read, _ = split.read(*own)
            return _element_grads(split, own, read, grad)

        primals = (inputs[0], grad, *(held[i] for i in moved))
        dots = transforms.jvp(added, primals, (score_dot, grad_dot, *tangents))[1]
        return (grad, *dots, *split.element_indices(indices))

    likes = [*examples[:NUM_SCORE_INPUTS], one, *captures, one, one, *(captures[i] for i in moved)]
    traced = inline.trace_fresh(pushed, likes)
    transforms.write_zeros(traced)
    return traced, unpack_sites(split.sites)


def _element_grads(
    split: SplitReads, inputs: Sequence[Any], read: Sequence[Tensor], grad: Tensor
) -> tuple[Tensor, ...]:
    """The gradients of the elements that are read, given that of the modified score.

    In forward mode, one element after the other: the reverse mode needs a GPU at this point.
    """
    found = []
    for position, own in enumerate(split.reads):

        def modified(value: Tensor, position: int = position) -> Tensor:
            with IndexMode():
                return split.body(*inputs, *read[:position], value, *read[position + 1 :])

        for element in own.elements:
            along = _one_at(element, read[position])
            slope = transforms.jvp(modified, (read[position],), (along,))[1]
            found.append(slope.to(torch.float32) * grad)
    return tuple(found)


def _one_at(element: Sequence[int], like: Tensor) -> Tensor:
    """1 at `element` of a row, 0 elsewhere."""
    if not element:
        return torch.ones_like(like)
    place = 0
    for index, size in zip(element, like.shape, strict=True):
        place = place * int(size) + index
    places = torch.arange(like.numel(), device=like.device).reshape(like.shape)
    return (places == place).to(like.dtype)
