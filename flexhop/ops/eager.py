"""The reference implementation of attention in plain PyTorch: every kernel's specification.

Queries are evaluated in chunks, so memory is O(chunk * S) forward and backward. Mods run under
`torch.vmap`: they see one score at a time, exactly as in the kernels. `attend_rows` and
`grad_rows` define one chunk. They write to none of their inputs, so lowering/chunked.py can trace
them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexhop.block_mask.lists import block_count, lists_to_dense, ranges_to_dense
from flexhop.compat.mods.indexing import IndexMode
from flexhop.compat.operators import hop, transforms
from flexhop.compat.operators.autograd import checkpointed
from flexhop.compat.operators.vmapped import in_32_bits_once
from flexhop.ops import wide_lse
from flexhop.ops.args import (
    AttentionArgs,
    BackwardArgs,
    DerivativeArgs,
    RangeTensors,
    Site,
    learned_captures,
    read_blocks,
    unpack_sites,
)
from flexhop.ops.dropout import drop
from flexhop.ops.layout import is_nothing, no_rows

# Scores per chunk: 2**22 of fp32 are 16 MiB, with temporaries below 256 MiB.
CHUNK_ELEMENTS = 1 << 22

Operands = AttentionArgs | BackwardArgs | DerivativeArgs


class Chunk(NamedTuple):
    """A chunk of queries.

    q_idx: [m] int32, their positions. pick(tensor): the rows of a [B, Hq, M, ...] tensor at these
    positions. live: [m] bool, False for rows that only pad the chunk; None if there are none.
    """

    q_idx: Tensor
    pick: Callable[[Tensor], Tensor]
    live: Tensor | None = None


class Grids(NamedTuple):
    """Which blocks are listed, [B', H', R, C] bool each; None: mask_mod decides about every key.

    lengths: [B], number of keys of each batch; None: all.
    """

    partial: Tensor | None = None
    full: Tensor | None = None
    lengths: Tensor | None = None


class _Rows(NamedTuple):
    """The scores of one chunk of queries with every key."""

    raw: Tensor  # [B, Hq, m, N] scaled dot products
    modified: Tensor  # [B, Hq, m, N] after score_mod, -inf where not visible
    visible: Tensor  # [B, Hq, m, N] bool
    grid: tuple[Tensor, ...]  # b, h, q_idx, kv_idx


def attend(args: AttentionArgs, lengths: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Reference attention: scores, score_mod, mask, softmax, combine.

    Args:
        args: see AttentionArgs. A key is visible to a query if its block is listed as full, or if
            its block is listed as partial and mask_mod keeps it. Without blocks, mask_mod alone
            decides.
        lengths: [B], number of keys of each batch; all by default.

    Returns:
        out [B, Hq, M, Dv] in query's dtype; lse [B, Hq, M], natural logarithm, -inf for rows that
        see nothing (their out is 0), fp32 (fp64 for fp64); max_scores like lse, without gradient.

    Source: Dong et al. 2024, FlexAttention (arXiv 2412.05496), equation 2.
    """
    grids = listed_blocks(args)._replace(lengths=lengths)
    with in_32_bits_once():
        parts = [_attend_chunk(args, grids, chunk) for chunk in chunks(args)]
    out, lse, max_scores = (torch.cat(tensors, dim=2) for tensors in zip(*parts, strict=True))
    return out, lse, max_scores.detach()


def _attend_chunk(
    args: AttentionArgs, grids: Grids, chunk: Chunk
) -> tuple[Tensor, Tensor, Tensor]:
    # A tensor with a tangent saves more than its recomputation does, once the tangent is gone.
    if torch.is_grad_enabled() and hop.can_checkpoint() and not transforms.is_forward_mode():
        return checkpointed(attend_rows, args, grids, chunk)
    return attend_rows(args, grids, chunk)


def attend_rows(args: AttentionArgs, grids: Grids, chunk: Chunk) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of the three results of `attend`: [B, Hq, m, Dv], [B, Hq, m], [B, Hq, m]."""
    if is_nothing(args.query):
        operands = (chunk.pick(args.query), args.key, args.value, args.score_captures)
        return no_rows(*operands, accumulate_dtype(args.query.dtype))
    rows = _score_rows(args, grids, chunk)
    weights, total, lse = softmax_rows(rows.modified, wide=bool(args.options.get(wide_lse.OPTION)))
    weights = weights / total[..., None]
    weights = drop(weights, args.dropout_seed, args.options, rows.grid)
    out = combine_values(weights, args.value)
    return out.to(args.query.dtype), lse, rows.modified.amax(dim=-1)


def softmax_rows(scores: Tensor, *, wide: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """The parts of a softmax, differentiable any number of times.

    Args:
        scores: [..., N], -inf where not visible.
        wide: whether lse is fp64.

    Returns:
        Unnormalised weights [..., N], their divisor [...], and lse [...]. A row that sees nothing
        has weights 0, divisor 1 and lse -inf.
    """
    # Any shift gives the same weights, so none of its derivatives is needed.
    largest = scores.detach().amax(-1, keepdim=True)
    # A row that sees nothing would otherwise compute -inf less -inf.
    shift = torch.where(largest == float("-inf"), 0.0, largest)
    weights = torch.exp(scores - shift)
    total = weights.sum(-1)
    is_empty = total == 0.0
    total = torch.where(is_empty, 1.0, total)
    log, shift = torch.log(total), shift.squeeze(-1)
    sums = wide_lse.joined(shift, log) if wide else log + shift
    lse = torch.where(is_empty, float("-inf"), sums)
    return weights, total, lse


def _finite(lse: Tensor) -> Tensor:
    """Replace the lse -inf of a row that sees nothing by 0, which leaves its weights 0."""
    return torch.where(lse == float("-inf"), 0.0, lse)


def chunk_rows(elements_per_query: int) -> int:
    """Queries per chunk, given the number of scores per query."""
    return max(16, CHUNK_ELEMENTS // max(1, elements_per_query))


def chunks(args: Operands) -> Iterator[Chunk]:
    """Iterate over a call's queries in chunks; in one, if there are none or they have no data."""
    batch, heads, length, _ = args.query.shape
    rows = chunk_rows(batch * heads * args.key.size(2))
    if args.query.is_meta or hop.is_fake(args.query):
        rows = max(length, 1)
    for start in range(0, max(length, 1), rows):
        yield slice_chunk(args.query, start, min(start + rows, length))


def slice_chunk(query: Tensor, start: int, stop: int) -> Chunk:
    """Queries start..stop of [B, Hq, M, D]."""
    q_idx = torch.arange(start, stop, device=query.device, dtype=torch.int32)
    return Chunk(q_idx, lambda tensor: tensor[:, :, start:stop])


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of scores and sums."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _fold_group(tensor: Tensor, kv_heads: int) -> Tensor:
    """[B, Hq, m, E] -> [B, Hkv, G * m, E]: the queries of one group share their key head."""
    batch, heads, rows, width = tensor.shape
    return tensor.reshape(batch, kv_heads, heads // kv_heads * rows, width)


def _score_rows(args: Operands, grids: Grids, chunk: Chunk) -> _Rows:
    raw = dot_keys(chunk.pick(args.query), args.key) * args.scale
    b, h, _, kv_idx = index_grids(raw)
    index = (b, h, chunk.q_idx, kv_idx)
    modified = over_elements(args.score_mod, 1, (raw,), index, args.score_captures)
    visible = visible_keys(args, grids, index, raw)
    if chunk.live is not None:
        visible = visible & chunk.live[:, None]
    # The mask comes after score_mod, whose result for a hidden key may be anything, even NaN.
    modified = torch.where(visible, modified.to(raw.dtype), float("-inf"))
    return _Rows(raw, modified, visible, index)


def dot_keys(rows: Tensor, columns: Tensor) -> Tensor:
    """[B, Hq, m, E] x [B or 1, Hkv, N, E] -> [B, Hq, m, N], in fp32 (fp64 for fp64)."""
    dtype = accumulate_dtype(rows.dtype)
    folded = _fold_group(rows.to(dtype), columns.size(1))
    product = folded @ columns.to(dtype).transpose(-1, -2)
    return product.reshape(rows.size(0), rows.size(1), rows.size(2), columns.size(2))


def combine_values(weights: Tensor, value: Tensor) -> Tensor:
    """[B, Hq, m, N] x [B or 1, Hkv, N, Dv] -> [B, Hq, m, Dv]."""
    folded = _fold_group(weights, value.size(1)) @ value.to(weights.dtype)
    return folded.reshape(*weights.shape[:3], value.size(-1))


def index_grids(scores: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The 1-d index vectors b, h, q_idx, kv_idx, each counted from 0."""
    b, h, q_idx, kv_idx = (
        torch.arange(size, device=scores.device, dtype=torch.int32) for size in scores.shape
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
        leading: how many of `elements` precede the indices.
        elements: [B, Hq, m, N] each.
        index: the four index vectors.
        captures: passed whole.

    Returns:
        The results of `function`, every tensor expanded to [B, Hq, m, N].
    """
    trailing = len(elements) - leading
    mapped = function
    for position in reversed(range(4)):  # the innermost map is over keys
        index_dims = [0 if i == position else None for i in range(4)]
        dims = (*[0] * leading, *index_dims, *[0] * trailing, *[None] * len(captures))
        mapped = torch.vmap(mapped, in_dims=dims)
    with IndexMode():
        return mapped(*elements[:leading], *index, *elements[leading:], *captures)


def listed_blocks(args: Operands) -> Grids:
    """The block lists in dense form."""
    blocks = read_blocks(args)
    if blocks is None:
        return Grids()
    size = int(args.options["q_block_size"]), int(args.options["kv_block_size"])
    # One more than there are: PyTorch specialises on sizes of 1.
    columns = block_count(args.key.size(2), size[1]) + 1
    if isinstance(blocks, RangeTensors):
        seen = blocks.first_key, blocks.end_key.squeeze(-1)
        partial, full = ranges_to_dense(seen, columns, size)
        return Grids(partial, full) if args.options["has_full_blocks"] else Grids(partial | full)
    partial = lists_to_dense(blocks.kv_num_blocks, blocks.kv_indices, columns)
    if not args.options["has_full_blocks"]:
        return Grids(partial)
    full = lists_to_dense(blocks.full_kv_num_blocks, blocks.full_kv_indices, columns)
    return Grids(partial, full)


def visible_keys(
    args: Operands, grids: Grids, index: tuple[Tensor, ...], scores: Tensor
) -> Tensor:
    """Which keys each query of a chunk sees, [B, Hq, m, N] bool."""
    keep = over_elements(args.mask_mod, 0, (), index, args.mask_captures)
    # In this order: a full block overrules mask_mod, which may be asked about its padding.
    for blocks, combine in ((grids.partial, torch.logical_and), (grids.full, torch.logical_or)):
        if blocks is not None:
            q_block = index[2] // int(args.options["q_block_size"])
            kv_block = index[3] // int(args.options["kv_block_size"])
            keep = combine(keep, _per_element(blocks, q_block, kv_block))
    if grids.lengths is not None:
        keep = keep & (index[3] < grids.lengths[:, None, None, None])
    return keep.expand(scores.shape)


def _per_element(blocks: Tensor, q_block: Tensor, kv_block: Tensor) -> Tensor:
    return blocks[:, :, q_block][:, :, :, kv_block]


def attend_backward(args: BackwardArgs) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, ...]]:
    """Gradients of `attend`, from the saved out and lse.

    Returns:
        grad_query, grad_key, grad_value in their tensors' dtypes; one gradient per capture that
        has a site, in the order of the captures' positions.

    Source: Dao 2023, FlashAttention-2 (arXiv 2307.08691), algorithm 2, with the chain rule of
    score_mod.
    """
    grids = listed_blocks(args)
    grad_key, grad_value, captured = zero_totals(args)
    grad_query: list[Tensor] = []
    for chunk in chunks(args):
        rows, key_part, value_part, captured = grad_rows(args, grids, chunk, captured)
        grad_query.append(rows)
        grad_key += key_part
        grad_value += value_part
    return cast_gradients(args, torch.cat(grad_query, dim=2), grad_key, grad_value, captured)


Totals = tuple[Tensor, Tensor, tuple[Tensor, ...]]


def zero_totals(args: BackwardArgs) -> Totals:
    """Zeros to accumulate the gradients of key, value and captures."""
    dtype = accumulate_dtype(args.query.dtype)
    grad_key, grad_value = (
        torch.zeros(t.shape, dtype=dtype, device=t.device) for t in (args.key, args.value)
    )
    captured = tuple(
        torch.zeros(t.shape, dtype=torch.promote_types(dtype, t.dtype), device=args.query.device)
        for t in (args.score_captures[i] for i in learned_captures(args.sites))
    )
    return grad_key, grad_value, captured


def cast_gradients(
    args: BackwardArgs, grad_query: Tensor, grad_key: Tensor, grad_value: Tensor,
    captured: tuple[Tensor, ...],
) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, ...]]:  # fmt: skip
    """Gradients in the dtypes of their tensors."""
    likes = [args.score_captures[i] for i in learned_captures(args.sites)]
    return (
        grad_query.to(args.query.dtype),
        grad_key.to(args.key.dtype),
        grad_value.to(args.value.dtype),
        tuple(grad.to(like.dtype) for grad, like in zip(captured, likes, strict=True)),
    )


def grad_rows(
    args: BackwardArgs, grids: Grids, chunk: Chunk, captured: tuple[Tensor, ...]
) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, ...]]:
    """The contribution of one chunk of queries.

    Returns:
        Its rows of grad_query, its parts of grad_key and grad_value, and `captured` plus its part.
    """
    if is_nothing(args.query):
        grad_key, grad_value, _ = zero_totals(args)
        return chunk.pick(args.query).to(grad_key.dtype), grad_key, grad_value, captured
    rows = _score_rows(args, grids, chunk)
    dtype = rows.raw.dtype
    grad_out = chunk.pick(args.grad_out).to(dtype)
    if dtype == torch.float64:  # in which lse cannot be wide
        weights, total, _ = softmax_rows(rows.modified)
        weights = weights / total[..., None]
    else:  # from the saved lse, as in the kernels
        lse, rest = wide_lse.parts_of(_finite(chunk.pick(args.lse))[..., None])
        weights = torch.exp(rows.modified - lse - rest)
    delta = (grad_out * chunk.pick(args.out).to(dtype)).sum(-1)
    if args.grad_lse is not None:
        delta = delta - chunk.pick(args.grad_lse).to(dtype)
    drops = (args.dropout_seed, args.options, rows.grid)
    grad_weights = drop(dot_keys(grad_out, args.value), *drops)
    grad_modified = weights * (grad_weights - delta[..., None])
    elements = (rows.raw, grad_modified)
    outputs = over_elements(args.joint, 1, elements, rows.grid, args.score_captures)
    # A hidden score has no gradient, whatever the derivative of score_mod is there.
    grad_raw = torch.where(rows.visible, outputs[0].to(dtype), 0.0) * args.scale
    return (
        combine_values(grad_raw, args.key),
        _reduce_heads(grad_raw, chunk.pick(args.query).to(dtype), args.key),
        _reduce_heads(drop(weights, *drops), grad_out, args.value),
        _add_captured(args, captured, outputs, rows.visible),
    )


def _add_captured(
    args: BackwardArgs, captured: tuple[Tensor, ...], outputs: tuple[Tensor, ...], visible: Tensor
) -> tuple[Tensor, ...]:
    totals = dict(zip(learned_captures(args.sites), captured, strict=True))
    for site in unpack_sites(args.sites):
        totals[site.capture] = _scatter(totals[site.capture], site, outputs, visible)
    return tuple(totals.values())


def _scatter(total: Tensor, site: Site, outputs: tuple[Tensor, ...], visible: Tensor) -> Tensor:
    values = torch.where(visible, outputs[site.value].to(total.dtype), 0.0)
    # A captured 0-d tensor: every score adds to its one element.
    if not site.indices:
        return total + values.sum()
    indices = [outputs[i] for i in site.indices]
    for dim in range(values.dim()):
        # vmap expands values that do not vary: all elements along `dim` add to one place, so sum
        # them.
        if all(index.stride(dim) == 0 for index in indices):
            values = values.sum(dim, keepdim=True)
            indices = [index.narrow(dim, 0, 1) for index in indices]
    return total.index_put(tuple(index.long() for index in indices), values, accumulate=True)


def _reduce_heads(weights: Tensor, rows: Tensor, like: Tensor) -> Tensor:
    """weightsᵀ @ rows, summed over the query heads of a group and over a shared batch."""
    kv_heads = like.size(1)
    grad = _fold_group(weights, kv_heads).transpose(-1, -2) @ _fold_group(rows, kv_heads)
    return grad.sum(0, keepdim=True) if like.size(0) != grad.size(0) else grad
