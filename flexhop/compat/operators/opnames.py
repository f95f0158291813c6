"""Names of operators, as graphs and modes meet them.

The names are the same in torch 2.11 to 2.15.
"""

from __future__ import annotations

from typing import Any

from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket

__all__ = ["operator_name"]


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
