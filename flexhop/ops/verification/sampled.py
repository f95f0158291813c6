"""The reference at some batches, heads, queries and keys, in fp64 or as plain PyTorch rounds it.

Memory is that of the sampled rows of scores, never S x S. `flexhop.verify` and FLEXHOP_VERIFY
compare kernels with it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexhop.block_mask.lists import block_count, find_ranges, lists_to_dense
from flexhop.ops.args import (
    AttentionArgs,
    BackwardArgs,
    BlockTensors,
    CachedArgs,
    RangeTensors,
    index_sizes,
    learned_captures,
    operands_of,
    read_blocks,
)
from flexhop.ops.cached_eager import lengths_of, sampled_keys
from flexhop.ops.dropout import drop
from flexhop.ops.eager import (
    accumulate_dtype,
    attend_backward,
    chunk_rows,
    over_elements,
    softmax_rows,
)

# Captured tensors up to this size are converted to fp64; larger ones stay as they are.
WIDENED_ELEMENTS = 1 << 22

Call = AttentionArgs | BackwardArgs


class Sample(NamedTuple):
    """Where to look: positions, [n] int64 each."""

    batches: Tensor
    kv_heads: Tensor
    rows: Tensor
    keys: Tensor


def key_length(args: Any) -> int:
    """N; with pages, what the table has room for."""
    return int(index_sizes(args)[3])


def some_places(length: int, count: int, generator: torch.Generator) -> Tensor:
    """Some positions in order: the first, the last, and random others; [n] int64 on the CPU."""
    inner = torch.randint(length, (max(0, count - 2),), generator=generator)
    return torch.cat([inner, torch.tensor([0, length - 1])]).unique()


def whole_sample(args: Any, rows: Tensor, keys: Tensor) -> Sample:
    """A sample of all batches and heads."""
    sizes = (args.query.size(0), args.key.size(1))
    batches, heads = (torch.arange(n, device=rows.device) for n in sizes)
    return Sample(batches, heads, rows, keys)


class Part(NamedTuple):
    """The sampled batches and heads of a call, in one dtype.

    args: the call; its query, key, value and blocks are those of all batches and heads.
    key, value: [b, h, N, D], one head per query head. batches, heads: [b] and [h].
    group: query heads per key head. lengths: [b], number of keys of each batch; None: all.
    """

    args: Call
    dtype: torch.dtype
    key: Tensor
    value: Tensor
    batches: Tensor
    heads: Tensor
    group: int
    lengths: Tensor | None = None

    def rows_of(self, tensor: Tensor, rows: Tensor) -> Tensor:
        """[B, Hq, M, ...] -> [b, h, m, ...] in the part's dtype."""
        found = tensor.index_select(0, self.batches).index_select(1, self.heads)
        return found.index_select(2, rows).to(self.dtype)


class _Scores(NamedTuple):
    raw: Tensor  # [b, h, m, n] scaled products
    modified: Tensor  # after score_mod, -inf if hidden
    visible: Tensor
    places: tuple[Tensor, ...]  # b, h, q_idx, kv_idx, int32


def take_part(args: Call | CachedArgs, sample: Sample, *, wide: bool) -> Part:
    """The operands of a sample.

    Args:
        args: the call. The gradients of a key that all batches share need every batch.
        sample: which batches and heads.
        wide: whether to compute in fp64.
    """
    dtype = torch.float64 if wide else args.query.dtype
    lengths = None
    if isinstance(args, CachedArgs):
        lengths = lengths_of(args)
        lengths = None if lengths is None else lengths.index_select(0, sample.batches)
        pair = sampled_keys(args, sample.batches, sample.kv_heads, dtype)
        call = operands_of(AttentionArgs, args)._replace(key=pair[0], value=pair[1])
    else:
        call = args
        pair = tuple(_of_heads(t, sample).to(dtype) for t in (args.key, args.value))
    group = args.query.size(1) // args.key.size(1)
    places = torch.arange(group, device=sample.kv_heads.device)
    heads = (sample.kv_heads[:, None] * group + places).flatten()
    key, value = (t.repeat_interleave(group, dim=1) for t in pair)
    captures = tuple(_widened(c, wide) for c in args.score_captures)
    masks = tuple(_widened(c, wide) for c in args.mask_captures)
    call = call._replace(score_captures=captures, mask_captures=masks)
    return Part(call, dtype, key, value, sample.batches, heads, group, lengths)


def _of_heads(tensor: Tensor, sample: Sample) -> Tensor:
    """[B or 1, Hkv, N, E] -> [b, hkv, N, E]."""
    found = tensor.detach().index_select(1, sample.kv_heads)
    if tensor.size(0) == 1:
        return found.expand(len(sample.batches), -1, -1, -1)
    return found.index_select(0, sample.batches)


def _widened(value: Any, wide: bool) -> Any:
    if not isinstance(value, Tensor):
        return value
    value = value.detach()
    is_small = value.is_floating_point() and value.numel() <= WIDENED_ELEMENTS
    return value.double() if wide and is_small else value


def score_rows(part: Part, rows: Tensor) -> _Scores:
    """The scores of some queries with every key."""
    keys = torch.arange(part.key.size(2), device=rows.device)
    return _scores(part, part.rows_of(part.args.query, rows), part.key, (rows, keys))


def query_rows(part: Part, rows: Tensor) -> dict[str, Tensor]:
    """out, lse, max_scores and, of a backward call, grad_query: [b, h, m, ...].

    Products are in the part's dtype, the rest in fp32 (fp64 for fp64).
    """
    found = [_query_part(part, chunk) for chunk in _chunks(part, rows, part.key.size(2))]
    return {name: torch.cat([one[name] for one in found], 2) for name in found[0]}


def _query_part(part: Part, rows: Tensor) -> dict[str, Tensor]:
    args, scores = part.args, score_rows(part, rows)
    weights, total, lse = softmax_rows(scores.modified)
    weights = weights / total[..., None]
    drops = (args.dropout_seed, args.options, scores.places)
    out = drop(weights, *drops).to(part.dtype) @ part.value
    if not isinstance(args, BackwardArgs):
        return {"out": out, "lse": lse, "max_scores": scores.modified.amax(-1)}
    grad_out = part.rows_of(args.grad_out, rows)
    delta = (grad_out * out).to(lse.dtype).sum(-1, keepdim=True)
    if args.grad_lse is not None:
        delta = delta - part.rows_of(args.grad_lse, rows).to(lse.dtype)[..., None]
    grad_weights = drop((grad_out @ part.value.mT).to(lse.dtype), *drops)
    grad = _grad_scores(part, scores, weights * (grad_weights - delta))
    return {"grad_query": grad.to(part.dtype) @ part.key}


def _grad_scores(part: Part, scores: _Scores, grad_modified: Tensor) -> Tensor:
    """Gradients of the unscaled products."""
    args: Any = part.args
    elements = (scores.raw, grad_modified)
    outputs = over_elements(args.joint, 1, elements, scores.places, args.score_captures)
    grad = outputs[0].to(scores.raw.dtype)
    return torch.where(scores.visible, grad, 0.0) * args.scale


def key_rows(part: Part, keys: Tensor) -> dict[str, Tensor]:
    """grad_key and grad_value of some keys, [b or 1, hkv, n, E], from out and lse."""
    args = part.args
    narrow = part._replace(key=part.key.index_select(2, keys), value=part.value[:, :, keys])
    rows = torch.arange(args.query.size(2), device=keys.device)
    totals: tuple[Tensor, ...] = ()
    for chunk in _chunks(part, rows, len(keys)):
        found = _key_part(narrow, (chunk, keys))
        totals = tuple(a + b for a, b in zip(totals, found, strict=True)) if totals else found
    names = ("grad_key", "grad_value")
    return {name: total.to(part.dtype) for name, total in zip(names, totals, strict=True)}


def _key_part(part: Part, places: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """The contribution of some queries to the gradients of some keys and values."""
    args: Any = part.args
    query, out, grad_out = (
        part.rows_of(t, places[0]) for t in (args.query, args.out, args.grad_out)
    )
    scores = _scores(part, query, part.key, places)
    wide = scores.raw.dtype
    lse = args.lse.index_select(0, part.batches).index_select(1, part.heads)
    lse = lse.index_select(2, places[0]).to(wide)
    weights = torch.exp(scores.modified - torch.where(lse.isneginf(), 0.0, lse)[..., None])
    delta = (grad_out.to(wide) * out.to(wide)).sum(-1, keepdim=True)
    if args.grad_lse is not None:
        delta = delta - part.rows_of(args.grad_lse, places[0]).to(wide)[..., None]
    drops = (args.dropout_seed, args.options, scores.places)
    grad_weights = drop((grad_out @ part.value.mT).to(wide), *drops)
    grad = _grad_scores(part, scores, weights * (grad_weights - delta))
    pairs = ((grad, query), (drop(weights, *drops), grad_out))
    return tuple(
        _sum_heads((left.to(part.dtype).mT @ right).to(wide), part) for left, right in pairs
    )


def _sum_heads(grad: Tensor, part: Part) -> Tensor:
    """[b, h, n, E] -> [b, hkv, n, E], or [1, hkv, n, E] of a key that all batches share."""
    grad = grad.unflatten(1, (-1, part.group)).sum(2)
    return grad.sum(0, keepdim=True) if part.args.key.size(0) == 1 else grad


def captured_gradients(args: BackwardArgs, *, wide: bool) -> dict[str, Tensor]:
    """Whole gradients of captured tensors, from every score, a chunk of queries at a time."""
    if not args.sites:
        return {}
    if wide:
        names = ("query", "key", "value", "out", "grad_out")
        changes: dict[str, Any] = {name: getattr(args, name).double() for name in names}
        for name in ("score_captures", "mask_captures"):
            changes[name] = tuple(_widened(value, True) for value in getattr(args, name))
        args = args._replace(**changes)
    found = attend_backward(args)[3]
    places = learned_captures(args.sites)
    return {f"grad_capture_{n}": grad for n, grad in zip(places, found, strict=True)}


def _scores(part: Part, query: Tensor, key: Tensor, places: tuple[Tensor, Tensor]) -> _Scores:
    args, wide = part.args, accumulate_dtype(part.dtype)
    raw = (query @ key.mT).to(wide) * args.scale
    b, h, rows, keys = (t.int() for t in (part.batches, part.heads, *places))
    index = (b, h, rows, keys)
    modified = over_elements(args.score_mod, 1, (raw,), index, args.score_captures)
    visible = _visible(part, index).expand(raw.shape)
    modified = torch.where(visible, modified.to(wide), float("-inf"))
    return _Scores(raw, modified, visible, index)


def _visible(part: Part, index: tuple[Tensor, ...]) -> Tensor:
    """Which keys each query sees: [b, h, m, n], or what expands to it."""
    keep = over_elements(part.args.mask_mod, 0, (), index, part.args.mask_captures)
    partial, full = _listed(part.args, tuple(t.long() for t in index))
    keep = keep if partial is None else keep & partial
    keep = keep if full is None else keep | full
    if part.lengths is not None:
        keep = keep & (index[3] < part.lengths[:, None, None, None])
    return keep


def _listed(args: Call, index: tuple[Tensor, ...]) -> tuple[Tensor | None, Tensor | None]:
    """Which scores lie in partial and in full blocks; None if there are no lists of them."""
    blocks = read_blocks(args)
    if blocks is None:
        return None, None
    _, _, rows, keys = index
    size = int(args.options["q_block_size"]), int(args.options["kv_block_size"])
    rows, keys = rows // size[0], keys // size[1]
    columns = block_count(args.key.size(2), size[1]) + 1
    if isinstance(blocks, RangeTensors):
        seen = blocks.first_key, blocks.end_key.squeeze(-1)
        ranges = (t[..., rows, None] for t in find_ranges(seen, columns, size))
        start, stop, full_start, full_count = ranges
        full = (keys >= full_start) & (keys < full_start + full_count)
        partial = (keys >= start) & (keys < stop) & ~full
    else:
        partial, full = (
            _marked(pair, (*index[:2], rows), columns)[..., keys]
            for pair in (blocks[:2], blocks[2:4])
        )
    if args.options["has_full_blocks"]:
        return partial, full
    return (partial | full if isinstance(blocks, RangeTensors) else partial), None


def _marked(pair: tuple[Tensor, ...], index: tuple[Tensor, ...], columns: int) -> Tensor:
    """The listed columns of some rows of blocks: [b or 1, h or 1, m, C] bool."""
    chosen = []
    for tensor in pair:
        for dim, places in enumerate(index[:2]):
            tensor = tensor if tensor.size(dim) == 1 else tensor.index_select(dim, places)
        chosen.append(tensor.index_select(2, index[2]))
    return lists_to_dense(chosen[0], chosen[1], columns)


def _chunks(part: Part, rows: Tensor, keys: int) -> Iterator[Tensor]:
    blocks = part.args.blocks
    width = blocks[1].size(-1) if len(blocks) == len(BlockTensors._fields) else 1
    count = len(part.batches) * len(part.heads)
    yield from rows.split(max(1, chunk_rows(count * max(keys, width))))
