"""Mods for derivatives of any order: replace operators that PyTorch differentiates only once."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from flexhop.errors import UnsupportedFeatureError

_PLAIN = {"flexhop::tanh_approx": torch.ops.aten.tanh.default}
# Operators on positions, which have no derivative.
_POSITIONS = ("flexhop::bounded",)
_SPACES = ("aten", "prims", "_operator")


def smooth(mod: Any) -> Any:
    """The same mod, made of operators that have derivatives of every order and mode.

    A custom operator has at most a gradient; in forward mode, PyTorch silently returns a tangent
    of 0 for it.

    Raises:
        UnsupportedFeatureError: the mod calls a third-party custom operator.
    """
    if not isinstance(mod, fx.GraphModule):
        return mod
    custom = [node for node in mod.graph.nodes if _is_custom(node)]
    if not custom:
        return mod
    graph, known = fx.Graph(), dict[fx.Node, fx.Node]()
    graph.output(graph.graph_copy(mod.graph, known))
    for node in custom:
        name = _name_of(node)
        if name not in _PLAIN:
            raise UnsupportedFeatureError(
                feature=f"This derivative of a score_mod that calls {name}",
                reason="a custom operator has only a first-order gradient",
                mend="Write it with PyTorch's own operators instead",
            )
        known[node].target = _PLAIN[name]
    return fx.GraphModule(mod, graph)


def _name_of(node: fx.Node) -> str:
    target: Any = node.target
    return target.name().rpartition(".")[0] or target.name()


def _is_custom(node: fx.Node) -> bool:
    space = getattr(node.target, "namespace", "aten")
    is_call = node.op == "call_function" and space not in _SPACES
    return is_call and not _name_of(node).startswith(_POSITIONS)
