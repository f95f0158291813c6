"""Mark dynamic sizes for Dynamo, before it finds out by recompiling. torch 2.11 to 2.15."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor
from torch._dynamo import maybe_mark_dynamic

__all__ = ["mark_dynamic"]


def mark_dynamic(tensor: Tensor, dims: Iterable[int]) -> None:
    """Compile for any size of these dimensions except 1; code that needs one size may
    specialise."""
    for dim in dims:
        if tensor.size(dim) != 1:
            maybe_mark_dynamic(tensor, dim)
