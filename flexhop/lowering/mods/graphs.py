"""Graphs of user functions: dependencies, and functions made of their parts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

aten = torch.ops.aten
convert = torch.ops.prims.convert_element_type.default


def reaches(node: Any, roots: Sequence[fx.Node], but: Sequence[fx.Node] = ()) -> bool:
    """Whether a node depends on one of `roots`, other than through nodes of `but`."""
    pending, seen = [node], set[Any](but)
    while pending:
        current = pending.pop()
        if current in roots:
            return True
        if isinstance(current, fx.Node) and current not in seen:
            seen.add(current)
            pending.extend(current.all_input_nodes)
    return False


def returning(owner: fx.GraphModule, graph: fx.Graph, value: Any) -> fx.GraphModule:
    """A function of a graph's inputs that returns a number, or the value of a node, in fp32.

    Args:
        owner: the module that the graph's nodes refer to.
        graph: copied up to `value`.
        value: a number, or a node of the graph.
    """
    copied, known = fx.Graph(), dict[fx.Node, fx.Node]()
    copied.graph_copy(graph, known)
    example = graph.find_nodes(op="placeholder")[0].meta["val"]
    if isinstance(value, fx.Node):
        result = copied.call_function(convert, (known[value], torch.float32))
    else:
        options = {"dtype": torch.float32, "device": example.device}
        result = copied.call_function(aten.full.default, ([], float(value)), options)
    result.meta["val"] = example
    copied.output(result)
    module = fx.GraphModule(owner, copied)
    module.graph.eliminate_dead_code()
    module.recompile()
    return module
