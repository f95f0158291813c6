"""Cheaper arithmetic on positions.

`slope * (kv_idx - q_idx)` subtracts integers for every score and converts each difference to a
float, which is as slow as an exponential. Converting the two positions first gives the same value,
because both are below 2**24, where fp32 represents all integers. It needs only one conversion per
row and column. The same holds for absolute differences, and for integers added to positions.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import fx

aten = torch.ops.aten
convert = torch.ops.prims.convert_element_type.default
_FLOAT_OPS = (aten.mul.Tensor, aten.add.Tensor, aten.sub.Tensor, aten.div.Tensor)
_DIFFERENCES = (aten.sub.Tensor, aten.add.Tensor)
_MAGNITUDES = (aten.abs.default, aten.neg.default)
_LARGEST = 2**23


def float_positions(graph: fx.GraphModule) -> fx.GraphModule:
    """A copy of a mod's graph that subtracts positions as floats if the result becomes a float."""
    result = fx.Graph()
    values: dict[fx.Node, fx.Node] = {}
    output = result.graph_copy(graph.graph, values)
    result.output(output)
    module = fx.GraphModule(graph, result)
    for node in list(module.graph.nodes):
        if node.target is convert and node.args[1] == torch.float32:
            _convert_operands(module.graph, node, 0)
        elif node.target in _FLOAT_OPS and _dtype(node) == torch.float32:
            for position in range(2):
                _convert_operands(module.graph, node, position)
    module.graph.eliminate_dead_code()
    module.recompile()
    return module


def _dtype(node: object) -> torch.dtype | None:
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return value.dtype if isinstance(value, torch.Tensor) else None


def _is_position(node: object) -> bool:
    """A position as a mod gets it: a 0-d int32 input."""
    return isinstance(node, fx.Node) and node.op == "placeholder" and _dtype(node) == torch.int32


def _convert_operands(graph: fx.Graph, user: fx.Node, position: int) -> None:
    value = user.args[position]
    if not isinstance(value, fx.Node) or not _is_distance(value):
        return
    with graph.inserting_before(user):
        new = _as_float(graph, value)
    if user.target is convert:
        user.replace_all_uses_with(new)
    else:
        user.update_arg(position, new)


def _is_distance(node: fx.Node) -> bool:
    """A difference or sum of positions and small integers, or its absolute value."""
    is_either = node.target in (*_DIFFERENCES, *_MAGNITUDES) and not node.kwargs
    return is_either and all(map(_is_term, node.args))


def _is_term(operand: Any) -> bool:
    if isinstance(operand, int):
        return abs(operand) < _LARGEST
    return _is_position(operand) or (isinstance(operand, fx.Node) and _is_distance(operand))


def _as_float(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """A distance, or a position, computed in fp32."""
    if _is_position(node):
        new = graph.call_function(convert, (node, torch.float32))
    else:
        operands = [_as_float(graph, x) if isinstance(x, fx.Node) else x for x in node.args]
        new = graph.call_function(cast("Any", node.target), tuple(operands))
    new.meta["val"] = node.meta["val"].to(torch.float32)
    return new
