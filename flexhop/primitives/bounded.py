"""A position that leaves its sequence only where scores do not count."""

from __future__ import annotations

import torch
from torch import Tensor


@torch.library.custom_op("flexhop::bounded", mutates_args=())
def _bounded(position: Tensor, last: Tensor) -> Tensor:
    return torch.minimum(position.clamp(min=0), last)


@_bounded.register_fake
def _(position: Tensor, last: Tensor) -> Tensor:
    sizes = torch.broadcast_shapes(position.shape, last.shape)
    return position.new_empty(sizes)


@_bounded.register_vmap
def _(
    info: object, in_dims: tuple[int | None, int | None], position: Tensor, last: Tensor
) -> tuple[Tensor, int]:
    operands = tuple(zip((position, last), in_dims, strict=True))
    rank = max(tensor.dim() - (dim is not None) for tensor, dim in operands)
    return _bounded(*(_lift(tensor, dim, rank) for tensor, dim in operands)), 0


def _lift(tensor: Tensor, dim: int | None, rank: int) -> Tensor:
    """With the mapped dimension first, and in front of `rank` others."""
    if dim is None:
        return tensor
    first = tensor.movedim(dim, 0)
    missing = rank - (tensor.dim() - 1)
    return first.reshape(first.size(0), *([1] * missing), *first.shape[1:])


def bounded(position: Tensor, last: Tensor) -> Tensor:
    """position, held in [0, last] so that tables can be read at it.

    It promises that scores whose position is outside do not count. A kernel may therefore compute
    with the position as it is, where nothing is read at it (lowering/mods/relative.py).

    Args:
        position: int32. last: int32, at least 0.
    """
    return torch.ops.flexhop.bounded(position, last)


BOUNDED = torch.ops.flexhop.bounded.default  # what calls of it are in a graph
