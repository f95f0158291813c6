"""Positions that are outside their sequence only for unused scores."""

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
    """Move the mapped dimension first, in front of `rank` others."""
    if dim is None:
        return tensor
    first = tensor.movedim(dim, 0)
    missing = rank - (tensor.dim() - 1)
    return first.reshape(first.size(0), *([1] * missing), *first.shape[1:])


def bounded(position: Tensor, last: Tensor) -> Tensor:
    """position, clamped to [0, last] so that tables can be read at it.

    It promises that scores with positions outside are not used. If nothing is read at the
    position, a kernel may therefore compute with it unclamped (lowering/mods/packed_distances.py).

    Args:
        position: int32. last: int32, at least 0.
    """
    return torch.ops.flexhop.bounded(position, last)


BOUNDED = torch.ops.flexhop.bounded.default  # its operator in graphs
