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
from torch.fx import Graph

from flexhop.compat.mods.location import line_of
from flexhop.errors import UnsupportedFeatureError

__all__ = ["deriving", "note_own_backward"]

_DERIVES: ContextVar[bool] = ContextVar("flexhop_derives", default=False)


@contextlib.contextmanager
def deriving() -> Iterator[None]:
    """While a mod is traced whose derivatives follow: refuse functions with their own backward."""
    token = _DERIVES.set(True)
    try:
        yield
    finally:
        _DERIVES.reset(token)


def note_own_backward(graph: Graph) -> None:
    """Let the functions with their own backward in a mod's graph know `deriving`."""
    for node in graph.find_nodes(op="call_function", target=autograd_function_apply):
        node.target = _apply
        node.kwargs = {**node.kwargs, "location": line_of(node)}


def _apply(*operands: Any, location: str, **keywords: Any) -> Any:
    if _DERIVES.get():
        raise UnsupportedFeatureError(
            feature=f"A gradient through the torch.autograd.Function at {location}",
            reason="kernels differentiate operators, and would ignore its backward",
            hint="Write g(x) + (f(x) - g(x)).detach(), with f's value and g's gradient",
        )  # fmt: skip
    return autograd_function_apply(*operands, **keywords)
