"""Which tensors share memory. torch 2.11 to 2.15."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["begins_with"]


def begins_with(tensor: Tensor, part: Tensor) -> bool:
    """Whether `part` is a view of the first columns of `tensor`; both have as many dimensions."""
    sizes = zip(part.shape, part.stride(), tensor.stride(), strict=True)
    return (
        torch._C._is_alias_of(tensor, part)
        and tensor.dtype == part.dtype
        and tensor.storage_offset() == part.storage_offset()
        and all(size == 1 or mine == its for size, mine, its in sizes)
    )
