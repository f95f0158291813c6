"""Gather whole tensors from the parts of all ranks, with their gradients."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexhop.compat import collectives


class _Gather(torch.autograd.Function):
    """Concatenate the parts of all ranks along dimension 0; see `gather_parts`."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, ranks: int, rank: int, group: str, sums: bool) -> Tensor:
        ctx.group, ctx.sums, ctx.size, ctx.rank = group, sums, tensor.size(0), rank
        return collectives.gather_over(tensor, group, ranks)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]  # torch: *grad_outputs
        if ctx.sums:
            grad = collectives.sum_over(grad, ctx.group)
        return grad.narrow(0, ctx.rank * ctx.size, ctx.size), *[None] * 4


class Side(NamedTuple):
    """A process group as a rank sees it: its name, its size, and the rank's index in it."""

    group: str
    ranks: int
    rank: int


def gather_parts(tensor: Tensor, dim: int, side: Side, *, sums: bool) -> Tensor:
    """Concatenate the parts of all ranks along `dim`.

    Args:
        tensor: the rank's part, of the same shape on all ranks.
        dim: the dimension to concatenate along.
        side: the process group.
        sums: whether each rank holds only a part of the whole's gradient, so that a part's
            gradient is a sum over ranks. Otherwise every rank holds all of it.
    """
    group, ranks, rank = side
    return _Gather.apply(tensor.movedim(dim, 0), ranks, rank, group, sums).movedim(0, dim)
