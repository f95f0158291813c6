"""The reference at some queries and keys only, in fp64 or as plain PyTorch rounds it.

Memory is that of the sampled rows of scores, never S x S. `flexhop.verify` compares kernels with
it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexhop.ops.args import AttentionArgs
from flexhop.ops.dropout import drop
from flexhop.ops.eager import (
    Grids,
    accumulate_dtype,
    chunk_rows,
    listed_blocks,
    over_elements,
    softmax_rows,
    visible_keys,
)


class Saved(NamedTuple):
    """Results of a call, and the gradients that they received: [B, Hq, M, Dv] or [B, Hq, M]."""

    out: Tensor
    lse: Tensor
    grad_out: Tensor


def widened(args: AttentionArgs) -> AttentionArgs:
    """The call in fp64: operands, and every captured floating-point tensor."""

    def wide(value: Any) -> Any:
        is_float = isinstance(value, Tensor) and value.is_floating_point()
        return value.detach().double() if is_float else value

    return _with_operands(args, wide)


def query_rows(args: AttentionArgs, rows: Tensor, grad_out: Tensor) -> dict[str, Tensor]:
    """out, lse and grad_query of the queries at `rows` [m], in the order of `rows`.

    Products are in the operands' dtype, the rest in fp32 (fp64 for fp64).
    """
    args = _detached(args)
    with torch.enable_grad():
        query = args.query.index_select(2, rows).requires_grad_()
        keys = torch.arange(args.key.size(2), device=rows.device)
        _, modified, grid = _scores(args, listed_blocks(args), query, (rows, keys))
        weights, total, lse = softmax_rows(modified)
        weights = drop(weights / total[..., None], args.dropout_seed, args.options, grid)
        out = weights.to(query.dtype) @ _per_head(args.value, query)
        (grad,) = torch.autograd.grad(out, query, grad_out.index_select(2, rows).to(out.dtype))
    return {"out": out.detach(), "lse": lse.detach(), "grad_query": grad}


def key_rows(args: AttentionArgs, keys: Tensor, saved: Saved) -> dict[str, Tensor]:
    """grad_key and grad_value of the keys at `keys` [n]; from out and lse, as kernels do."""
    args, grids = _detached(args), listed_blocks(args)
    args = args._replace(
        key=args.key.index_select(2, keys), value=args.value.index_select(2, keys)
    )
    wide = accumulate_dtype(args.query.dtype)
    totals = [torch.zeros(t.shape, dtype=wide, device=t.device) for t in (args.key, args.value)]
    for rows in _chunks(args):
        parts = _key_part(args, grids, (rows, keys), saved)
        totals = [total + part for total, part in zip(totals, parts, strict=True)]
    return {"grad_key": totals[0].to(args.key.dtype), "grad_value": totals[1].to(args.key.dtype)}


def _key_part(
    args: AttentionArgs, grids: Grids, places: tuple[Tensor, Tensor], saved: Saved
) -> tuple[Tensor, Tensor]:
    """The contribution of some queries to the gradients of some keys and values."""
    rows, _ = places
    query = args.query.index_select(2, rows)
    with torch.enable_grad():
        raw, modified, grid = _scores(args, grids, query, places)
    wide = raw.dtype
    out, lse, grad_out = (t.index_select(2, rows).to(wide) for t in saved)
    weights = torch.exp(modified.detach() - torch.where(lse.isneginf(), 0.0, lse)[..., None])
    drops = (args.dropout_seed, args.options, grid)
    value = _per_head(args.value, query)
    grad_out = grad_out.to(query.dtype)
    grad_weights = drop((grad_out @ value.mT).to(wide), *drops)
    delta = (grad_out.to(wide) * out).sum(-1, keepdim=True)
    grad_modified = weights * (grad_weights - delta)
    (grad,) = torch.autograd.grad(modified, raw, grad_modified, allow_unused=True)
    grad = torch.zeros_like(raw) if grad is None else grad
    grad = torch.where(modified.isneginf(), 0.0, grad) * args.scale
    pairs = ((grad, query), (drop(weights, *drops), grad_out))
    grad_key, grad_value = (
        _sum_heads((left.to(query.dtype).mT @ right).to(wide), args.key) for left, right in pairs
    )
    return grad_key, grad_value


def _scores(
    args: AttentionArgs, grids: Grids, query: Tensor, places: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """Scaled products, which gradients reach; scores, -inf if hidden; and the indices."""
    product = query @ _per_head(args.key, query).mT
    raw = product.to(accumulate_dtype(query.dtype)) * args.scale
    if not raw.requires_grad:
        raw.requires_grad_()
    sizes = (query.size(0), query.size(1))
    b, h = (torch.arange(n, device=query.device, dtype=torch.int32) for n in sizes)
    index = (b, h, places[0].int(), places[1].int())
    modified = over_elements(args.score_mod, 1, (raw,), index, args.score_captures)
    visible = visible_keys(args, grids, index, raw)
    return raw, torch.where(visible, modified.to(raw.dtype), float("-inf")), index


def _per_head(tensor: Tensor, query: Tensor) -> Tensor:
    """[B or 1, Hkv, N, E] -> [B, Hq, N, E]."""
    group = query.size(1) // tensor.size(1)
    return tensor.expand(query.size(0), -1, -1, -1).repeat_interleave(group, dim=1)


def _sum_heads(grad: Tensor, like: Tensor) -> Tensor:
    """[B, Hq, N, E] -> the sizes of key: summed over groups, and over a shared batch."""
    grad = grad.unflatten(1, (like.size(1), -1)).sum(2)
    return grad.sum(0, keepdim=True) if like.size(0) != grad.size(0) else grad


def _chunks(args: AttentionArgs) -> Iterator[Tensor]:
    batch, heads, length, _ = args.query.shape
    size = chunk_rows(batch * heads * args.key.size(2))
    for start in range(0, length, size):
        yield torch.arange(start, min(start + size, length), device=args.query.device)


def _detached(args: AttentionArgs) -> AttentionArgs:
    def plain(value: Any) -> Any:
        return value.detach() if isinstance(value, Tensor) else value

    return _with_operands(args, plain)


def _with_operands(args: AttentionArgs, change: Callable[[Any], Any]) -> AttentionArgs:
    """The call with different operands and captures."""
    return args._replace(
        query=change(args.query), key=change(args.key), value=change(args.value),
        score_captures=tuple(map(change, args.score_captures)),
        mask_captures=tuple(map(change, args.mask_captures)),
    )  # fmt: skip
