"""DTensor operands: each rank attends to its own batches and heads.

Attention of a batch and head needs no other, so nothing is gathered. A rank computes with local
tensors whose batches and heads count from 0. Mods, block lists and sinks are shifted to match, and
gradients of captured tensors are summed over the ranks that hold other shards.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexhop import errors
from flexhop.attention import attend
from flexhop.compat import dtensors
from flexhop.distributed.views import View
from flexhop.mods.functions import MaskMod, ScoreMod
from flexhop.ops.args import score_examples
from flexhop.ops.call import Mistake, note_mistake
from flexhop.ops.replicated import SLOT, VIEW, sum_gradient, with_local_captures
from flexhop.sequences.ranges import RangeMask

BATCH, HEAD = 0, 1


class Run(NamedTuple):
    """The batches, or the heads, of a rank: `length` of them, from `start` on."""

    start: int
    length: int


class _Layout(NamedTuple):
    """A rank's part of a call.

    is_split: for each mesh dimension, whether ranks have different queries. groups:
    comma-separated names of the process groups of those dimensions.
    """

    batches: Run
    heads: Run
    is_split: tuple[bool, ...]
    groups: str


def attend_dtensors(
    query: Any, key: Any, value: Any, score_mod: ScoreMod | None, block_mask: Any,
    *choices: Any, sinks: Tensor | None = None, mistake: Mistake | None = None, **more: Any,
) -> Any:  # fmt: skip
    """`flexhop.attention.attend` with DTensors for query, key and value.

    Returns:
        Results as DTensors, placed like query.
    """
    mistake = mistake or _mistake(query, key, value)
    if mistake is None and more.get("cache") is not None:
        mistake = _placed_wrongly(
            "key", "a DTensor", "caches are plain tensors", "Give a rank's own part of the cache"
        )
    if mistake is not None:
        # A call on plain tensors raises it, compiled or not.
        q, k, v = [t.to_local() if dtensors.is_dtensor(t) else t for t in (query, key, value)]
        return attend(q, k, v, None, None, *choices, mistake=mistake, **more)
    layout = _layout(query)
    operands = (
        dtensors.local_part(query, (False,) * len(layout.is_split)),
        _local_keys(query, key, layout),
        _local_keys(query, value, layout),
    )
    first = layout.batches.start, layout.heads.start
    if block_mask is not None:
        block_mask = _local_mask(block_mask, layout)
    if sinks is not None:
        sinks = _local_sinks(sinks, layout)
    if score_mod is not None:
        local = score_mod
        if not torch.compiler.is_compiling():
            local = with_local_captures(local, score_examples(operands[0].device))
        score_mod = shift_score_mod(local, *first)
    result = attend(
        *operands, score_mod, block_mask, *choices, sinks=sinks, sum_groups=layout.groups,
        first=first, **more,
    )  # fmt: skip
    return _wrapped(result, query)


def _wrapped(result: Any, query: Tensor) -> Any:
    if isinstance(result, Tensor):
        return dtensors.from_parts(result, query)
    if result is None:
        return None
    parts = [_wrapped(part, query) for part in result]
    return type(result)(*parts) if hasattr(result, "_fields") else tuple(parts)


def _layout(query: Any) -> _Layout:
    count, start = {BATCH: query.size(BATCH), HEAD: query.size(HEAD)}, {BATCH: 0, HEAD: 0}
    axes, kinds = dtensors.axes_of(query.device_mesh), dtensors.kinds_of(query)
    for axis, kind in zip(axes, kinds, strict=True):
        if kind in (BATCH, HEAD):
            count[kind] //= axis.size
            start[kind] += axis.place * count[kind]
    is_split = tuple(kind in (BATCH, HEAD) for kind in kinds)
    names = [axis.group for axis, split in zip(axes, is_split, strict=True) if split]
    batches, heads = [Run(start[dim], count[dim]) for dim in (BATCH, HEAD)]
    return _Layout(batches, heads, is_split, ",".join(names))


def _mistake(query: Any, key: Any, value: Any) -> Mistake | None:
    """What is wrong with the operands' placements."""
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if not dtensors.is_dtensor(tensor):
            return _placed_wrongly(
                name, "a plain tensor", "the other operands are DTensors",
                "Make one of it with DTensor.from_local or distribute_tensor",
            )  # fmt: skip
        if tensor.device_mesh != query.device_mesh:
            return _placed_wrongly(
                name, "a DTensor of another mesh", "all operands need one mesh",
                "Redistribute it to the mesh of query",
            )  # fmt: skip
    for dim, axis in enumerate(dtensors.axes_of(query.device_mesh)):
        found = _mistake_in(dim, axis.size, query, key, value)
        if found is not None:
            return found
    return None


def _mistake_in(dim: int, size: int, query: Any, key: Any, value: Any) -> Mistake | None:
    """The same in one dimension of the mesh."""
    kind = dtensors.kinds_of(query)[dim]
    hint = "Call query.redistribute(placements=[...]) with Shard(0), Shard(1) or Replicate() there"
    if kind == 2:
        hint = (
            "Call query.redistribute(placements=[...]) with Replicate() there, or divide tokens "
            "by flexhop.distributed.context_parallel"
        )
    if kind not in (BATCH, HEAD, "whole"):
        wanted = "a rank needs whole tokens of its batches and heads"
        return _placed_wrongly("query", _words(query), wanted, hint)
    for name, tensor in (("key", key), ("value", value)):
        own = dtensors.kinds_of(tensor)[dim]
        is_shared = own == "whole" and (kind == HEAD or (kind == BATCH and tensor.size(0) == 1))
        if own != kind and not is_shared:
            return _placed_wrongly(
                name, _words(tensor), f"query is placed as {_words(query)}",
                f"Call {name}.redistribute(placements=query.placements)",
            )  # fmt: skip
        if own == kind and kind in (BATCH, HEAD) and tensor.size(kind) % size:
            return _uneven(name, tensor, kind, size)
    if kind in (BATCH, HEAD) and query.size(kind) % size:
        return _uneven("query", query, kind, size)
    return None


def _uneven(name: str, tensor: Any, kind: Any, size: int) -> Mistake:
    what = "batches" if kind == BATCH else "heads"
    return _placed_wrongly(
        name, _words(tensor), f"its {tensor.size(kind)} {what} cannot be divided by {size} ranks",
        f"Call {name}.redistribute(placements=[...]) with Replicate() there",
    )  # fmt: skip


def _words(tensor: Any) -> str:
    return str(tuple(str(placement) for placement in tensor.placements))


def _placed_wrongly(argument: str, found: str, expected: str, hint: str) -> Mistake:
    return note_mistake(
        errors.PlacementError, argument=argument, found=found, expected=expected, hint=hint
    )


def _local_keys(query: Any, key: Any, layout: _Layout) -> Tensor:
    """A rank's keys or values; of replicated heads, those that its queries read."""
    queries, own = dtensors.kinds_of(query), dtensors.kinds_of(key)
    shared = tuple(k == "whole" and q != "whole" for q, k in zip(queries, own, strict=True))
    local = dtensors.local_part(key, shared)
    if not any(q == HEAD and k == "whole" for q, k in zip(queries, own, strict=True)):
        return local
    group = query.size(HEAD) // key.size(HEAD)
    first, last = (
        layout.heads.start // group,
        (layout.heads.start + layout.heads.length - 1) // group,
    )
    return local[:, first : last + 1]


def _local_sinks(sinks: Any, layout: _Layout) -> Tensor:
    """Sinks of the rank's heads; their gradient is summed over ranks."""
    whole = dtensors.whole_part(sinks) if dtensors.is_dtensor(sinks) else sinks
    whole = sum_gradient(whole, layout.groups)
    return whole[layout.heads.start : layout.heads.start + layout.heads.length]


def shift_score_mod(score_mod: ScoreMod, batch: int = 0, head: int = 0) -> ScoreMod:
    """A score_mod for some of the batches and heads, which calls score_mod with global indices.

    Args:
        score_mod: (score, b, h, q_idx, kv_idx) -> score of all batches and heads.
        batch: global index of the call's first batch.
        head: global index of the call's first query head.
    """

    def shifted(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score_mod(score, b + batch, h + head, q_idx, kv_idx)

    return shifted if batch or head else score_mod


def shift_mask_mod(mask_mod: MaskMod, batch: int = 0, head: int = 0) -> MaskMod:
    """The same for a mask_mod."""

    def shifted_mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return mask_mod(b + batch, h + head, q_idx, kv_idx)

    return shifted_mask if batch or head else mask_mod


class LocalMask(NamedTuple):
    """The part of a block mask for some batches and heads; fields as in BlockMask."""

    seq_lengths: tuple[int, int]
    BLOCK_SIZE: tuple[int, int]
    mask_mod: MaskMod
    kv_num_blocks: Tensor | None = None
    kv_indices: Tensor | None = None
    full_kv_num_blocks: Tensor | None = None
    full_kv_indices: Tensor | None = None
    q_num_blocks: Tensor | None = None
    q_indices: Tensor | None = None
    full_q_num_blocks: Tensor | None = None
    full_q_indices: Tensor | None = None
    flexhop_view: View | None = None


_LISTS = LocalMask._fields[3:11]


def local_block_mask(block_mask: Any, batches: Run, heads: Run) -> LocalMask | RangeMask:
    """The part of a block mask for some batches and heads.

    Args:
        block_mask: the mask of all batches and heads.
        batches: (start, count) of the call's batches.
        heads: (start, count) of the call's query heads.
    """
    batches, heads = Run(*batches), Run(*heads)
    if isinstance(block_mask, RangeMask):  # one for all batches and heads
        shifted = shift_mask_mod(block_mask.mask_mod, batches.start, heads.start)
        return block_mask._replace(mask_mod=shifted)

    def pick(tensor: Tensor | None) -> Tensor | None:
        for dim, run in ((BATCH, batches), (HEAD, heads)):
            if tensor is not None and tensor.size(dim) != 1:
                tensor = tensor.narrow(dim, run.start, run.length)
        return tensor

    view = getattr(block_mask, VIEW, None) if SLOT.current is not None else None
    if view is not None:
        parts = tuple(p._replace(blocks=tuple(map(pick, p.blocks))) for p in view.parts)
        view = view._replace(parts=parts)
    lists = {} if view is not None else {n: pick(getattr(block_mask, n)) for n in _LISTS}
    return LocalMask(
        getattr(block_mask, "seq_lengths", (0, 0)), getattr(block_mask, "BLOCK_SIZE", (0, 0)),
        shift_mask_mod(block_mask.mask_mod, batches.start, heads.start), **lists,
        flexhop_view=view,
    )  # fmt: skip


def _local_mask(block_mask: Any, layout: _Layout) -> Any:
    return local_block_mask(block_mask, layout.batches, layout.heads)
