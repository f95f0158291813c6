"""flash_attn_with_kvcache: append to a cache in place, then attend to it in place.

The cache may be one tensor per batch, a pool of keys that all batches share (block lists then name
each sequence's blocks), or paged. Nothing is gathered or copied.
"""

from __future__ import annotations

from typing import NamedTuple, cast

import torch
from torch import Tensor

from flexhop.attention import AuxOutput, AuxRequest, attend
from flexhop.block_mask.lists import RangeLists, list_rows
from flexhop.block_mask.mask import BlockMask
from flexhop.cache.reading import CacheReading
from flexhop.flash.cache_checks import CacheCall, cache_mistake
from flexhop.flash.options import BLOCK, Options, option_mistake, refuse, score_mod_of
from flexhop.mods.functions import MaskMod, ScoreMod
from flexhop.mods.keys import noop_key
from flexhop.ops.call import Mistake
from flexhop.options import KernelOptions


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Append new keys and values to a cache, then attend to the cache with new queries.

    Has no gradient, as in flash-attn. New values of tensor arguments never recompile; a new int in
    cache_seqlens may, once.

    Args:
        q: [B, M, Hq, D].
        k_cache: [Bc, N, Hkv, D]; v_cache: [Bc, N, Hkv, Dv]. With block_table they are pages:
            [P, page, Hkv, D], of any size.
        k, v: [B, L, Hkv, D] and [B, L, Hkv, Dv], written in place from cache_seqlens on.
        rotary_cos, rotary_sin: [at least N, R / 2]: rotate the first R columns of k and q by their
            position in the cache. Without causal and window, all queries have the position of the
            first.
        cache_seqlens: int or [B] int32 or int64: tokens in the cache before the call, including
            left padding; by default all of it.
        cache_batch_idx: [B] int32 or int64: which row of the cache each batch uses.
        cache_leftpad: [B] int32 or int64: where each sequence starts in the cache.
        block_table: [B, pages per sequence] int32 or int64: the pages of each sequence, in order.
        softmax_scale, causal, window_size, softcap, alibi_slopes: as in flexhop.flash. The last
            query is aligned with the last token of the cache, new ones included.
        rotary_interleaved: see `rotate`.
        num_splits: number of splits of the keys in the decode kernel; 0 lets flexhop choose.
        return_softmax_lse: also return lse.

    Returns:
        out [B, M, Hq, Dv]; with return_softmax_lse (out, lse [B, Hq, M] fp32).

    Raises:
        FlashArgumentError: tensors that do not match; without torch.compile also lengths, rows or
            pages outside the cache.
        UnsupportedFeatureError: an operand requires a gradient and gradients are enabled.
        FlexhopError: as for flex_attention.

    Source: flash_attn.flash_attn_with_kvcache (flash-attn 2.8).
    """
    options = Options(
        0.0, softmax_scale, causal, window_size, softcap, alibi_slopes, return_softmax_lse
    )
    call = CacheCall(
        q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, cache_seqlens, cache_batch_idx,
        cache_leftpad, block_table, num_splits,
    )  # fmt: skip
    mistake = _find_mistake(call, options)
    if mistake is not None:
        return refuse(q, k_cache, v_cache, mistake)
    place = _locate(call)
    if k is not None and v is not None:
        rotation = _rotation(call, interleaved=rotary_interleaved)
        # As in flash-attn: without a mask by position, all queries are rotated by the first one's.
        q = rotation.turn(q, place.before, spread=causal or options.reach != (None, None))
        _append(call, place, rotation.turn(k, place.before, spread=True), v)
    return _attend(q, call, place, options)


def _find_mistake(call: CacheCall, options: Options) -> Mistake | None:
    mistake = cache_mistake(call)
    return mistake or option_mistake(options, call.q.size(2), call.q.size(0))


class _Place(NamedTuple):
    """Where the sequences are in the cache, in tokens; [B] integers each."""

    before: Tensor  # tokens before the call
    used: Tensor  # tokens in use, new ones included
    begin: Tensor | None  # the first token in use, if not 0
    rows: Tensor | None  # which rows of the cache they use, if rows are shared


def _locate(call: CacheCall) -> _Place:
    batch, device = call.q.size(0), call.q.device
    before = call.cache_seqlens
    if not isinstance(before, Tensor):
        length = call.length if before is None else before
        before = torch.full((batch,), length, dtype=torch.int32, device=device)
    used = before if call.k is None else before + call.k.size(1)
    return _Place(before, used, call.cache_leftpad, call.cache_batch_idx)


class _Rotation(NamedTuple):
    cos: Tensor | None
    sin: Tensor | None
    interleaved: bool

    def turn(self, x: Tensor, before: Tensor, *, spread: bool) -> Tensor:
        """Rotate x [B, S, H, D] by positions from `before` on; all by the first unless
        `spread`."""
        if self.cos is None or self.sin is None:
            return x
        positions = before[:, None]
        if spread:
            positions = positions + torch.arange(x.size(1), device=x.device)
        return rotate(x, self.cos, self.sin, positions, interleaved=self.interleaved)


def _rotation(call: CacheCall, *, interleaved: bool) -> _Rotation:
    return _Rotation(call.rotary_cos, call.rotary_sin, interleaved)


def _append(call: CacheCall, place: _Place, k: Tensor, v: Tensor) -> None:
    """Write new tokens to the cache; the rest of it is not touched."""
    position = place.before[:, None] + torch.arange(k.size(1), device=k.device)
    if call.block_table is not None:
        row = call.block_table.gather(1, (position // call.page).long())
        position = position % call.page
    elif place.rows is not None:
        row = place.rows[:, None]
    else:
        row = torch.arange(k.size(0), device=k.device)[:, None]
    # In place, and before attention reads the cache: the new tokens are seen, too.
    call.k_cache.index_put_((row, position), k)
    call.v_cache.index_put_((row, position), v)


class SeenKeys(NamedTuple):
    """The keys that each sequence's queries see, in closed form; [B] each.

    aligned: the key that query 0 is aligned with. begin, used: the range of keys in use.
    """

    aligned: Tensor
    begin: Tensor | None
    used: Tensor
    reach: tuple[int | None, int | None]

    def ranges(self, queries: int) -> tuple[Tensor, Tensor]:
        """first, end [B, M]: query i sees keys first[i] .. end[i] - 1."""
        aligned = self.aligned[:, None] + torch.arange(queries, device=self.aligned.device)
        used, (left, right) = self.used[:, None], self.reach
        lowest = torch.zeros_like(used) if self.begin is None else self.begin[:, None]
        first = lowest if left is None else torch.maximum(aligned - left, lowest)
        end = used if right is None else torch.maximum(aligned + right + 1, lowest)
        return torch.minimum(first, used).expand_as(aligned), torch.minimum(end, used).expand_as(
            aligned
        )

    def mask_mod(self) -> MaskMod:
        """The same for one query and key, as positions in the sequence."""
        aligned, begin, used, (left, right) = self

        def cache_mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            lowest = 0 if begin is None else begin[b]
            keep = (kv_idx >= lowest) & (kv_idx < used[b])
            if left is not None:
                keep = keep & (kv_idx >= q_idx + aligned[b] - left)
            if right is not None:
                keep = keep & (kv_idx <= q_idx + aligned[b] + right)
            return keep

        return cache_mask


def _attend(
    q: Tensor, call: CacheCall, place: _Place, options: Options
) -> Tensor | tuple[Tensor, Tensor]:
    left, right = options.reach
    queries = q.size(1)
    # A single query is the last one: no key follows it.
    seen = SeenKeys(
        place.used - queries, place.begin, place.used, (left, None if queries == 1 else right)
    )
    pool, score_mod = _pool(call, place), score_mod_of(options, seen.aligned)
    block_mask = pool.block_mask(seen, queries)
    splits = KernelOptions(splits=call.num_splits) if call.num_splits > 0 else None
    result = attend(
        q.transpose(1, 2), pool.keys, pool.values,
        None if score_mod is None else pool.local_score_mod(score_mod), block_mask,
        options.softmax_scale, True, False, splits, AuxRequest(lse=options.return_attn_probs),
        cache=_reading(call, place),
    )  # fmt: skip
    out, aux = cast(tuple[Tensor, AuxOutput], result)
    out = out.transpose(1, 2)
    return (out, cast(Tensor, aux.lse)) if options.return_attn_probs else out


def _reading(call: CacheCall, place: _Place) -> CacheReading | None:
    """How to find keys in pages, if the cache is paged."""
    if call.block_table is None:
        return None
    pages = (call.block_table.to(torch.int32), place.used.to(torch.int32))
    return CacheReading(noop_key, noop_key, pages)


class _Pool(NamedTuple):
    """The cache as operands, and the mapping from cache positions to sequence positions.

    keys, values: [B or 1, Hkv, all keys, D], or pages. span: keys that the operator sees. length:
    the most keys of a sequence. start: [B], where the row of each sequence begins.
    """

    keys: Tensor
    values: Tensor
    span: int
    length: int
    start: Tensor | None = None

    def local(self, b: Tensor, kv_idx: Tensor) -> Tensor:
        """The position within sequence b."""
        return kv_idx if self.start is None else kv_idx - self.start[b]

    def local_score_mod(self, score_mod: ScoreMod) -> ScoreMod:
        """A score_mod of the operands that calls score_mod with positions in the sequence."""

        def pool_score(
            score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor
        ) -> Tensor:
            return score_mod(score, b, h, q_idx, self.local(b, kv_idx))

        return pool_score

    def local_mask_mod(self, mask_mod: MaskMod) -> MaskMod:
        """The same for a mask_mod."""

        def pool_mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return mask_mod(b, h, q_idx, self.local(b, kv_idx))

        return pool_mask

    def block_mask(self, seen: SeenKeys, queries: int) -> BlockMask:
        """The blocks that each sequence's queries see."""
        first, end = seen.ranges(queries)
        if self.start is not None:
            first, end = first + self.start[:, None], end + self.start[:, None]
        width = (self.length + BLOCK - 1) // BLOCK + 1  # a row need not start at a block boundary
        lists = list_rows((first, end), self.span, (BLOCK, BLOCK), width)
        row = RangeLists(*(t[:, None] for t in lists))
        keep = self.local_mask_mod(seen.mask_mod())
        size = (queries, self.span)
        return BlockMask(size, *row, None, None, None, None, (BLOCK, BLOCK), keep)


def _pool(call: CacheCall, place: _Place) -> _Pool:
    k_cache, v_cache, length = call.k_cache, call.v_cache, call.length
    if place.rows is None:  # each sequence has its own row, or its own pages
        return _Pool(k_cache.transpose(1, 2), v_cache.transpose(1, 2), length, length)
    rows, per_row = k_cache.size(0), k_cache.size(1)
    keys, values = (
        t.view(1, rows * per_row, t.size(2), t.size(3)).transpose(1, 2) for t in (k_cache, v_cache)
    )
    return _Pool(keys, values, rows * per_row, length, start=place.rows * per_row)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, *, interleaved: bool) -> Tensor:
    """Rotary position embedding: rotate pairs of columns by the angles of their token's position.

    Args:
        x: [B, S, H, D]. The first R columns are rotated, the others stay.
        cos, sin: [P, R / 2], by position and pair.
        positions: [B, S] integers, or [B, 1] for one position per sequence.
        interleaved: pairs are columns (0, 1), (2, 3), ...; otherwise (0, R/2), (1, R/2 + 1), ...

    Returns:
        x's shape and dtype; computed in fp32, or fp64 for fp64.

    Source: Su et al. 2021, RoFormer (arXiv 2104.09864), equation 34.
    """
    width = 2 * cos.size(1)
    wide = torch.promote_types(x.dtype, torch.float32)
    cosines, sines = (t[positions][:, :, None].to(wide) for t in (cos, sin))
    turned = x[..., :width].to(wide)
    pairs = (-1, 2) if interleaved else (2, -1)
    axis = -1 if interleaved else -2
    first, second = turned.unflatten(-1, pairs).unbind(axis)
    rotated = (first * cosines - second * sines, first * sines + second * cosines)
    turned = torch.stack(rotated, axis).flatten(-2)
    return torch.cat((turned.to(x.dtype), x[..., width:]), -1)
