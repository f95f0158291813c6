"""Attention by definition, in plain PyTorch: the specification that every kernel is measured against.

Queries are evaluated in chunks, so memory is O(chunk * S) forward and backward. Mods run under
`torch.vmap`, one score at a time as far as they can tell, exactly as the kernels run them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from flexhop.block_lists import block_count, lists_to_dense
from flexhop.indexing import IndexMode
from flexhop.ops.args import AttentionArgs, BackwardArgs, BlockTensors, Site, unpack_sites

# Score elements that one chunk holds: 2**22 fp32 scores are 16 MiB, with temporaries below 256 MiB.
CHUNK_ELEMENTS = 1 << 22


class _Rows(NamedTuple):
    """The scores of queries start..stop against every key."""

    start: int
    stop: int
    raw: Tensor  # [B, Hq, m, N] scaled dot products
    modified: Tensor  # [B, Hq, m, N] after score_mod, -inf where not visible
    visible: Tensor  # [B, Hq, m, N] bool


def attend(args: AttentionArgs) -> tuple[Tensor, Tensor, Tensor]:
    """Attention by definition: scores, score_mod, mask, softmax, combine.

    Args:
        args: see AttentionArgs. A key is visible to a query if its block is listed as full, or is listed
            as partial and mask_mod keeps it; without blocks, if mask_mod keeps it.

    Returns:
        out [B, Hq, M, Dv] in query's dtype; lse [B, Hq, M], natural logarithm, -inf for rows that see
        nothing (their out is 0), fp32 (fp64 for fp64); max_scores like lse, without gradient.

    Source: Dong et al. 2024, FlexAttention (arXiv 2412.05496), equation 2.
    """
    parts = [_attend_chunk(args, start, stop) for start, stop in _chunks(args)]
    out, lse, max_scores = (torch.cat(tensors, dim=2) for tensors in zip(*parts, strict=True))
    return out, lse, max_scores.detach()


def _attend_chunk(args: AttentionArgs, start: int, stop: int) -> tuple[Tensor, Tensor, Tensor]:
    if torch.is_grad_enabled():
        return checkpoint(_attend_rows, args, start, stop, use_reentrant=False)
    return _attend_rows(args, start, stop)


def _attend_rows(args: AttentionArgs, start: int, stop: int) -> tuple[Tensor, Tensor, Tensor]:
    rows = _score_rows(args, start, stop)
    lse = torch.logsumexp(rows.modified, dim=-1)
    weights = torch.exp(rows.modified - _finite(lse)[..., None])
    out = _combine(weights, args.value)
    return out.to(args.query.dtype), lse, rows.modified.amax(dim=-1)


def _finite(lse: Tensor) -> Tensor:
    """A row that sees nothing has lse -inf; subtracting 0 instead leaves its weights 0."""
    return torch.where(lse == float("-inf"), 0.0, lse)


def _chunks(args: AttentionArgs | BackwardArgs) -> Iterator[tuple[int, int]]:
    batch, heads, length, _ = args.query.shape
    rows = max(16, CHUNK_ELEMENTS // max(1, batch * heads * args.key.size(2)))
    for start in range(0, length, rows):
        yield start, min(start + rows, length)


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of scores and sums."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _fold_group(tensor: Tensor, kv_heads: int) -> Tensor:
    """[B, Hq, m, E] -> [B, Hkv, G * m, E]: the queries of one group share their key head."""
    batch, heads, rows, width = tensor.shape
    return tensor.reshape(batch, kv_heads, heads // kv_heads * rows, width)


def _score_rows(args: AttentionArgs | BackwardArgs, start: int, stop: int) -> _Rows:
    raw = dot_keys(args.query[:, :, start:stop], args.key) * args.scale
    index = index_grids(raw, start)
    modified = over_elements(args.score_mod, 1, (raw,), index, args.score_captures)
    visible = visible_keys(args, index, raw)
    modified = torch.where(visible, modified.to(raw.dtype), float("-inf"))
    return _Rows(start, stop, raw, modified, visible)


def dot_keys(rows: Tensor, columns: Tensor) -> Tensor:
    """[B, Hq, m, E] x [B or 1, Hkv, N, E] -> [B, Hq, m, N], in fp32 (fp64 for fp64)."""
    dtype = accumulate_dtype(rows.dtype)
    folded = _fold_group(rows.to(dtype), columns.size(1))
    product = folded @ columns.to(dtype).transpose(-1, -2)
    return product.reshape(rows.size(0), rows.size(1), rows.size(2), columns.size(2))


def _combine(weights: Tensor, value: Tensor) -> Tensor:
    folded = _fold_group(weights, value.size(1)) @ value.to(weights.dtype)
    return folded.reshape(*weights.shape[:3], value.size(-1))


def index_grids(scores: Tensor, start: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The 1-d index vectors b, h, q_idx, kv_idx of a chunk of scores."""
    batch, heads, rows, keys = scores.shape
    bounds = ((0, batch), (0, heads), (start, start + rows), (0, keys))
    b, h, q_idx, kv_idx = (
        torch.arange(low, high, device=scores.device, dtype=torch.int32) for low, high in bounds
    )
    return b, h, q_idx, kv_idx


def over_elements(
    function: Callable[..., Any],
    leading: int,
    elements: tuple[Tensor, ...],
    index: tuple[Tensor, ...],
    captures: tuple[Any, ...],
) -> Any:
    """Evaluate function(*elements[:leading], b, h, q_idx, kv_idx, *elements[leading:], *captures).

    Args:
        function: of 0-d tensors.
        leading: how many of `elements` come before the indices.
        elements: [B, Hq, m, N] each.
        index: the four index vectors.
        captures: passed whole.

    Returns:
        What `function` returns, every tensor expanded to [B, Hq, m, N].
    """
    trailing = len(elements) - leading
    mapped = function
    for position in reversed(range(4)):  # the innermost map runs over keys
        index_dims = [0 if i == position else None for i in range(4)]
        dims = (*[0] * leading, *index_dims, *[0] * trailing, *[None] * len(captures))
        mapped = torch.vmap(mapped, in_dims=dims)
    with IndexMode():
        return mapped(*elements[:leading], *index, *elements[leading:], *captures)


def visible_keys(
    args: AttentionArgs | BackwardArgs, index: tuple[Tensor, ...], scores: Tensor
) -> Tensor:
    """Which keys each query of a chunk sees, [B, Hq, m, N] bool."""
    keep = over_elements(args.mask_mod, 0, (), index, args.mask_captures)
    if not args.blocks:
        return keep.expand(scores.shape)
    blocks = BlockTensors(*args.blocks)
    q_block = index[2] // args.options["q_block_size"]
    kv_block = index[3] // args.options["kv_block_size"]
    columns = block_count(scores.size(-1), int(args.options["kv_block_size"]))
    listed = lists_to_dense(blocks.kv_num_blocks, blocks.kv_indices, columns)
    keep = keep & _per_element(listed, q_block, kv_block)
    if args.options["has_full_blocks"]:
        full = lists_to_dense(blocks.full_kv_num_blocks, blocks.full_kv_indices, columns)
        keep = keep | _per_element(full, q_block, kv_block)
    return keep.expand(scores.shape)


def _per_element(blocks: Tensor, q_block: Tensor, kv_block: Tensor) -> Tensor:
    return blocks[:, :, q_block.long()][:, :, :, kv_block.long()]


def attend_backward(args: BackwardArgs) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, ...]]:
    """Gradients of `attend`, from the saved out and lse.

    Returns:
        grad_query, grad_key, grad_value in their tensors' dtypes, and one gradient per capture that has
        a site, in the order of the captures' positions.

    Source: Dao 2023, FlashAttention-2 (arXiv 2307.08691), algorithm 2, with the chain rule of score_mod.
    """
    dtype = accumulate_dtype(args.query.dtype)
    grad_query, grad_key, grad_value = (
        torch.zeros(t.shape, dtype=dtype, device=t.device) for t in (args.query, args.key, args.value)
    )
    sites = unpack_sites(args.sites)
    grad_captures = {
        site.capture: torch.zeros_like(args.score_captures[site.capture], dtype=dtype) for site in sites
    }
    for start, stop in _chunks(args):
        rows = _score_rows(args, start, stop)
        grad_raw, weights = _raw_gradient(args, rows, sites, grad_captures)
        grad_rows = args.grad_out[:, :, start:stop].to(dtype)
        grad_value += _reduce_heads(weights, grad_rows, args.value)
        grad_key += _reduce_heads(grad_raw, args.query[:, :, start:stop].to(dtype), args.key)
        grad_query[:, :, start:stop] = _combine(grad_raw, args.key)
    captured = tuple(
        grad_captures[i].to(args.score_captures[i].dtype) for i in sorted(grad_captures)
    )
    return (
        grad_query.to(args.query.dtype),
        grad_key.to(args.key.dtype),
        grad_value.to(args.value.dtype),
        captured,
    )


def _raw_gradient(
    args: BackwardArgs, rows: _Rows, sites: tuple[Site, ...], grad_captures: dict[int, Tensor]
) -> tuple[Tensor, Tensor]:
    """Gradient of q.k (scale included) and the softmax weights of a chunk; adds to `grad_captures`."""
    span = slice(rows.start, rows.stop)
    lse = args.lse[:, :, span].to(rows.raw.dtype)
    weights = torch.exp(rows.modified - _finite(lse)[..., None])
    grad_out = args.grad_out[:, :, span].to(rows.raw.dtype)
    delta = (grad_out * args.out[:, :, span].to(rows.raw.dtype)).sum(-1)
    if args.grad_lse is not None:
        delta = delta - args.grad_lse[:, :, span].to(rows.raw.dtype)
    grad_modified = weights * (dot_keys(grad_out, args.value) - delta[..., None])
    index = index_grids(rows.raw, rows.start)
    outputs = over_elements(args.joint, 1, (rows.raw, grad_modified), index, args.score_captures)
    for site in sites:
        _scatter(grad_captures[site.capture], site, outputs, rows.visible)
    grad_raw = torch.where(rows.visible, outputs[0].to(rows.raw.dtype), 0.0)
    return grad_raw * args.scale, weights


def _scatter(target: Tensor, site: Site, outputs: tuple[Tensor, ...], visible: Tensor) -> None:
    values = torch.where(visible, outputs[site.value].to(target.dtype), 0.0)
    if not site.indices:
        target += values.sum()
        return
    target.index_put_(tuple(outputs[i].long() for i in site.indices), values, accumulate=True)


def _reduce_heads(weights: Tensor, rows: Tensor, like: Tensor) -> Tensor:
    """weightsᵀ @ rows, summed over the query heads of a group and over a broadcast batch."""
    kv_heads = like.size(1)
    grad = _fold_group(weights, kv_heads).transpose(-1, -2) @ _fold_group(rows, kv_heads)
    return grad.sum(0, keepdim=True) if like.size(0) != grad.size(0) else grad
