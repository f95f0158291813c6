"""Which tensors share memory. torch 2.11 to 2.15."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor

__all__ = ["begins_with", "shares_memory"]


def begins_with(tensor: Tensor, part: Tensor) -> bool:
    """Whether `part` is a view of the first columns of `tensor`; both have as many dimensions."""
    sizes = zip(part.shape, part.stride(), tensor.stride(), strict=True)
    return (
        torch._C._is_alias_of(tensor, part)
        and tensor.dtype == part.dtype
        and tensor.storage_offset() == part.storage_offset()
        and all(size == 1 or mine == its for size, mine, its in sizes)
    )


def shares_memory(tensor: Tensor, other: Tensor) -> bool:
    """Whether two tensors, perhaps inside wrappers of torch.func, have the same storage."""
    return torch._C._is_alias_of(_bottom(tensor), _bottom(other))


def _bottom(tensor: Tensor) -> Tensor:
    while is_functorch_wrapped_tensor(tensor):
        tensor = get_unwrapped(tensor)
    return tensor
