"""Positions that are outside their sequence only for unused scores."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


@torch.library.custom_op("flexhop::bounded", mutates_args=())
def _bounded(position: Tensor, last: Tensor, equals: list[Tensor]) -> Tensor:
    return torch.minimum(position.clamp(min=0), last)


@_bounded.register_fake
def _(position: Tensor, last: Tensor, equals: list[Tensor]) -> Tensor:
    sizes = torch.broadcast_shapes(position.shape, last.shape)
    return position.new_empty(sizes)


@_bounded.register_vmap
def _(
    info: object, in_dims: tuple[Any, ...], position: Tensor, last: Tensor, equals: list[Tensor]
) -> tuple[Tensor, int]:
    # What values equal elsewhere is for kernels.
    operands = tuple(zip((position, last), in_dims[:2], strict=True))
    rank = max(tensor.dim() - (dim is not None) for tensor, dim in operands)
    return _bounded(*(_lift(tensor, dim, rank) for tensor, dim in operands), []), 0


def _lift(tensor: Tensor, dim: int | None, rank: int) -> Tensor:
    """Move the mapped dimension first, in front of `rank` others."""
    if dim is None:
        return tensor
    first = tensor.movedim(dim, 0)
    missing = rank - (tensor.dim() - 1)
    return first.reshape(first.size(0), *([1] * missing), *first.shape[1:])


def bounded(
    position: Tensor, last: Tensor, own: Tensor | None = None, *same: tuple[Tensor, Tensor]
) -> Tensor:
    """position, clamped to [0, last] so that tables can be read at it.

    It promises that scores with positions outside are not used. If nothing is read at the
    position, a kernel may therefore compute with it unclamped (lowering/mods/packed_distances.py).

    Args:
        position: int32. last: int32, at least 0.
        own: int32, computed from kv_idx alone, and equal to position for every score that is used.
            A kernel reads tables there, because it then reads once per key instead of once per
            score (ops/graphs/own_positions.py).
        same: pairs of values that are equal for every score that is used: computed from q_idx, and
            from kv_idx.
    """
    equals = [] if own is None else [own, *(value for pair in same for value in pair)]
    return torch.ops.flexhop.bounded(position, last, equals)


BOUNDED = torch.ops.flexhop.bounded.default  # its operator in graphs
