"""Whole tensors from the parts of all ranks, and what becomes of their gradients."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexhop.compat import collectives


class _Gather(torch.autograd.Function):
    """Parts of all ranks one behind the other along dimension 0; see `gather_parts`."""

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
    """A rank's side of a process group: its name, its size, and the rank's place in it."""

    group: str
    ranks: int
    rank: int


def gather_parts(tensor: Tensor, dim: int, side: Side, *, sums: bool) -> Tensor:
    """Parts of all ranks one behind the other along `dim`.

    Args:
        tensor: the rank's part, of the same shape on all ranks.
        dim: along which parts follow each other.
        side: of the process group.
        sums: whether the gradient of the whole is a part of the gradient on each rank, so that a
            part's gradient is a sum over ranks; else every rank has all of it.
    """
    group, ranks, rank = side
    return _Gather.apply(tensor.movedim(dim, 0), ranks, rank, group, sums).movedim(0, dim)
