"""Operators that never reach a compiler: tracers record their decomposition.

All names below exist with these signatures on torch 2.11 to 2.15.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensorMode
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode

from flexhop.compat.operators.hop import Operator

__all__ = ["register_composite"]


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
