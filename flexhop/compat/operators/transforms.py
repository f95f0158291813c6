"""Rules of an operator under torch.func's transforms and forward-mode autograd.

PyTorch's own helper for operators that are autograd functions passes the *function* to the next
transform. Here the next transform sees the operator itself, so its rules apply at each level. All
names below exist with these signatures on torch 2.11 to 2.15.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C import DispatchKey, DispatchKeySet
from torch._C._functorch import (
    TransformType,
    _unwrap_for_grad,
    _wrap_for_grad,
    get_interpreter_stack,
    get_unwrapped,
    is_functorch_wrapped_tensor,
)
from torch._functorch import eager_transforms
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad
from torch.autograd.forward_ad import _set_fwd_grad_enabled
from torch.autograd.function import _SingleLevelFunction
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

__all__ = [
    "Pushed",
    "above_autograd",
    "dual_results",
    "has_tangents",
    "is_deriving",
    "is_forward_mode",
    "is_tracked",
    "jvp",
    "outside",
    "register_constant",
    "register_grad",
    "register_jvp",
    "reshaped",
    "without_tangents",
    "write_zeros",
]

_AUTOGRAD = (
    DispatchKey.AutogradCPU, DispatchKey.AutogradCUDA, DispatchKey.AutogradMeta,
    DispatchKey.AutogradOther, DispatchKey.AutogradFunctionality, DispatchKey.ADInplaceOrView,
)  # fmt: skip


# As it is before anything is dispatched: this module is imported with flexhop.
_INCLUDED = torch._C._dispatch_tls_local_include_set()
_EXCLUDED = torch._C._dispatch_tls_local_exclude_set()


@contextlib.contextmanager
def outside() -> Iterator[None]:
    """Dispatch as outside of all operators, without the modes around the caller.

    Compiled code runs inside an autograd function, where torch.vmap does not work.
    """
    with torch._C._ForceDispatchKeyGuard(_INCLUDED, _EXCLUDED), _disable_current_modes():
        yield


@contextlib.contextmanager
def above_autograd() -> Iterator[None]:
    """Make code inside differentiable, although we are below the autograd keys.

    The transforms of torch.func record with autograd's own kernels.
    """
    included = torch._C._dispatch_tls_local_include_set()
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in _AUTOGRAD:
        excluded = excluded - DispatchKeySet(key)
    with torch._C._ForceDispatchKeyGuard(included, excluded):
        yield


def jvp(
    function: Callable[..., Any], primals: tuple[Tensor, ...], tangents: tuple[Tensor, ...]
) -> tuple[Any, Any]:
    """torch.func.jvp, also where forward mode is on already.

    A graph that Dynamo wrote opens the only level without torch.func's knowledge.
    """
    # A tangent is written to memory with the primal's layout, which must not be expanded.
    primals, tangents = (tuple(map(_unexpanded, both)) for both in (primals, tangents))
    if eager_transforms.JVP_NESTING > 0 or not is_forward_mode():
        return torch.func.jvp(function, primals, tangents)
    known = forward_ad._current_level
    eager_transforms.JVP_NESTING, forward_ad._current_level = 1, 0
    try:
        return torch.func.jvp(function, primals, tangents)
    finally:
        eager_transforms.JVP_NESTING, forward_ad._current_level = 0, known


def _unexpanded(tensor: Tensor) -> Tensor:
    return tensor.clone() if 0 in tensor.stride() else tensor


def is_forward_mode() -> bool:
    """Whether forward mode is active. Python's own count misses levels that graphs open."""
    try:
        level = torch._C._enter_dual_level()
    except RuntimeError:  # there is one level only
        return True
    torch._C._exit_dual_level(level=level)
    return False


def is_deriving() -> bool:
    """Whether a transform takes derivatives: torch.func's grad or jvp, or forward mode."""
    kinds = (TransformType.Grad, TransformType.Jvp)
    return is_forward_mode() or any(i.key() in kinds for i in get_interpreter_stack() or ())


@contextlib.contextmanager
def without_tangents() -> Iterator[None]:
    """Let Dynamo overlook tangents. 2.15 refuses a function that reads a tensor with one.

    For graphs whose operands are passed on with their tangents. Dynamo asks PyTorch's Python code,
    which finds none outside of a level.
    """
    level, forward_ad._current_level = forward_ad._current_level, -1
    try:
        yield
    finally:
        forward_ad._current_level = level


def is_tracked(value: Any) -> bool:
    """Whether a value is a tensor whose gradient is wanted, at any level of torch.func.

    Each level wraps every tensor that it meets; the outermost wrapper speaks for its own alone.
    """
    while isinstance(value, Tensor):
        if value.requires_grad:
            return True
        if not is_functorch_wrapped_tensor(value):
            return False
        value = get_unwrapped(value)
    return False


def register_grad(
    op: Any,
    function: type[torch.autograd.Function],
    inputs: Callable[..., tuple[Any, ...]],
    nested: Callable[[Sequence[Any]], Any] = tuple,
) -> None:
    """torch.func.grad: apply `function`, in setup_context form, to inputs(*operands).

    nested(results) builds the operator's results.
    """

    def rule(interpreter: Any, *operands: Any) -> Any:
        generated, values = _at_level(interpreter, function), inputs(*operands)
        with enable_single_level_autograd_function():
            return nested(generated.apply(*values))

    op.py_impl(TransformType.Grad)(rule)


def _at_level(interpreter: Any, function: type[torch.autograd.Function]) -> Any:
    """`function` for the innermost transform; its forward meets the next one."""
    level = interpreter.level()

    def forward(*inputs: Any) -> Any:
        # A function's forward runs without gradients; the next transform may need them.
        with torch.enable_grad(), _set_fwd_grad_enabled(True), interpreter.lower():
            results = function.forward(*_unwrapped(inputs, level))
        return _wrapped(results, level)

    rules = {"forward": forward, "setup_context": function.setup_context}
    rules["backward"] = function.backward
    methods = {name: staticmethod(rule) for name, rule in rules.items()}
    return type(f"{function.__name__}AtLevel", (_SingleLevelFunction,), methods)


def _unwrapped(values: Any, level: int) -> Any:
    return pytree.tree_map_only(Tensor, lambda t: _unwrap_for_grad(t, level), values)


def _wrapped(values: Any, level: int) -> Any:
    return pytree.tree_map_only(Tensor, lambda t: _wrap_for_grad(t, level), values)


class Pushed(NamedTuple):
    """Flat results of an operator, and a tangent of each; None for a constant."""

    results: Sequence[Tensor]
    tangents: Sequence[Tensor | None]


# push(operands, tangents) -> Pushed; `tangents` has the leaves of `operands`, in their order.
Push = Callable[[tuple[Any, ...], Sequence[Tensor | None]], Pushed]


def register_jvp(op: Any, push: Push, nested: Callable[[Sequence[Any]], Any] = tuple) -> None:
    """torch.func.jvp: compute results and their tangents by `push`, at the next level."""

    def rule(interpreter: Any, *operands: Any) -> Any:
        level = interpreter.level()
        primals, tangents = _split(operands)
        values = _unwrapped(primals, level)
        with interpreter.lower():
            if all(tangent is None for tangent in tangents):  # a constant at this level
                return op(*values)
            pushed = push(values, _unwrapped(tangents, level))
        return nested(_duals(Pushed(*_wrapped(tuple(pushed), level))))

    op.py_impl(TransformType.Jvp)(rule)


def register_constant(op: Any) -> None:
    """torch.func.grad and jvp of an operator whose results have neither gradient nor tangent."""

    def rule(interpreter: Any, *operands: Any) -> Any:
        primals, _ = _split(operands)
        values = _unwrapped(primals, interpreter.level())
        with interpreter.lower():
            return op(*values)

    for transform in (TransformType.Grad, TransformType.Jvp):
        op.py_impl(transform)(rule)


def _split(operands: tuple[Any, ...]) -> tuple[tuple[Any, ...], list[Tensor | None]]:
    """Operands without tangents, and the tangents of their leaves."""
    flat, structure = pytree.tree_flatten(operands)
    tangents: list[Tensor | None] = [None] * len(flat)
    for position, leaf in enumerate(flat):
        if isinstance(leaf, Tensor):
            flat[position], tangents[position] = forward_ad.unpack_dual(leaf, level=0)
    return pytree.tree_unflatten(flat, structure), tangents


def _duals(pushed: Pushed) -> tuple[Tensor, ...]:
    return tuple(
        result if tangent is None else forward_ad.make_dual(result, tangent, level=0)
        for result, tangent in zip(pushed.results, pushed.tangents, strict=True)
    )


def has_tangents(operands: tuple[Any, ...]) -> bool:
    """Whether forward mode differentiates an operand, outside torch.func."""
    if not (torch._C._is_fwd_grad_enabled() and is_forward_mode()):
        return False
    return any(tangent is not None for tangent in _split(operands)[1])


def dual_results(push: Push, operands: tuple[Any, ...]) -> tuple[Tensor, ...]:
    """Results with tangents, of operands that have some and need no gradient."""
    primals, tangents = _split(operands)
    return _duals(push(primals, tangents))


def reshaped(row: Tensor, sizes: Sequence[int]) -> Tensor:
    """A row in other sizes: 2.11 and 2.13 make a view of a tangent of 0 on device "meta"."""
    return torch.ops.aten._unsafe_view.default(row.contiguous(), sizes)


def write_zeros(graph: torch.fx.GraphModule) -> None:
    """Forward mode has a special tensor for zero tangents; kernels need numbers."""
    zeros = torch.ops.aten._efficientzerotensor.default
    for node in graph.graph.find_nodes(op="call_function", target=zeros):
        node.target = torch.ops.aten.full.default
        node.args = (node.args[0], 0.0)
        node.kwargs = {k: v for k, v in node.kwargs.items() if k in ("dtype", "device")}
    graph.recompile()
