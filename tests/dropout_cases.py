"""Dropout as plain PyTorch would write it, from the recovered mask."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

import flexhop
from flexhop.mods.functions import noop_mask, noop_score
from flexhop.ops.args import AttentionArgs
from flexhop.ops.call import Call
from flexhop.ops.dispatch import run_operator
from flexhop.ops.dropout import place
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


class Placed(NamedTuple):
    """A rank's call, whose output shows which weights are kept: all are equal, values one-hot.

    kept: which of its weights the mask of the whole keeps. share: a weight that is kept.
    """

    call: Callable[..., Tensor]
    operands: tuple[Tensor, Tensor, Tensor]
    kept: Tensor
    share: float


def placed_call(
    seed: Tensor, dropout_p: float, queries: int, width: int, options: flexhop.KernelOptions
) -> Placed:
    """A call with batches from 1 on, heads from 2 on, and blocks of tokens in any order."""
    of_queries, of_keys = torch.tensor([5, 1, 2]), torch.tensor([4, 0, 3, 7])
    keys = 16 * len(of_keys) - 4
    placed = place(seed, (1, 2), torch.cat((of_queries, of_keys)))
    more = {"dropout_p": dropout_p, "dropout_groups": len(of_queries)}

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        args = AttentionArgs(q, k, v, noop_score, noop_mask, (), 0.0, {}, dropout_seed=(placed,))
        return run_operator(args, Call(None, False, options, False, None, **more))[0]

    query, key = torch.zeros(2, 2, queries, width), torch.zeros(2, 2, keys, width)
    value = torch.eye(keys).expand(2, 2, keys, keys).contiguous()
    rows, columns = (
        (16 * g[:, None] + torch.arange(16)).flatten()[:n]
        for g, n in ((of_queries, queries), (of_keys, keys))
    )
    whole = flexhop.dropout_mask(seed, dropout_p, (3, 4, 128, 128))
    kept = whole[1:, 2:][:, :, rows][..., columns]
    return Placed(call, (query, key, value), kept, 1 / (keys * (1 - dropout_p)))
