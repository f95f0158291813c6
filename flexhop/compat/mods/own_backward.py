"""A `torch.autograd.Function` inside a score_mod, as Dynamo writes it. torch 2.11 to 2.15.

Derivatives of a mod follow the operators of its graph. A trace into operators leaves those of the
function's forward, without gradients, and its backward would be lost: gradients would be 0. So a
trace that reverse mode differentiates next keeps the function's value beside what it was computed
from, as a call whose gradient is that of the function. Other derivatives refuse such functions.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch._functorch.autograd_function import autograd_function_apply
from torch.fx import Graph, GraphModule, Interpreter

from flexhop.compat.mods.location import line_of
from flexhop.errors import UnsupportedFeatureError

__all__ = [
    "at_once",
    "deriving",
    "drop_own_gradients",
    "has_own_backward",
    "is_refused_at_once",
    "note_own_backward",
    "own_backward",
    "place_own_gradients",
    "refuse_own_backward",
    "trace_form",
]

_MARK = "flexhop_own_backward"  # on functions with their own gradient, and graphs that had some
_Kept = list[Callable[..., Tensor]]
# While a mod is traced whose derivatives follow: the functions of which the trace keeps the
# backward; None if it refuses them.
_DERIVES: ContextVar[tuple[_Kept | None] | None] = ContextVar("flexhop_derives", default=None)
_AT_ONCE: ContextVar[bool] = ContextVar("flexhop_derives_at_once", default=False)


def deriving(*, in_reverse: bool) -> contextlib.AbstractContextManager[None]:
    """While a mod is traced whose derivatives follow: keep the backward of functions that have
    their own if derivatives go `in_reverse`, and otherwise refuse such functions."""
    return _holding(_DERIVES, ([] if in_reverse else None,))


def at_once(is_deriving: bool) -> contextlib.AbstractContextManager[None]:
    """While Dynamo traces mods for a call of which a transform takes derivatives: refuse such
    functions at their call. The transform does not show in their arguments, which are stand-ins.
    """
    return _holding(_AT_ONCE, is_deriving)


@contextlib.contextmanager
def _holding(variable: ContextVar[Any], value: Any) -> Iterator[None]:
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def is_refused_at_once() -> bool:
    """Whether `at_once` is active."""
    return _AT_ONCE.get()


def has_own_backward(function: Any) -> bool:
    """Whether a mod's graph, as Dynamo wrote it, has functions with their own backward."""
    if not isinstance(function, GraphModule):
        return False
    return bool(function.graph.find_nodes(op="call_function", target=_apply))


def trace_form(function: Any) -> str:
    """What a trace of a mod's graph would now do with such functions; empty without any."""
    state = _DERIVES.get()
    if state is None or not has_own_backward(function):
        return ""
    return "refuse" if state[0] is None else "keep"


def note_own_backward(graph: Graph) -> None:
    """Let the functions with their own backward in a mod's graph know `deriving`."""
    for node in graph.find_nodes(op="call_function", target=autograd_function_apply):
        node.target = _apply
        # 2.11 appends what a forward computes on the way to its results.
        is_single = not any(user.args[1] for user in node.users if user.users)
        node.kwargs = {**node.kwargs, "location": line_of(node), "is_single": is_single}


def _apply(
    forward: Any, backward: Any, *operands: Any, location: str, is_single: bool, **keywords: Any
) -> Any:
    state = _DERIVES.get()
    if state is None:
        return autograd_function_apply(forward, backward, *operands, **keywords)
    if state[0] is None:
        raise own_backward(location)
    results, saved = Interpreter(forward).run(*operands)
    value, *others = results
    is_kept = all(isinstance(s, (Tensor, int, float)) for s in saved)
    if not (is_single and isinstance(value, Tensor) and is_kept):
        raise own_backward(location)
    form = (*[0.0] * len(others), *saved)  # nobody uses the others
    state[0].append(_own_gradient_of(backward, operands, form, location))
    read, kept = ([x for x in given if isinstance(x, Tensor)] for given in (operands, saved))
    found = torch.ops.flexhop.own_gradient(value, read, kept, len(state[0]) - 1)
    return (found, *others)


@torch.library.custom_op("flexhop::own_gradient", mutates_args=())
def _own_gradient(value: Tensor, read: list[Tensor], saved: list[Tensor], number: int) -> Tensor:
    """In a trace, until `place_own_gradients`: the value of a function with its own backward."""
    return value.clone()


@_own_gradient.register_fake
def _(value: Tensor, read: list[Tensor], saved: list[Tensor], number: int) -> Tensor:
    return torch.empty_like(value)


def _own_gradient_of(
    backward: GraphModule, operands: Sequence[Any], more: Sequence[Any], location: str
) -> Callable[..., Tensor]:
    """A function (value, read, kept) -> value; `backward` computes the gradients of `read`.

    more: what `backward` takes behind the gradient of value: `kept`, and numbers.
    """
    is_read = [isinstance(x, Tensor) for x in operands]
    # Tensors of one trace have no place in the next.
    form = [None if isinstance(x, Tensor) else x for x in more]

    class OwnGradient(torch.autograd.Function):
        @staticmethod
        def forward(value: Tensor, *tensors: Tensor) -> Tensor:
            return value.view_as(value)

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            ctx.save_for_backward(*inputs[1 + sum(is_read) :])

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            kept = iter(ctx.saved_tensors)
            found = Interpreter(backward).run(
                grad, *(next(kept) if x is None else x for x in form)
            )
            found = [g for g, is_tensor in zip(found, is_read, strict=True) if is_tensor]
            return (None, *found, *[None] * len(ctx.saved_tensors))

    def own_gradient(value: Tensor, read: Sequence[Tensor], kept: Sequence[Tensor]) -> Tensor:
        return OwnGradient.apply(value, *read, *kept)  # pyright: ignore

    setattr(own_gradient, _MARK, location)
    return own_gradient


def place_own_gradients(graph: GraphModule) -> None:
    """Let a graph, traced under `deriving`, call what has its own gradient."""
    operator = torch.ops.flexhop.own_gradient.default
    nodes = graph.graph.find_nodes(op="call_function", target=operator)
    for node in nodes:
        state = _DERIVES.get()
        assert state is not None and state[0] is not None
        *operands, number = node.args
        node.args = tuple(operands)
        node.target = state[0][number]
    if nodes:
        graph.recompile()


def drop_own_gradients(graph: GraphModule) -> None:
    """Leave a graph the values alone. It remembers that it has no other derivatives."""
    nodes = [n for n in graph.graph.nodes if n.op == "call_function" and hasattr(n.target, _MARK)]
    for node in nodes:
        node.replace_all_uses_with(node.args[0])
        graph.graph.erase_node(node)
    if nodes:
        setattr(graph, _MARK, getattr(nodes[0].target, _MARK))
        graph.recompile()


def refuse_own_backward(function: Any) -> None:
    """Refuse derivatives of a mod whose first ones are a function's own."""
    if hasattr(function, _MARK):
        raise own_backward(getattr(function, _MARK))


def own_backward(location: str) -> UnsupportedFeatureError:
    """The error of other derivatives of such a function than its own."""
    return UnsupportedFeatureError(
        feature=f"This derivative of the torch.autograd.Function at {location}",
        reason="kernels differentiate operators, and know of its backward in reverse mode alone, "
        "once, and if it has one result",
        hint="Write g(x) + (f(x) - g(x)).detach(), with f's value and g's derivatives",
    )  # fmt: skip
