"""Inductor: views of buffers whose strides are still open keep to the strides that they saw.

A view is made with the strides that a buffer has then. Inductor (2.11 to 2.13, perhaps later) does
not hold the buffer to them if it wants to pad its rows, and may choose another order at the end:
then the view reads other numbers. It takes a buffer with rows of more than 1024 elements, no
multiple of 32, whose natural order is another one, such as the sums over heads that lie by token
in the backward pass of a call with sinks.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from torch._inductor import ir

__all__ = ["hold_strides"]


def hold_strides() -> None:
    """Fix the strides of every buffer that is viewed, from now on."""
    made = ir.View.create.__func__  # type: ignore[attr-defined]
    if getattr(made, "holds_strides", False):
        return

    @functools.wraps(made)
    def create(cls: Any, x: Any, new_size: Sequence[Any]) -> Any:
        view = made(cls, x, new_size)
        if isinstance(view, ir.ReinterpretView):
            _hold(view.data)
        return view

    create.holds_strides = True  # type: ignore[attr-defined]
    ir.View.create = classmethod(create)  # type: ignore[assignment,method-assign]


def _hold(data: Any) -> None:
    while isinstance(data, (ir.TensorBox, ir.StorageBox)):
        data = data.data
    if isinstance(data, ir.Buffer) and isinstance(data.layout, ir.FlexibleLayout):
        data.freeze_layout()
