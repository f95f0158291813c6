"""Dropout as plain PyTorch would write it, from the recovered mask."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tests.budgets import INF, evaluate_score_mod


class Results(NamedTuple):
    """Results and gradients of one call with a loss of out and lse."""

    out: Tensor
    lse: Tensor
    grads: tuple[Tensor, ...]


def dropped_attention(
    tensors: tuple[Tensor, ...],
    kept: Tensor,
    dropout_p: float,
    *,
    visible: Tensor | bool = True,
    score_mod: Callable[..., Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """out and lse of query [B, Hq, M, D], key [B, Hkv, N, D] and value; autograd does the rest.

    Products and the rounding of weights in the dtype of query, the softmax in fp32 (fp64).

    Args:
        tensors: query, key, value.
        kept: [B, Hq, M, N] bool.
        dropout_p: of the call.
        visible: which keys a query sees.
        score_mod: as for flex_attention.
    """
    query, key, value = tensors
    group = query.size(1) // key.size(1)
    key, value = (
        t.expand(query.size(0), -1, -1, -1).repeat_interleave(group, 1) for t in (key, value)
    )
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    scores = (query @ key.mT).to(wide) * query.size(-1) ** -0.5
    if score_mod is not None:
        scores = evaluate_score_mod(score_mod, scores)
    scores = torch.where(torch.as_tensor(visible), scores, -INF)
    lse = scores.logsumexp(-1)
    weights = torch.exp(scores - torch.where(lse == -INF, 0.0, lse)[..., None])
    weights = torch.where(kept, weights / (1 - dropout_p), 0.0)
    return weights.to(query.dtype) @ value, lse


def differentiate(
    result: tuple[Tensor, Tensor], leaves: tuple[Tensor, ...], grad: Tensor
) -> Results:
    """Gradients of (out * grad).sum() + lse's squares."""
    out, lse = result
    loss = (out * grad.to(out.dtype)).sum() + torch.where(lse.isinf(), 0.0, lse).square().sum()
    return Results(out.detach(), lse.detach(), torch.autograd.grad(loss, leaves))


def double(leaves: tuple[Any, ...]) -> tuple[Tensor, ...]:
    """fp64 copies that require gradients."""
    return tuple(t.detach().double().requires_grad_() for t in leaves)
