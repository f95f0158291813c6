"""The entry point for packed sequences of different lengths."""

from __future__ import annotations

import itertools
from typing import Any, cast

import torch
from torch import Tensor

from flexhop import errors
from flexhop.attention import AuxOutput, AuxRequest, Options, attend
from flexhop.mods.functions import MaskMod, ScoreMod
from flexhop.ops.call import Mistake, note_mistake, note_rank, note_wrong_type
from flexhop.ops.dropout_seed import Dropout
from flexhop.ops.replicated import SLOT
from flexhop.sequences.ranges import Packing, pack_mask, window_mistake
from flexhop.sequences.row_tables import RowTables, Window, local_score_mod


def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    *,
    score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None,
    is_causal: bool = False,
    window_size: tuple[int | None, int | None] = (None, None),
    bottom_right: bool = True,
    seqused_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    kernel_options: Options = None,
    return_aux: AuxRequest | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0,
    dropout_seed: Tensor | None = None,
) -> Tensor | tuple[Tensor, AuxOutput]:
    """Attention within each of many sequences of different lengths, packed without padding.

    Sequence s has the query tokens cu_seqlens_q[s] .. cu_seqlens_q[s + 1] - 1, and its own keys.
    Mods see each sequence separately: b is the number of the sequence, and q_idx and kv_idx count
    from its first token. The device computes the blocks to visit from the offsets, is_causal and
    window_size, in time linear in the number of tokens. mask_mod applies within these blocks.

    Args:
        query: [T, Hq, D], the tokens of all sequences back to back.
        key: [U, Hkv, D]; value: [U, Hkv, Dv].
        cu_seqlens_q: [S + 1] int32 or int64 on query's device: 0, then where each sequence ends.
            A sequence may be empty. Tokens after the last sequence see nothing: their out is 0.
        cu_seqlens_k: the same for the keys. None takes cu_seqlens_q.
        score_mod: (score, b, h, q_idx, kv_idx) -> score, as for flex_attention.
        mask_mod: (b, h, q_idx, kv_idx) -> bool, applied to the keys that the other arguments leave
            visible.
        is_causal: hides keys after the one that a query is aligned with.
        window_size: (before, after), how many keys around that one are visible. None: all, as
            flash-attn's -1.
        bottom_right: align the last query of a sequence with its last key, as in decoding with a
            cache. False aligns the first with the first. For equal lengths both are the same.
        seqused_k: [S], how many keys of each sequence to use. None: all.
        max_seqlen_q, max_seqlen_k: accepted for compatibility; nothing depends on the longest
            sequence.
        scale, enable_gqa, kernel_options, return_aux, sinks: as for flex_attention.
        dropout_p, dropout_seed: as for flex_attention. The mask counts packed tokens: batch 0, and
            the positions of query and key in the packed tensors.

    Returns:
        out [T, Hq, Dv]; with return_aux (out, AuxOutput) whose statistics are [T, Hq].

    Raises:
        SequenceOffsetsError: offsets of a wrong dtype, rank, device or number. Without
            torch.compile also offsets that do not start at 0, decrease or exceed the tokens;
            compiled code does not synchronise to check that.
        OptionValueError: a window_size that is no pair of such numbers.
        FlexhopError: as for flex_attention.

    Source: flash_attn.flash_attn_varlen_func (flash-attn 2.8), with mods.
    """
    offsets_k = cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k
    flags = {"is_causal": is_causal, "bottom_right": bottom_right}
    mistake = note_wrong_type(query, key, value, scale, return_aux, **flags)
    mistake = mistake or window_mistake(window_size)
    left, right = (None, None) if mistake is not None else window_size
    right = 0 if mistake is None and is_causal else right
    packing = Packing(cu_seqlens_q, offsets_k, seqused_k, Window(left, right, bottom_right))
    if mistake is None:
        mistake = _rank_mistake(query=query, key=key, value=value)
    if mistake is None:
        mistake = _find_mistake(query, key, packing)
    block_mask = None
    if mistake is None:
        tables, block_mask = _pack(query, key, packing, mask_mod)
        score_mod = None if score_mod is None else local_score_mod(score_mod, tables)
    result = attend(
        _as_batch(query), _as_batch(key), _as_batch(value), score_mod, block_mask,
        scale, enable_gqa, False, kernel_options, return_aux, sinks=sinks,
        dropout=Dropout(dropout_p, dropout_seed), mistake=mistake,
    )  # fmt: skip
    if isinstance(result, Tensor):
        return _as_tokens(result)
    out, aux = cast(tuple[Tensor, AuxOutput], result)
    return _as_tokens(out), AuxOutput(*(None if t is None else _as_tokens(t) for t in aux))


def _pack(
    query: Tensor, key: Tensor, packing: Packing, mask_mod: MaskMod | None
) -> tuple[RowTables, Any]:
    """Tables and mask of the packed tokens; of the whole batch if a context shards it."""
    context = SLOT.current
    if context is None:
        return pack_mask(query.size(0), key.size(0), packing, mask_mod)
    return context.packed(packing, mask_mod)


def _as_batch(tokens: Tensor) -> Tensor:
    """[T, H, D] as [1, H, T, D], without a copy; anything else passes through to the checks."""
    is_packed = isinstance(tokens, Tensor) and tokens.dim() == 3 and not tokens.is_nested  # pyright: ignore[reportUnnecessaryIsInstance]
    return tokens.transpose(0, 1).unsqueeze(0) if is_packed else tokens


def _as_tokens(batch: Tensor) -> Tensor:
    """[1, H, T, ...] as [T, H, ...]."""
    return batch.squeeze(0).transpose(0, 1)


def _rank_mistake(**tensors: Tensor) -> Mistake | None:
    for argument, tensor in tensors.items():
        if tensor.is_nested:
            return note_mistake(errors.NestedTensorError, argument=argument)
    return note_rank(3, **tensors)


def _find_mistake(query: Tensor, key: Tensor, packing: Packing) -> Mistake | None:
    """What is wrong with the offsets; recorded, not raised, because Dynamo traces this."""
    named = {
        "cu_seqlens_q": packing.offsets_q,
        "cu_seqlens_k": packing.offsets_k,
        "seqused_k": packing.used_k,
    }
    for argument, offsets in named.items():
        if offsets is None:
            continue
        wrong = _what_is_wrong(offsets, query)
        if wrong is not None:
            return _mistake(argument, *wrong)
    sequences = packing.offsets_q.size(0) - 1
    if sequences < 1:
        return _mistake(
            "cu_seqlens_q", "has no sequence", "must have at least two entries, 0 and T"
        )
    if packing.offsets_k.size(0) != sequences + 1:
        found = f"has {packing.offsets_k.size(0)} entries"
        return _mistake("cu_seqlens_k", found, f"cu_seqlens_q has {sequences + 1}")
    if packing.used_k is not None and packing.used_k.size(0) != sequences:
        found = f"has {packing.used_k.size(0)} entries"
        return _mistake("seqused_k", found, f"there are {sequences} sequences")
    # If a context shards the batch, offsets describe the whole batch.
    if torch.compiler.is_compiling() or SLOT.current is not None:
        return None
    return _value_mistake(query.size(0), key.size(0), packing)


def _what_is_wrong(offsets: Any, query: Tensor) -> tuple[str, str] | None:
    """What offsets are and what they must be, without reading their values."""
    if not isinstance(offsets, Tensor):
        return f"is a {type(offsets).__name__}", "must be an int32 or int64 tensor"
    if offsets.dtype not in (torch.int32, torch.int64):
        return f"is {offsets.dtype}", "must be int32 or int64"
    if offsets.dim() != 1:
        return f"has {offsets.dim()} dimensions", "must have 1"
    if offsets.device != query.device:
        return f"is on {offsets.device}", f"query is on {query.device}"
    return None


def _value_mistake(queries: int, keys: int, packing: Packing) -> Mistake | None:
    """Checks of values; synchronises."""
    sides = {
        "cu_seqlens_q": (packing.offsets_q, queries),
        "cu_seqlens_k": (packing.offsets_k, keys),
    }
    for argument, (offsets, tokens) in sides.items():
        values: list[int] = offsets.tolist()
        if values[0] != 0:
            return _mistake(argument, f"starts at {values[0]}", "must start at 0")
        for place, (before, after) in enumerate(itertools.pairwise(values)):
            if after < before:
                found = f"decreases from {before} to {after} at entry {place + 1}"
                return _mistake(argument, found, "a sequence cannot have a negative length")
        if values[-1] > tokens:
            return _mistake(argument, f"ends at {values[-1]}", f"there are {tokens} tokens")
    return None


def _mistake(argument: str, found: str, expected: str) -> Mistake:
    return note_mistake(
        errors.SequenceOffsetsError, argument=argument, found=found, expected=expected
    )
