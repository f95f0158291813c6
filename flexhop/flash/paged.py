"""flash_attn_varlen_func with a block_table: packed queries, paged keys.

Packed queries are scattered to rows of one length, a batch for the kernels. Keys stay in place.
"""

from __future__ import annotations

from typing import NamedTuple, cast

import torch
from torch import Tensor

from flexhop.attention import AuxOutput, AuxRequest, attend
from flexhop.block_mask.lists import RangeLists, list_rows
from flexhop.block_mask.mask import BlockMask
from flexhop.cache.reading import CacheReading
from flexhop.flash.cache import SeenKeys
from flexhop.flash.options import BLOCK, Options, argument_mistake, score_mod_of, unsupported
from flexhop.mods.keys import noop_key
from flexhop.ops.call import Mistake, note_rank


class PagedCall(NamedTuple):
    """Packed queries [T, Hq, D] and pages of keys [P, page, Hkv, D], as given."""

    q: Tensor
    k: Tensor
    v: Tensor
    offsets_q: Tensor
    offsets_k: Tensor
    longest_q: int
    block_table: Tensor


def paged_mistake(call: PagedCall) -> Mistake | None:
    """The first invalid argument of a call, or None; reads no values."""
    mistake = note_rank(3, q=call.q) or note_rank(4, k=call.k, v=call.v)
    mistake = mistake or note_rank(1, cu_seqlens_q=call.offsets_q, cu_seqlens_k=call.offsets_k)
    mistake = mistake or note_rank(2, block_table=call.block_table)
    if mistake is not None:
        return mistake
    if torch.is_grad_enabled() and any(t.requires_grad for t in call[:3]):
        return unsupported(
            "A gradient of flash_attn_varlen_func with block_table",
            "it reads a cache, which is filled without gradients", "Call it under torch.no_grad()",
        )  # fmt: skip
    sequences = call.offsets_q.size(0) - 1
    sizes = {"cu_seqlens_k": call.offsets_k.size(0) - 1, "block_table": call.block_table.size(0)}
    for name, found in sizes.items():
        if found != sequences:
            found = f"is for {found} sequences"
            return argument_mistake(name, found, f"cu_seqlens_q is for {sequences}")
    if call.block_table.dtype not in (torch.int32, torch.int64):
        found = f"is {call.block_table.dtype}"
        return argument_mistake("block_table", found, "must be int32 or int64")
    return None


def attend_pages(call: PagedCall, options: Options) -> tuple[Tensor, Tensor | None]:
    """out [T, Hq, Dv], and lse [Hq, T] if requested."""
    starts = call.offsets_q[:-1]
    counts, used = call.offsets_q.diff(), call.offsets_k.diff().to(torch.int32)
    position = starts[:, None] + torch.arange(call.longest_q, device=call.q.device)
    # Sequences shorter than the longest repeat some token. Nobody takes these results.
    rows = call.q[position.clamp(0, call.q.size(0) - 1)]  # [S, M, Hq, D]
    aligned = used - counts
    seen = SeenKeys(aligned, None, used, options.reach)
    score_mod = score_mod_of(options, aligned)
    pages = (call.block_table.to(torch.int32), used)
    result = attend(
        rows.transpose(1, 2), call.k.transpose(1, 2), call.v.transpose(1, 2), score_mod,
        _block_mask(call, seen), options.softmax_scale, True, False, None,
        AuxRequest(lse=options.return_attn_probs),
        cache=CacheReading(noop_key, noop_key, pages),
    )  # fmt: skip
    out, aux = cast(tuple[Tensor, AuxOutput], result)
    token = torch.arange(call.q.size(0), device=call.q.device)
    sequence = torch.searchsorted(call.offsets_q[1:], token, right=True)
    sequence = sequence.clamp(max=starts.size(0) - 1)
    place = (token - starts[sequence]).clamp(0, call.longest_q - 1)
    packed = out.transpose(1, 2)[sequence, place]
    return packed, None if aux.lse is None else aux.lse.transpose(1, 2)[sequence, place].t()


def _block_mask(call: PagedCall, seen: SeenKeys) -> BlockMask:
    length = call.block_table.size(1) * call.k.size(1)
    lists = list_rows(
        seen.ranges(call.longest_q), length, (BLOCK, BLOCK), (length + BLOCK - 1) // BLOCK
    )
    row = RangeLists(*(t[:, None] for t in lists))
    size = (call.longest_q, length)
    return BlockMask(size, *row, None, None, None, None, (BLOCK, BLOCK), seen.mask_mod())
