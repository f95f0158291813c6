"""Functions of the distance q_idx - kv_idx, computed once for a diagonal of scores.

A thread holds two queries eight apart and keys in steps of eight, so each distance occurs twice
among its scores. A kernel that computes the distance by itself, from what a thread's scores share
and what tells them apart, lets the compiler see that. It does not from q_idx - kv_idx.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from flexhop.analysis import Analysis, Writer, copied, dependents
from flexhop.lowering.mods.analysed import SCORE, analyse_kernel, analysed
from flexhop.lowering.mods.indices import clamp_reads
from flexhop.templates.printers.holes import DISTANCE

aten = torch.ops.aten
_LARGEST_OFFSET = 2**30  # a distance plus this is an int32


def has_distances(score: Any) -> bool:
    """Whether a score_mod computes a distance of positions."""
    found = analysed(score, SCORE)
    return any(_distance(found, node) is not None for node in found)


def by_distance(graph: fx.GraphModule, *, has_others: bool) -> fx.GraphModule:
    """A score_mod that takes the distance as an input.

    Args:
        graph: (*SCORE, *captures) -> score.
        has_others: whether distances may be of positions past the last ones, whose scores are
            not used. Reads at indices that depend on the distance then stay in range.

    Returns:
        (*SCORE, distance, *captures) -> score, with the same values.
    """
    found = analyse_kernel(graph, SCORE)
    module, copies = copied(graph)
    writer = Writer(found, copies)
    inputs = module.graph.find_nodes(op="placeholder")
    key = inputs[len(SCORE) - 1]
    with module.graph.inserting_after(key):
        distance = module.graph.placeholder(DISTANCE)
    distance.meta["val"] = key.meta["val"]
    for node, copy in copies.items():
        measured = _distance(found, node)
        if measured is None:
            continue
        sign, offset = measured
        new = distance if sign > 0 else writer.call(copy, aten.neg.default, distance)
        if offset:
            new = writer.call(copy, aten.add.Tensor, new, offset)
        writer.replace(copy, new)
    if has_others:
        clamp_reads(module, dependents([distance]))
    module.graph.eliminate_dead_code()
    module.recompile()
    return module


def _distance(found: Analysis, node: fx.Node) -> tuple[int, int] | None:
    """Sign and offset of a node that is the distance, times the sign, plus the offset."""
    measured = found.forms.distance(found.known[node]) if node.op == "call_function" else None
    return measured if measured is None or abs(measured[1]) <= _LARGEST_OFFSET else None
