"""Autograd functions: what they save, applying them with less ado; checkpointing, autocast."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

__all__ = [
    "apply_plain", "cast", "checkpointed", "dtype_under", "form_of", "restore", "save",
    "wanted_dtype", "without_autocast",
]  # fmt: skip

_TENSOR = object()  # placeholder for a tensor


def apply_plain(function: type[torch.autograd.Function], *inputs: Any) -> Any:
    """`function.apply` where no transform is active and no input is a transform's tensor.

    The method of torch 2.11 to 2.15 looks for both at every call. It takes three microseconds.
    """
    return super(torch.autograd.Function, function).apply(*inputs)


def checkpointed(function: Callable[..., Any], *inputs: Any) -> Any:
    """`function(*inputs)`, computed again in the backward pass.

    2.11 and 2.12: an error in the function leaves checkpoint's hooks active while its traceback
    lives. Later operations then save their tensors in its place, and fail in their backward pass.
    So checkpoint does not see an error of the first run. The second runs in the backward pass.
    """
    failed: list[BaseException] = []
    is_second = False

    def run(*inputs: Any) -> Any:
        try:
            return function(*inputs)
        except BaseException as error:
            if is_second:
                raise
            failed.append(error)
            return None

    result = checkpoint(run, *inputs, use_reentrant=False)
    is_second = True
    if failed:
        raise failed[0]
    return result


# Autocast converts these. It leaves fp64 alone, as it does for PyTorch's own operators.
_CAST = (torch.float16, torch.bfloat16, torch.float32)


def wanted_dtype(device: str) -> torch.dtype | None:
    """The dtype that autocast converts operands on this device type to; None outside autocast."""
    # "meta" has no autocast and cannot answer the second question. Dynamo (2.11) cannot trace the
    # first one.
    has_autocast = torch.compiler.is_dynamo_compiling() or torch.amp.is_autocast_available(device)
    if not has_autocast or not torch.is_autocast_enabled(device):
        return None
    return torch.get_autocast_dtype(device)


def dtype_under(wanted: torch.dtype | None, dtype: torch.dtype) -> torch.dtype:
    """The dtype that an operand has after autocast to `wanted`."""
    return dtype if wanted is None or dtype not in _CAST else wanted


def cast(tensor: Tensor, wanted: torch.dtype) -> Tensor:
    """Convert an operand as autocast to `wanted` does."""
    return tensor.to(dtype_under(wanted, tensor.dtype))


def without_autocast(device: str) -> contextlib.AbstractContextManager[object]:
    """A region in which operations keep the dtypes of their operands."""
    if wanted_dtype(device) is None:
        return contextlib.nullcontext()
    return torch.autocast(device, enabled=False)


def save(ctx: Any, values: Any) -> None:
    """Save tensors with save_for_backward and everything else (ints, SymInts, strings) as is.

    Args:
        ctx: the function's context.
        values: nested tuples; other containers must hold no tensors.
    """
    tensors: list[Tensor] = []
    ctx.form = _without_tensors(values, tensors)
    ctx.save_for_backward(*tensors)
    ctx.save_for_forward(*tensors)
    ctx.set_materialize_grads(False)


def form_of(values: Any) -> Any:
    """What `save` keeps besides tensors."""
    return _without_tensors(values, [])


def restore(ctx: Any) -> Any:
    """Restore the values that `save` saved."""
    return _with_tensors(ctx.form, iter(ctx.saved_tensors))


def _without_tensors(value: Any, tensors: list[Tensor]) -> Any:
    if isinstance(value, Tensor):
        tensors.append(value)
        return _TENSOR
    if isinstance(value, tuple):
        return _like(value, [_without_tensors(item, tensors) for item in value])
    return value


def _with_tensors(form: Any, tensors: Iterator[Tensor]) -> Any:
    if form is _TENSOR:
        return next(tensors)
    if isinstance(form, tuple):
        return _like(form, [_with_tensors(item, tensors) for item in form])
    return form


def _like(value: tuple[Any, ...], items: list[Any]) -> Any:
    """A tuple of the class of `value`, which may be a named tuple."""
    return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
