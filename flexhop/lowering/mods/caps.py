"""Soft caps in forward kernels.

`cap * tanh(score / cap)` is one function of the score: its factors are folded into the constants
of tanh. The result is exact enough for a score, to which an absolute error below 2**-12 is
nothing, but not for the root of `x - tanh(x)`. So a product is folded if it is only added to the
result. Backward kernels need tanh itself for its derivative, and keep it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from flexhop.lowering.mods.analysed import SCORE, kernel_graph

aten = torch.ops.aten
_LARGEST = 2.0**9  # factor of tanh, whose text is off by up to 2**-21 of it
_SUMS = (aten.add.Tensor, aten.sub.Tensor)
_SMALLEST = 1e-6  # scales outside of this and its inverse are left alone: constants are fp32


def has_caps(score: Any) -> bool:
    """Whether `fold_caps` may change a score_mod, as an operand."""
    graph = kernel_graph(score, SCORE).graph
    return bool(graph.find_nodes(op="call_function", target=aten.tanh.default))


def fold_caps(graph: fx.GraphModule) -> fx.GraphModule:
    """The same function, in which products of tanh and numbers are one operator.

    Args:
        graph: a score_mod; not changed.
    """
    if not graph.graph.find_nodes(op="call_function", target=aten.tanh.default):
        return graph
    copied = fx.Graph()
    copied.output(copied.graph_copy(graph.graph, {}))
    module = fx.GraphModule(graph, copied)
    for node in module.graph.find_nodes(op="call_function", target=aten.tanh.default):
        _fold(module.graph, node)
    module.graph.eliminate_dead_code()
    module.recompile()
    return module


def _fold(graph: fx.Graph, tanh: fx.Node) -> None:
    users = list(tanh.users)
    product, outer = (users[0], _factor(users[0], tanh)) if len(users) == 1 else (tanh, None)
    if outer is None:
        product, outer = tanh, 1.0
    value, inner = _split(tanh.args[0])
    if _dtype(product) != torch.float32 or _dtype(value) != torch.float32:
        return
    if not _SMALLEST < abs(inner) < 1 / _SMALLEST or not 0 < abs(outer) < _LARGEST:
        return
    if not _is_added(product):
        return
    scaled: Any = torch.ops.flexhop.scaled_tanh.default
    with graph.inserting_before(product):
        new = graph.call_function(scaled, (value, inner, outer))
    new.meta = dict(product.meta)
    product.replace_all_uses_with(new)


def _is_added(node: fx.Node) -> bool:
    """Whether a value is only added to the result, or subtracted."""
    return all(
        user.op == "output" or (user.target in _SUMS and not user.kwargs and _is_added(user))
        for user in node.users
    )


def _split(value: Any) -> tuple[Any, float]:
    """A product with a number as its two factors."""
    operands = value.args if isinstance(value, fx.Node) else ()
    for operand in operands:
        if isinstance(operand, fx.Node) and (factor := _factor(value, operand)) is not None:
            return operand, factor
    return value, 1.0


def _factor(node: fx.Node, operand: fx.Node) -> float | None:
    """The number that a node multiplies `operand` by; None: it does something else."""
    if node.kwargs or len(node.args) != 2 or _dtype(operand) != torch.float32:
        return None
    first, second = node.args
    if node.target is aten.mul.Tensor and operand in (first, second):
        number = second if first is operand else first
        return float(number) if _is_number(number) else None
    if node.target is aten.div.Tensor and first is operand and _is_number(second) and second:
        return 1.0 / float(second)
    return None


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _dtype(node: object) -> torch.dtype | None:
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return value.dtype if isinstance(value, torch.Tensor) else None
