"""Memory of tensors: which share it, and how nested ones divide it. torch 2.11 to 2.15."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor

__all__ = [
    "begins_with", "below_functorch", "is_jagged", "ragged_dim", "shares_memory", "token_count",
]  # fmt: skip


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
    return torch._C._is_alias_of(below_functorch(tensor), below_functorch(other))


def below_functorch(value: Any) -> Any:
    """The tensor inside torch.func's wrappers; other values as they are."""
    while isinstance(value, Tensor) and is_functorch_wrapped_tensor(value):
        value = get_unwrapped(value)
    return value


def is_jagged(tensor: Tensor) -> bool:
    """Whether a tensor is nested, of layout torch.jagged."""
    return tensor.is_nested and tensor.layout == torch.jagged


def ragged_dim(tensor: Tensor) -> int:
    """The ragged dimension of a jagged nested tensor, counted with the batch.

    `_ragged_idx` is an int that Dynamo reads as a constant.
    """
    jagged: Any = tensor
    return int(jagged._ragged_idx)


def token_count(tensor: Tensor) -> int:
    """Tokens in the buffer of a jagged nested tensor, including holes."""
    return tensor.values().size(ragged_dim(tensor) - 1)
