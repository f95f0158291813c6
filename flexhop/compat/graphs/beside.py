"""Inductor: values that one kernel computes together, although they have nothing in common.

Inductor fuses two computations if one reads what the other computes, or if both read the same
memory. What a value reads without using it is dropped when Triton compiles the kernel. Names are
the same in torch 2.11 to 2.15.
"""

from __future__ import annotations

from typing import Any

from torch._inductor import ir
from torch._inductor.virtualized import ops

__all__ = ["beside"]


def beside(value: Any, other: Any) -> Any:
    """IR of `value`, computed by the kernel that computes `other`, if Inductor agrees.

    Args:
        value: IR with the sizes of `other`.
        other: the result of a reduction, or the elements that one reads.
    """
    load, load_other = value.make_loader(), other.make_loader()

    def inner(index: Any) -> Any:
        # A choice between equal values: Inductor keeps it, Triton does not.
        found, read = load(index), load_other(index)
        return ops.where(ops.lt(read, read), found, found)

    return ir.Pointwise.create(
        device=value.get_device(), dtype=value.get_dtype(), inner_fn=inner, ranges=value.get_size()
    )
