"""Short constant tensors in the graph of a mod, as rows of numbers.

Operators that PyTorch writes in Python may bring such tensors. Tracers record them as attributes
of the graph, which kernels cannot read. torch 2.11 to 2.15.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.utils._python_dispatch import _disable_current_modes

from flexhop.compat.sizes import LONGEST_SUM

__all__ = ["spell_constants"]

aten = torch.ops.aten
_LIFTS = (aten.lift_fresh_copy.default, aten.lift_fresh.default)


def spell_constants(module: GraphModule) -> GraphModule:
    """Write the numbers of short constants into a graph, in place; return it."""
    changed = False
    for node in list(module.graph.nodes):
        if node.target in _LIFTS and (value := _constant_of(module, node.args[0])) is not None:
            with module.graph.inserting_before(node):
                node.replace_all_uses_with(_written(node, value))
            module.graph.erase_node(node)
            changed = True
    if changed:
        module.graph.eliminate_dead_code()
        module.recompile()
    return module


def _constant_of(module: GraphModule, node: Any) -> Tensor | None:
    """The tensor of an attribute, if it is short."""
    if not isinstance(node, Node) or node.op != "get_attr":
        return None
    value: Any = module
    for name in str(node.target).split("."):
        value = getattr(value, name)
    is_short = isinstance(value, Tensor) and 0 < value.numel() <= LONGEST_SUM
    return value if is_short and not value.is_complex() else None


def _written(node: Node, value: Tensor) -> Node:
    """The constant, as operators before `node`."""
    like: Tensor = node.meta["val"]
    form = {"dtype": value.dtype, "device": like.device}

    def call(operator: Any, args: tuple[Any, ...], shape: Sequence[int], **options: Any) -> Node:
        made = node.graph.call_function(operator, args, options)
        made.meta["val"] = like.new_empty(shape)
        return made

    with _disable_current_modes():  # the constant is a real tensor
        found = value.flatten().tolist()
    shape = list(value.shape)
    numbers = [call(aten.full.default, ([], number), [], **form) for number in found]
    if not shape:
        return numbers[0]
    row = call(aten.cat.default, (
        [call(aten.unsqueeze.default, (number, 0), [1]) for number in numbers],
    ), [len(numbers)])  # fmt: skip
    return row if len(shape) == 1 else call(aten.view.default, (row, shape), shape)
