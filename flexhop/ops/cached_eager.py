"""Reference attention to a cache: put the keys in order, apply their mods, then attend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flexhop.compat.mods.indexing import IndexMode
from flexhop.ops.args import AttentionArgs, CachedArgs, operands_of
from flexhop.ops.eager import accumulate_dtype, attend


def attend_cached(args: CachedArgs) -> tuple[Tensor, Tensor, Tensor]:
    """Like `eager.attend`, with keys from a cache, decoded by key_mod and value_mod."""
    return attend(ordered_args(args), lengths_of(args))


def lengths_of(args: CachedArgs) -> Tensor | None:
    """[B], number of keys of each sequence; None if all exist."""
    return args.pages[1] if args.pages else None


def ordered_args(args: CachedArgs) -> AttentionArgs:
    """The same call with keys in order, [B, Hkv, N, D], in the dtype of query."""
    key = _in_order(args, args.key, args.key_mod, args.key_captures)
    value = _in_order(args, args.value, args.value_mod, args.value_captures)
    return operands_of(AttentionArgs, args, key=key, value=value)


def sampled_keys(
    args: CachedArgs, batches: Tensor, heads: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Keys and values of some batches and key heads, in order: [b, h, N, D] and [b, h, N, Dv]."""
    if args.pages:
        table, lengths = (t.index_select(0, batches) for t in args.pages)
        args = args._replace(pages=(table, lengths))
    args = args._replace(query=args.query.index_select(0, batches).to(dtype))
    at = (batches, heads)
    return (
        _in_order(args, args.key, args.key_mod, args.key_captures, at),
        _in_order(args, args.value, args.value_mod, args.value_captures, at),
    )


def _in_order(
    args: CachedArgs, cache: Tensor, mod: Callable[..., Tensor], captures: tuple[Any, ...],
    at: tuple[Tensor, Tensor] | None = None,
) -> Tensor:  # fmt: skip
    """Decoded rows in order; at: their batches and heads if they are not all (sampled_keys)."""
    live = None
    if args.pages:
        cache, live = _gather(cache, *args.pages)
    if at is not None:
        cache = _chosen(cache, at, has_batches=not args.pages)
    # Triton cannot convert 8-bit floats to fp64 at once.
    stored = cache.float() if cache.element_size() == 1 else cache
    wide = stored.to(accumulate_dtype(args.query.dtype))
    wide = wide.expand(args.query.size(0), -1, -1, -1)
    result = _over_numbers(mod, wide, captures, at).to(args.query.dtype)
    # Rows that are not keys have weight 0, but a NaN there would still spoil a sum.
    return result if live is None else torch.where(live, result, 0.0)


def _chosen(cache: Tensor, at: tuple[Tensor, Tensor], *, has_batches: bool) -> Tensor:
    batches, heads = at
    rows = cache.view(torch.uint8) if cache.element_size() == 1 else cache
    rows = rows.index_select(1, heads)
    if has_batches and cache.size(0) > 1:
        rows = rows.index_select(0, batches)
    return rows.view(cache.dtype)


def _gather(cache: Tensor, table: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Keys of each sequence, [B, Hkv, N, D], and which rows are keys, [B, 1, N, 1]."""
    page_size = cache.size(2)
    position = torch.arange(table.size(1) * page_size, device=cache.device)
    live = position < lengths[:, None]
    page = torch.where(live, table[:, position // page_size], 0).clamp(0, cache.size(0) - 1)
    # As bytes, because not every operator supports 8-bit floats.
    rows = cache.view(torch.uint8) if cache.element_size() == 1 else cache
    rows = rows[page, :, position % page_size]
    return rows.view(cache.dtype).transpose(1, 2), live[:, None, :, None]


def _over_numbers(
    mod: Callable[..., Tensor], x: Tensor, captures: tuple[Any, ...],
    at: tuple[Tensor, Tensor] | None = None,
) -> Tensor:  # fmt: skip
    """mod(x, b, h, kv_idx, *captures) for every element of [B, Hkv, N, D]; at as in _in_order."""
    index = [torch.arange(n, device=x.device, dtype=torch.int32) for n in x.shape[:3]]
    if at is not None:
        index[:2] = (at[0].int(), at[1].int())
    rest = [None] * len(captures)
    mapped = torch.vmap(mod, in_dims=(0, None, None, None, *rest))  # over columns
    for position in reversed(range(3)):
        dims = [0 if i == position else None for i in range(3)]
        mapped = torch.vmap(mapped, in_dims=(0, *dims, *rest))
    with IndexMode():
        return mapped(x, *index, *captures)
