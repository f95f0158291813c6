"""Save values of our autograd functions between forward and derivatives."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

_TENSOR = object()  # placeholder for a tensor


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
