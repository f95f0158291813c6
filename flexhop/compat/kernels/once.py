"""A value that a function reads several times is computed once.

Inductor's rules inline a value where it is read. A chain such as `x = f(x, x)`, or a search that
halves a range twenty times, would grow with two or three to the power of its length.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch._inductor import ir
from torch._inductor.virtualized import V

__all__ = ["remembered"]


def remembered(value: Any) -> Any:
    """A lowered value, or several, whose elements are computed once in each place of a kernel."""
    if isinstance(value, (list, tuple)):
        return type(value)(map(remembered, value))
    if not isinstance(value, ir.TensorBox) or not isinstance(value.data, ir.StorageBox):
        return value
    computed = value.data.data
    if not isinstance(computed, ir.Pointwise):
        return value
    return ir.Pointwise.create(
        device=computed.get_device(), dtype=computed.get_dtype(),
        inner_fn=_once(computed.inner_fn), ranges=computed.get_size(),
    )  # fmt: skip


def _once(load: Callable[[Sequence[Any]], Any]) -> Callable[[Sequence[Any]], Any]:
    # Every trace of a function and every body of a kernel has a handler of its own.
    known: weakref.WeakKeyDictionary[Any, dict[Any, Any]] = weakref.WeakKeyDictionary()

    def element(index: Sequence[Any]) -> Any:
        of_handler = known.setdefault(V.get_ops_handler(), {})
        key = (*_scope(), *index)
        if key not in of_handler:
            of_handler[key] = load(index)
        return of_handler[key]

    return element


def _scope() -> tuple[Any, Any]:
    """The part of a kernel that is being written: a value of one branch is not seen in another."""
    return getattr(V.kernel, "compute", None), getattr(V.kernel, "_load_mask", None)
