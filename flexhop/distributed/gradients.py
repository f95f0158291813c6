"""Whole tensors from the parts of all ranks, and what becomes of their gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flexhop.compat import collectives


class _Gather(torch.autograd.Function):
    """Parts of all ranks one behind the other along dimension 0; see `gather_parts`."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: str, sums: bool) -> Tensor:
        ctx.group, ctx.sums, ctx.size = group, sums, tensor.size(0)
        return collectives.gather_over(tensor, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        if ctx.sums:
            grad = collectives.sum_over(grad, ctx.group)
        start = collectives.rank_in(ctx.group) * ctx.size
        return grad.narrow(0, start, ctx.size), None, None


def gather_parts(tensor: Tensor, dim: int, group: str, *, sums: bool) -> Tensor:
    """Parts of all ranks one behind the other along `dim`.

    Args:
        tensor: the rank's part, of the same shape on all ranks.
        dim: along which parts follow each other.
        group: name of the process group.
        sums: whether the gradient of the whole is a part of the gradient on each rank, so that a
            part's gradient is a sum over ranks; else every rank has all of it.
    """
    return _Gather.apply(tensor.movedim(dim, 0), group, sums).movedim(0, dim)
