"""Errors of a lowering that reach the caller unchanged: the compiled graph raises them.

Inductor wraps every exception of a lowering, so the caller's `except` would not catch it.
"""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable
from typing import Any

import torch
from torch._inductor.lowering import fallback_handler
from torch.utils import _pytree as pytree

from flexhop.compat.kernels import inductor
from flexhop.errors import FlexhopError

__all__ = ["raised_by_graph"]


@torch.library.custom_op("flexhop::refuse", mutates_args=())
def _refuse(like: torch.Tensor, error: str) -> torch.Tensor:
    raise pickle.loads(bytes.fromhex(error))


@_refuse.register_fake
def _(like: torch.Tensor, error: str) -> torch.Tensor:
    return torch.empty_like(like)


def raised_by_graph(lower: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator of a lowering: the compiled graph raises its deliberate errors instead.

    An ahead-of-time compiled graph has no Python to raise it from; there Inductor's wrapper stays,
    which names our class and its message.
    """

    @functools.wraps(lower)
    def wrapped(*operands: Any) -> Any:
        try:
            return lower(*operands)
        except FlexhopError as error:
            if inductor.V.graph.cpp_wrapper:
                raise
            return pytree.tree_map(functools.partial(_refusal, error), inductor.output_meta())

    return wrapped


def _refusal(error: FlexhopError, like: Any) -> Any:
    """A result like the operator's that raises `error` when it is used."""
    if not isinstance(like, torch.Tensor):
        return like
    size, stride = inductor.as_expressions(like.shape), inductor.as_expressions(like.stride())
    empty = inductor.empty(size, stride, like.dtype, like.device)
    text = pickle.dumps(error.with_traceback(None)).hex()
    return fallback_handler(torch.ops.flexhop.refuse.default, add_to_fallback_set=False)(
        empty, text
    )
