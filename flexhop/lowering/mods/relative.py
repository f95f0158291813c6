"""Distances in packed sequences, computed without reading tables.

Local positions of packed queries and keys come from tables. If both sides have the same offsets,
the key's position is the query's plus kv_idx - q_idx, clamped to the sequence by `bounded`, which
promises that scores outside it are not used. So the difference of the two is kv_idx - q_idx, and
comparing them compares kv_idx with q_idx.
"""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple, cast

import torch
from torch import fx

from flexhop.compat import inductor
from flexhop.primitives.bounded import BOUNDED

__all__ = ["graph_of", "lower_bounded"]

aten = torch.ops.aten
_COMPARISONS = tuple(getattr(aten, name).Tensor for name in ("gt", "ge", "lt", "le", "eq", "ne"))
_known: weakref.WeakKeyDictionary[fx.GraphModule, fx.GraphModule] = weakref.WeakKeyDictionary()


class _Place(NamedTuple):
    """A local position of a key: the query's position, and the difference to add."""

    of_query: fx.Node
    kv_idx: Any
    q_idx: Any


def graph_of(subgraph: Any) -> fx.GraphModule:
    """The graph of a subgraph operand, for kernels: distances need no table."""
    owner = inductor.graph_module(subgraph)
    if owner not in _known:
        _known[owner] = _resolved(owner)
    return _known[owner]


def lower_bounded(position: Any, last: Any) -> Any:
    """Lower a call of `bounded` outside our kernels."""
    raised = inductor.call_lowering(aten.clamp_min.default, position, 0)
    return inductor.call_lowering(aten.minimum.default, raised, last)


def _resolved(owner: fx.GraphModule) -> fx.GraphModule:
    """The same function without `bounded`; unchanged if it has none."""
    if not owner.graph.find_nodes(op="call_function", target=BOUNDED):
        return owner
    graph = fx.Graph()
    graph.output(graph.graph_copy(owner.graph, {}))
    for node in graph.find_nodes(op="call_function", target=BOUNDED):
        place = _place_of(node)
        if place is not None:
            for user in list(node.users):
                _measure(graph, user, node, place)
        _hold(graph, node)
    graph.eliminate_dead_code()
    return fx.GraphModule(owner, graph)


def _place_of(node: fx.Node) -> _Place | None:
    """The position that a call of `bounded` clamps, if it is a query's position plus kv_idx -
    q_idx."""
    total: Any = node.args[0]
    if not _is_plain(total, aten.add.Tensor):
        return None
    of_query, ahead = total.args
    if not isinstance(of_query, fx.Node) or not _is_plain(ahead, aten.sub.Tensor):
        return None
    return _Place(of_query, *ahead.args)


def _is_plain(node: Any, target: Any) -> bool:
    """Whether a node calls an operator with two operands and no options."""
    return isinstance(node, fx.Node) and node.target is target and not node.kwargs


def _measure(graph: fx.Graph, user: fx.Node, node: fx.Node, place: _Place) -> None:
    """Compute a difference or comparison of both positions from kv_idx and q_idx."""
    if user.target not in (aten.sub.Tensor, *_COMPARISONS) or user.kwargs:
        return
    if user.args == (node, place.of_query):
        operands = (place.kv_idx, place.q_idx)
    elif user.args == (place.of_query, node):
        operands = (place.q_idx, place.kv_idx)
    else:
        return
    with graph.inserting_before(user):
        found = graph.call_function(cast("Any", user.target), operands)
    found.meta = dict(user.meta)
    user.replace_all_uses_with(found)


def _hold(graph: fx.Graph, node: fx.Node) -> None:
    """Compute a call of `bounded` in place."""
    position, last = node.args
    with graph.inserting_before(node):
        raised = graph.call_function(aten.clamp_min.default, (position, 0))
        held = graph.call_function(aten.minimum.default, (raised, last))
    raised.meta, held.meta = dict(node.meta), dict(node.meta)
    node.replace_all_uses_with(held)
