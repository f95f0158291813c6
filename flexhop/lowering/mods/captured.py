"""Gradients of captured tensors: which scores read one entry, from the joint graph's indices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import fx

from flexhop.lowering.mods.lower import index_dependence
from flexhop.lowering.mods.relative import graph_of
from flexhop.lowering.problem import ReadBy
from flexhop.ops.args import Site, unpack_sites
from flexhop.ops.subgraphs import NUM_SCORE_INPUTS

aten = torch.ops.aten
_CONVERSIONS = (torch.ops.prims.convert_element_type.default, aten._to_copy.default)
_COMPARISONS = tuple(getattr(aten, name).Tensor for name in ("gt", "ge", "lt", "le", "eq", "ne"))
_SIGNS: dict[Any, int] = {aten.add.Tensor: 1, aten.sub.Tensor: -1}
# By how much values grow when positions grow by one; None if nothing is known.
Moves = dict[fx.Node, int | None]


def read_sites(joint: Any, sites: tuple[int, ...]) -> tuple[ReadBy, ...]:
    """Of every site of a joint graph, which scores read one entry."""
    return tuple(read_by(joint, site) for site in unpack_sites(sites))


def read_by(joint: Any, site: Site) -> ReadBy:
    """Which scores read one entry at a site."""
    uses_q_idx, uses_kv_idx = index_dependence(joint, site)
    if not uses_q_idx:
        return "key" if uses_kv_idx else "head"
    if not uses_kv_idx:
        return "query"
    return "distance" if _follows_distance(joint, site) else "score"


def repeats(joint: Any, site: Site) -> bool:
    """Whether pairs at different distances may read one entry: no index is a distance itself.

    And whether different queries may, where reads hang on these: none is the query itself.
    """
    graph = graph_of(joint).graph
    *_, q_idx, _ = graph.find_nodes(op="placeholder")[:NUM_SCORE_INPUTS]
    # A distance grows by one with the query, and stays if both move.
    return not {1, -1} & set(_moves_of(graph, site, {q_idx: 1}))


def _follows_distance(joint: Any, site: Site) -> bool:
    """Whether the indices of a site stay as they are when query and key move on by one."""
    graph = graph_of(joint).graph
    score, *_, q_idx, kv_idx = graph.find_nodes(op="placeholder")[:NUM_SCORE_INPUTS]
    return not any(_moves_of(graph, site, {q_idx: 1, kv_idx: 1, score: None}, unknown=1))


def _moves_of(graph: fx.Graph, site: Site, moves: Moves, unknown: int = 0) -> list[int]:
    """By how much the indices of a site grow when inputs grow as `moves` says."""
    for node in graph.nodes:
        if node.op == "call_function":
            moves[node] = _move_of(node, moves)
    outputs = cast("Sequence[Any]", graph.output_node().args[0])
    found = (_move(outputs[i], moves) for i in site.indices)
    return [unknown if move is None else move for move in found]


def _move(value: Any, moves: Moves) -> int | None:
    """By how much a value grows; None if nothing is known."""
    return moves.get(value, 0) if isinstance(value, fx.Node) else 0


def _move_of(node: fx.Node, moves: Moves) -> int | None:
    found = [_move(source, moves) for source in node.all_input_nodes]
    if all(move == 0 for move in found):
        return 0
    if node.target in _CONVERSIONS and node.meta["val"].dtype.itemsize >= 4:
        return found[0]
    if node.target not in (*_SIGNS, *_COMPARISONS) or node.kwargs:
        return None
    first, second = (_move(operand, moves) for operand in node.args)
    if first is None or second is None:
        return None
    if node.target in _COMPARISONS:
        return 0 if first == second else None
    return first + _SIGNS[node.target] * second
