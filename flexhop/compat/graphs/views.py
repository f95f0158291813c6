"""Inductor: the strides of views, and of buffers that have views.

A view is created with the buffer's strides at that time. Inductor (2.11 to 2.13, perhaps later)
does not fix them if it may pad the rows, and may choose another order in the end: the view then
reads wrong values. This takes a buffer with rows of more than 1024 elements, not a multiple of 32,
with a non-default dimension order, such as the per-token sums over heads in the backward pass of a
call with sinks.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch._inductor import ir
from torch._inductor.virtualized import V

__all__ = ["hold_strides", "starts_aligned", "with_dense_strides", "without_inlining"]

_MOST_IN_MASKS = 16  # operators of a mask's table that take as long as a read


def hold_strides() -> None:
    """From now on, fix the strides of every buffer that is viewed."""
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


def with_dense_strides(value: Any) -> Any:
    """`value`, whose dimensions of size 1 do not have stride 0.

    Inductor gives them that stride in a view of what it computes. Nothing is ever read by it, but
    a stride of 0 rules out bulk copies.
    """
    if not isinstance(value, ir.ReinterpretView):
        return value
    layout: Any = value.get_layout()
    strides = list(layout.stride)
    dense: Any = 1
    for axis in reversed(range(len(strides))):
        if layout.size[axis] == 1 and strides[axis] == 0:
            strides[axis] = dense
        dense = layout.size[axis] * strides[axis]
    if strides == list(layout.stride):
        return value
    return ir.ReinterpretView(
        data=value.data,
        layout=ir.FixedLayout(layout.device, layout.dtype, layout.size, strides, layout.offset),
    )


def _is_no_arithmetic(buffer: Any) -> bool:
    """Whether a buffer has branches, or is a mask that is cheaper to read than to compute."""
    loops = buffer.data
    if not isinstance(loops, ir.Loops):
        return False
    count = loops.inner_fn_opcount()
    is_long_mask = buffer.get_dtype() == torch.bool and count.num_ops > _MOST_IN_MASKS
    return "masked" in count.used_ops or is_long_mask


def without_inlining(value: Any) -> Any:
    """`value`, which kernels read.

    2.11 to 2.15: a loader of a buffer that reads nothing computes it again, for every score in a
    mod. Arithmetic may: a function of the distance is then computed once for a diagonal. What was
    concatenated has branches, which a mod cannot have. Long arithmetic of a mask is read.
    """
    data = value
    while isinstance(data, (ir.TensorBox, ir.StorageBox)):
        data = data.data
    if isinstance(data, ir.ComputedBuffer) and data.num_reads() == 0 and _is_no_arithmetic(data):
        return ir.ReinterpretView(data=ir.StorageBox(data), layout=data.get_layout())
    return value


def starts_aligned(value: Any, unit: int) -> bool:
    """Whether the first element of a realized tensor is known to be at a multiple of `unit` bytes.

    Inductor copies an input that is not, if those it was compiled for were.
    """
    first = value.get_layout().offset * value.get_dtype().itemsize
    is_copied = value.get_name() not in V.graph.unaligned_buffers
    return is_copied and V.graph.sizevars.statically_known_multiple_of(first, unit)
