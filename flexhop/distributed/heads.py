"""Swap tokens for heads: a rank sends heads and receives tokens, and after attention the reverse.

Source: Jacobs et al. 2023, DeepSpeed Ulysses (arXiv 2309.14509).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flexhop.compat import collectives


def _gather_tokens(tensor: Tensor, ranks: int, group: str) -> Tensor:
    """[B, H, M, ...] -> [B, H / ranks, ranks * M, ...]: all tokens, and this rank's heads."""
    by_rank = tensor.unflatten(1, (ranks, -1)).movedim(1, 0)
    arrived = collectives.swap_over(by_rank, group)  # [source, B, H / ranks, M, ...]
    return arrived.movedim(0, 2).flatten(2, 3)


def _gather_heads(tensor: Tensor, ranks: int, group: str) -> Tensor:
    """The inverse of _gather_tokens."""
    by_rank = tensor.unflatten(2, (ranks, -1)).movedim(2, 0)
    arrived = collectives.swap_over(by_rank, group)  # [source, B, H / ranks, M, ...]
    return arrived.movedim(0, 1).flatten(1, 2)


class _TokensForHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, ranks: int, group: str) -> Tensor:
        ctx.ranks, ctx.group = ranks, group
        return _gather_tokens(tensor, ranks, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]  # torch: *grad_outputs
        return _gather_heads(grad, ctx.ranks, ctx.group), None, None


class _HeadsForTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, ranks: int, group: str) -> Tensor:
        ctx.ranks, ctx.group = ranks, group
        return _gather_heads(tensor, ranks, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]  # torch: *grad_outputs
        return _gather_tokens(grad, ctx.ranks, ctx.group), None, None


def gather_tokens(tensor: Tensor, ranks: int, group: str) -> Tensor:
    """[B, H, M, ...] -> [B, H / ranks, ranks * M, ...], differentiable; needs H % ranks == 0."""
    return _TokensForHeads.apply(tensor, ranks, group)


def gather_heads(tensor: Tensor, ranks: int, group: str) -> Tensor:
    """The inverse of gather_tokens."""
    return _HeadsForTokens.apply(tensor, ranks, group)
