"""`torch.isin` among many captured numbers: a search in numbers that are sorted before the call.

In Dynamo's graph of a mod, so that `made.py` moves the sorting out of it. torch 2.11 to 2.15.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from flexhop.compat.mods.places import COMPARED

__all__ = ["order_sets"]


def order_sets(tx: Any, graph: Graph) -> None:
    """Search for one number among many, instead of comparing them all.

    Args:
        tx: Dynamo's translator.
        graph: of a mod; changed.
    """
    for node in graph.find_nodes(op="call_function", target=torch.isin):
        named = dict(zip(("elements", "test_elements"), node.args, strict=False)) | node.kwargs
        number, numbers = named["elements"], named["test_elements"]
        of_tensors = all(isinstance(_example(value), Tensor) for value in (number, numbers))
        if of_tensors and _example(number).dim() == 0 and _example(numbers).numel() > COMPARED:
            _order(tx, graph, node, (number, numbers, bool(named.get("invert", False))))


def _order(tx: Any, graph: Graph, node: Node, found: tuple[Node, Node, bool]) -> None:
    number, numbers, is_inverted = found

    def call(function: Callable[..., Any], *args: Any) -> Node:
        made = graph.call_function(function, args)
        values = map_arg(args, _example)
        with tx.fake_mode, torch.no_grad():
            made.meta = {**node.meta, "example_value": function(*values)}
        return made

    with graph.inserting_before(node):
        ordered = call(operator.getitem, call(torch.sort, call(torch.flatten, numbers)), 0)
        place = call(torch.searchsorted, ordered, number)
        last = _example(numbers).numel() - 1
        if not isinstance(last, int):  # a size of the capture: the mod must not keep the sorting
            last = call(operator.sub, call(torch.numel, numbers), 1)
        nearest = call(operator.getitem, ordered, call(torch.clamp_max, place, last))
        made = call(torch.ne if is_inverted else torch.eq, nearest, number)
    node.replace_all_uses_with(made)
    graph.erase_node(node)


def _example(value: Any) -> Any:
    return value.meta["example_value"] if isinstance(value, Node) else value
