"""A `torch.autograd.Function` inside a score_mod, as Dynamo writes it. torch 2.11 to 2.15.

Derivatives of a mod follow the operators of its graph. A trace into operators leaves those of the
function's forward, without gradients, and its backward would be lost: gradients would be 0.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

from torch._functorch.autograd_function import autograd_function_apply
from torch.fx import Graph, GraphModule

from flexhop.compat.mods.location import line_of
from flexhop.errors import UnsupportedFeatureError

__all__ = [
    "at_once",
    "deriving",
    "is_refused",
    "is_refused_at_once",
    "note_own_backward",
    "own_backward",
]

_DERIVES: ContextVar[bool] = ContextVar("flexhop_derives", default=False)
_AT_ONCE: ContextVar[bool] = ContextVar("flexhop_derives_at_once", default=False)


def deriving() -> contextlib.AbstractContextManager[None]:
    """While a mod is traced whose derivatives follow: refuse functions with their own backward."""
    return _holding(_DERIVES, True)


def at_once(is_deriving: bool) -> contextlib.AbstractContextManager[None]:
    """While Dynamo traces mods for a call of which a transform takes derivatives: refuse such
    functions at their call. The transform does not show in their arguments, which are stand-ins.
    """
    return _holding(_AT_ONCE, is_deriving)


@contextlib.contextmanager
def _holding(variable: ContextVar[bool], value: bool) -> Iterator[None]:
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def is_refused_at_once() -> bool:
    """Whether `at_once` is active."""
    return _AT_ONCE.get()


def is_refused(function: Any) -> bool:
    """Whether a trace of a mod's graph would now refuse it."""
    if not (_DERIVES.get() and isinstance(function, GraphModule)):
        return False
    return bool(function.graph.find_nodes(op="call_function", target=_apply))


def note_own_backward(graph: Graph) -> None:
    """Let the functions with their own backward in a mod's graph know `deriving`."""
    for node in graph.find_nodes(op="call_function", target=autograd_function_apply):
        node.target = _apply
        node.kwargs = {**node.kwargs, "location": line_of(node)}


def _apply(*operands: Any, location: str, **keywords: Any) -> Any:
    if _DERIVES.get():
        raise own_backward(location)
    return autograd_function_apply(*operands, **keywords)


def own_backward(location: str) -> UnsupportedFeatureError:
    """The error of a derivative of such a function."""
    return UnsupportedFeatureError(
        feature=f"A gradient through the torch.autograd.Function at {location}",
        reason="kernels differentiate operators, and would ignore its backward",
        hint="Write g(x) + (f(x) - g(x)).detach(), with f's value and g's gradient",
    )  # fmt: skip
