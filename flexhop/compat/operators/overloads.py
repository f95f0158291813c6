"""Names of operators, whether functions of them write to their inputs, and those that are others.

PyTorch's names are the same in torch 2.11 to 2.15.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch._higher_order_ops.utils import _has_potential_branch_input_mutation
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensorMode
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode

from flexhop.compat.operators.hop import Operator

__all__ = ["has_input_mutation", "operator_name", "register_composite"]


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


def operator_name(target: Any) -> str:
    """namespace::name of an operator, without its overload; empty for other functions.

    Graphs of Dynamo call the packet of all overloads, graphs of make_fx one overload.
    """
    if isinstance(target, OpOverloadPacket):
        return target._qualified_op_name
    if isinstance(target, OpOverload):
        return target.name().partition(".")[0]
    if isinstance(target, HigherOrderOperator):
        return f"{target.namespace}::{target.name()}"
    return ""


def register_composite(op: Operator) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator: every tracer records an operator as the operators that the rule calls."""

    def register(rule: Callable[..., Any]) -> Callable[..., Any]:
        def record(mode: Any, *operands: Any) -> Any:
            with mode:
                return rule(*operands)

        for kind in (FakeTensorMode, FunctionalTensorMode, ProxyTorchDispatchMode):
            op.py_impl(kind)(record)
        return rule

    return register
