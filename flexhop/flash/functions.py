"""flash-attn's functions for dense and packed tensors; see flexhop.flash for shared options."""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor

from flexhop.attention import AuxOutput, AuxRequest, attend
from flexhop.flash.options import (
    Options,
    option_mistake,
    packed_mistake,
    refuse,
    score_mod_of,
    window_mask,
)
from flexhop.flash.paged import PagedCall, attend_pages, paged_mistake
from flexhop.flash.probabilities import signed_probabilities, unpack_rows
from flexhop.ops.call import note_rank
from flexhop.ops.dropout_seed import NO_DROPOUT, Dropout
from flexhop.varlen import varlen_attention

Result = Tensor | tuple[Tensor, Tensor, Tensor | None]


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """Attention of dense batches; the module docstring explains the options.

    Args:
        q: [B, M, Hq, D]; k: [B, N, Hkv, D]; v: [B, N, Hkv, Dv].
        dropout_p: probability that a weight becomes 0. The others are divided by 1 - dropout_p.
        softmax_scale: the factor of q·k; None is 1/sqrt(D).
        causal: a query sees no key after the one that it is aligned with (last with last).
        window_size: (left, right), visible keys before and after that one; -1 is all.
        softcap: above 0, scores become softcap * tanh(score / softcap).
        alibi_slopes: [H] or [B, H] float32; slope * |i + N - M - j| is subtracted from a score.
        deterministic: gradients repeat bit for bit.
        return_attn_probs: also return lse and, with dropout_p, the weights (module docstring).

    Returns:
        out [B, M, Hq, Dv]; with return_attn_probs (out, lse [B, Hq, M] fp32, weights or None).
    """
    options = Options(
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, return_attn_probs,
        deterministic,
    )  # fmt: skip
    return _attend_dense(q, k, v, options)


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """flash_attn_func with keys and values in one tensor.

    Args:
        q: [B, M, Hq, D]; kv: [B, N, 2, Hkv, D].
        dropout_p: probability that a weight becomes 0. The others are divided by 1 - dropout_p.
        softmax_scale: the factor of q·k; None is 1/sqrt(D).
        causal: a query sees no key after the one that it is aligned with (last with last).
        window_size: (left, right), visible keys before and after that one; -1 is all.
        softcap: above 0, scores become softcap * tanh(score / softcap).
        alibi_slopes: [H] or [B, H] float32; slope * |i + N - M - j| is subtracted from a score.
        deterministic: gradients repeat bit for bit.
        return_attn_probs: also return lse and, with dropout_p, the weights (module docstring).

    Returns:
        As flash_attn_func.
    """
    mistake = packed_mistake("kv", kv, 2, 5)
    if mistake is not None:
        return refuse(q, q, q, mistake)
    options = Options(
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, return_attn_probs,
        deterministic,
    )  # fmt: skip
    return _attend_dense(q, kv[:, :, 0], kv[:, :, 1], options)


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """flash_attn_func with queries, keys and values in one tensor.

    Args:
        qkv: [B, M, 3, H, D].
        dropout_p: probability that a weight becomes 0. The others are divided by 1 - dropout_p.
        softmax_scale: the factor of q·k; None is 1/sqrt(D).
        causal: a query sees no key after the one that it is aligned with (last with last).
        window_size: (left, right), visible keys before and after that one; -1 is all.
        softcap: above 0, scores become softcap * tanh(score / softcap).
        alibi_slopes: [H] or [B, H] float32; slope * |i + N - M - j| is subtracted from a score.
        deterministic: gradients repeat bit for bit.
        return_attn_probs: also return lse and, with dropout_p, the weights (module docstring).

    Returns:
        As flash_attn_func.
    """
    mistake = packed_mistake("qkv", qkv, 3, 5)
    if mistake is not None:
        return refuse(qkv, qkv, qkv, mistake)
    options = Options(
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, return_attn_probs,
        deterministic,
    )  # fmt: skip
    return _attend_dense(qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2], options)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Result:
    """Attention within each of many sequences, packed without padding.

    Args:
        q: [T, Hq, D]; k: [U, Hkv, D]; v: [U, Hkv, Dv].
        cu_seqlens_q, cu_seqlens_k: [S + 1] int32 or int64: 0, then where each sequence ends.
        max_seqlen_q, max_seqlen_k: upper bounds on the lengths; they bound the block lists.
        dropout_p: probability that a weight becomes 0. The others are divided by 1 - dropout_p.
        softmax_scale: the factor of q·k; None is 1/sqrt(D).
        causal: a query sees no key after the one that it is aligned with (last with last).
        window_size: (left, right), visible keys before and after that one; -1 is all.
        softcap: above 0, scores become softcap * tanh(score / softcap).
        alibi_slopes: [H] or [B, H] float32; slope * |i + N - M - j| is subtracted from a score.
        deterministic: gradients repeat bit for bit.
        return_attn_probs: also return lse and, with dropout_p, the weights (module docstring).
        block_table: [S, pages per sequence] int32 or int64: k and v are then paged caches, [P,
            page, Hkv, D], and the keys of sequence s fill its pages in order. Has no gradient.

    Returns:
        out [T, Hq, Dv]; with return_attn_probs (out, lse [Hq, T] fp32, weights or None).
    """
    options = Options(
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, return_attn_probs,
        deterministic,
    )  # fmt: skip
    if block_table is not None:
        call = PagedCall(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, block_table)
        mistake = paged_mistake(call)
        if mistake is None:
            mistake = option_mistake(options, q.size(1), cu_seqlens_q.size(0) - 1)
        if mistake is not None:
            return refuse(q, q, q, mistake)
        out, lse = attend_pages(call, options)
        return out if lse is None else (out, lse, None)
    longest = (max_seqlen_q, max_seqlen_k)
    return _attend_packed((q, k, v), (cu_seqlens_q, cu_seqlens_k), longest, options)


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """flash_attn_varlen_func with keys and values in one tensor.

    Args:
        q: [T, Hq, D]; kv: [U, 2, Hkv, D].
        cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k: see flash_attn_varlen_func.
        dropout_p: probability that a weight becomes 0. The others are divided by 1 - dropout_p.
        softmax_scale: the factor of q·k; None is 1/sqrt(D).
        causal: a query sees no key after the one that it is aligned with (last with last).
        window_size: (left, right), visible keys before and after that one; -1 is all.
        softcap: above 0, scores become softcap * tanh(score / softcap).
        alibi_slopes: [H] or [B, H] float32; slope * |i + N - M - j| is subtracted from a score.
        deterministic: gradients repeat bit for bit.
        return_attn_probs: also return lse and, with dropout_p, the weights (module docstring).

    Returns:
        As flash_attn_varlen_func.
    """
    mistake = packed_mistake("kv", kv, 2, 4)
    if mistake is not None:
        return refuse(q, q, q, mistake)
    options = Options(
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, return_attn_probs,
        deterministic,
    )  # fmt: skip
    longest = (max_seqlen_q, max_seqlen_k)
    return _attend_packed((q, kv[:, 0], kv[:, 1]), (cu_seqlens_q, cu_seqlens_k), longest, options)


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """flash_attn_varlen_func with queries, keys and values in one tensor.

    Args:
        qkv: [T, 3, H, D].
        cu_seqlens, max_seqlen: see flash_attn_varlen_func; for queries and keys.
        dropout_p: probability that a weight becomes 0. The others are divided by 1 - dropout_p.
        softmax_scale: the factor of q·k; None is 1/sqrt(D).
        causal: a query sees no key after the one that it is aligned with (last with last).
        window_size: (left, right), visible keys before and after that one; -1 is all.
        softcap: above 0, scores become softcap * tanh(score / softcap).
        alibi_slopes: [H] or [B, H] float32; slope * |i + N - M - j| is subtracted from a score.
        deterministic: gradients repeat bit for bit.
        return_attn_probs: also return lse and, with dropout_p, the weights (module docstring).

    Returns:
        As flash_attn_varlen_func.
    """
    mistake = packed_mistake("qkv", qkv, 3, 4)
    if mistake is not None:
        return refuse(qkv, qkv, qkv, mistake)
    options = Options(
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, return_attn_probs,
        deterministic,
    )  # fmt: skip
    operands = (qkv[:, 0], qkv[:, 1], qkv[:, 2])
    return _attend_packed(operands, (cu_seqlens, cu_seqlens), (max_seqlen, max_seqlen), options)


def _attend_dense(q: Tensor, k: Tensor, v: Tensor, options: Options) -> Result:
    mistake = note_rank(4, q=q, k=k, v=v)
    if mistake is None:
        mistake = option_mistake(options, q.size(2), q.size(0))
    if mistake is not None:
        return refuse(q, k, v, mistake)
    queries, keys = q.size(1), k.size(1)
    score_mod = score_mod_of(options, keys - queries)
    block_mask = window_mask(queries, keys, options.reach, q.device)
    dropout = options.dropout(q)
    query, key, value = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    result = attend(
        query, key, value, score_mod, block_mask, options.softmax_scale, True, False,
        options.kernel_options, AuxRequest(lse=options.return_attn_probs), dropout=dropout,
    )  # fmt: skip
    out, aux = cast(tuple[Tensor, AuxOutput], result)
    out = out.transpose(1, 2)
    if not options.return_attn_probs:
        return out
    if dropout.seed is None:
        return out, cast(Tensor, aux.lse), None

    def weigh(columns: Tensor) -> Tensor:
        columns = columns.expand(k.size(0), k.size(2), -1, -1)
        weights = attend(
            query.detach(), key.detach(), columns, score_mod, block_mask,
            options.softmax_scale, True, False, None, None,
        )  # fmt: skip
        return cast(Tensor, weights)

    sizes = (q.size(0), q.size(2), queries, keys)
    return out, cast(Tensor, aux.lse), signed_probabilities(weigh, q, sizes, dropout)


def _attend_packed(
    operands: tuple[Tensor, Tensor, Tensor],
    offsets: tuple[Tensor, Tensor],
    longest: tuple[Any, Any],
    options: Options,
) -> Result:
    q, k, v = operands
    offsets_q, offsets_k = offsets
    mistake = note_rank(3, q=q, k=k, v=v)
    if mistake is None:
        mistake = note_rank(1, cu_seqlens_q=offsets_q, cu_seqlens_k=offsets_k)
    if mistake is None:
        mistake = option_mistake(options, q.size(1), offsets_q.size(0) - 1)
    if mistake is not None:
        return refuse(q, k, v, mistake)
    dropout = options.dropout(q)
    score_mod = score_mod_of(options, _shift(*offsets))

    def call(operands: tuple[Tensor, Tensor, Tensor], drop: Dropout) -> tuple[Tensor, AuxOutput]:
        result = varlen_attention(
            *operands, offsets_q, offsets_k, score_mod=score_mod, window_size=options.reach,
            max_seqlen_q=longest[0], max_seqlen_k=longest[1], scale=options.softmax_scale,
            enable_gqa=True, kernel_options=options.kernel_options,
            return_aux=AuxRequest(lse=options.return_attn_probs),
            dropout_p=drop.p, dropout_seed=drop.seed,
        )  # fmt: skip
        return cast(tuple[Tensor, AuxOutput], result)

    out, aux = call(operands, dropout)
    if not options.return_attn_probs:
        return out
    if dropout.seed is None:
        return out, cast(Tensor, aux.lse).t(), None

    def weigh(columns: Tensor) -> Tensor:
        columns = columns[:, None].expand(-1, k.size(1), -1)
        weights, _ = call((q.detach(), k.detach(), columns), NO_DROPOUT)
        return weights.transpose(0, 1)[None]

    sizes = (1, q.size(1), q.size(0), k.size(0))
    weights = signed_probabilities(weigh, q, sizes, dropout)
    return out, cast(Tensor, aux.lse).t(), unpack_rows(weights[0], offsets, longest)


def _shift(offsets_q: Tensor, offsets_k: Tensor) -> int | Tensor:
    """How many more keys than queries each sequence has, [S]."""
    fit = offsets_q.shape == offsets_k.shape and offsets_q.device == offsets_k.device
    if offsets_q is offsets_k or not fit:  # varlen_attention raises if they do not match
        return 0
    return offsets_k.diff() - offsets_q.diff()
