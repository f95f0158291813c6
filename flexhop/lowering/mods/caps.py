"""Soft caps in forward kernels.

`cap * tanh(score / cap)` is one function of the score: its factors are folded into the constants
of tanh. Backward kernels need tanh itself for its derivative, and keep it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from flexhop.lowering.mods.analysed import SCORE, kernel_graph
from flexhop.primitives.tanh import scaled_tanh

aten = torch.ops.aten
_SCALED = scaled_tanh._opoverload
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
    if (inner, outer) == (1.0, 1.0) or not _SMALLEST < abs(inner) < 1 / _SMALLEST:
        return
    with graph.inserting_before(product):
        new = graph.call_function(_SCALED, (value, inner, outer))
    new.meta = dict(product.meta)
    product.replace_all_uses_with(new)


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
