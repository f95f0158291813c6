"""Whether a function writes to its inputs. The names are the same in torch 2.11 to 2.15."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch._higher_order_ops.utils import _has_potential_branch_input_mutation
from torch._ops import OpOverload
from torch.fx import GraphModule, Node

__all__ = ["has_input_mutation"]


def has_input_mutation(
    function: Callable[..., Any], inputs: Sequence[Any], pre_dispatch: bool
) -> bool:
    """Whether `function` writes to one of its inputs."""
    if isinstance(function, GraphModule) and all(map(_writes_nothing, function.graph.nodes)):
        return False
    return _has_potential_branch_input_mutation(function, list(inputs), pre_dispatch)


def _writes_nothing(node: Node) -> bool:
    """Whether the schema of an operator, as graphs have them after a trace, says so."""
    if isinstance(node.target, OpOverload):
        return not node.target._schema.is_mutable
    return node.op in ("placeholder", "get_attr", "output")
