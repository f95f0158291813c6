"""Built-in mask_mods. Each is a formula, short enough to copy and change.

Pass them to `create_block_mask(mask_mod, B, H, M, N)`, or combine them with `and_masks` and
`or_masks`. Each docstring gives a formula, with q for q_idx and k for kv_idx, that is true if the
key is visible.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from flexhop.errors import ModArgumentError
from flexhop.mods.functions import MaskMod, and_masks


def causal(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    """A query sees itself and earlier keys: q >= k.

    Source: Vaswani et al. 2017 (arXiv 1706.03762), section 3.2.3.
    """
    return q_idx >= kv_idx


def causal_with_offset(offset: int | Tensor) -> MaskMod:
    """Causal, with query 0 at key position `offset`: q + offset >= k.

    `offset = N - M` aligns the bottom right corners. For decoding with a cache, `offset` is the
    number of tokens before the first query.

    Args:
        offset: an int, a 0-d integer tensor (changing its value needs no recompilation), or
            one per batch, [B].

    Raises:
        ModArgumentError: an offset of the wrong rank.
    """
    _check_rank("causal_with_offset", "offset", offset, (0, 1))
    return functools.partial(_causal_offset_mask, offset)


def _causal_offset_mask(
    offset: int | Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor
) -> Tensor:
    return q_idx + _in_batch(offset, b) >= kv_idx


def sliding_window(window: int, bidirectional: bool = False) -> MaskMod:
    """The nearest `window` keys, the query's own included: 0 <= q - k < window.

    Args:
        window: number of keys, at least 1.
        bidirectional: also as many keys after the query: |q - k| < window.

    Raises:
        ModArgumentError: window is less than 1.

    Source: Beltagy et al. 2020, Longformer (arXiv 2004.05150), section 3.1; causal: Jiang et al.
    2023, Mistral 7B (arXiv 2310.06825), section 2.
    """
    return dilated_sliding_window(window, 1, bidirectional)


def dilated_sliding_window(window: int, dilation: int, bidirectional: bool = False) -> MaskMod:
    """Every `dilation`-th of the nearest keys: 0 <= q - k < window * dilation, dilation | q - k.

    Args:
        window: number of keys, the query's own included, at least 1.
        dilation: distance between them, at least 1.
        bidirectional: also as many keys after the query: |q - k| < window * dilation.

    Raises:
        ModArgumentError: window or dilation is less than 1.

    Source: Beltagy et al. 2020, Longformer (arXiv 2004.05150), section 3.1.
    """
    _check_positive("sliding_window", window=window, dilation=dilation)
    reach = window * dilation
    lowest = 1 - reach if bidirectional else 0
    return functools.partial(_sliding_window_mask, lowest, reach, dilation)


def _sliding_window_mask(
    lowest: int, reach: int, dilation: int, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor
) -> Tensor:
    distance = q_idx - kv_idx
    near = (distance >= lowest) & (distance < reach)
    return near if dilation == 1 else near & (distance % dilation == 0)


def prefix_lm(prefix: int | Tensor) -> MaskMod:
    """Causal, but the prefix is visible to all: (k < prefix) | (q >= k).

    Args:
        prefix: an int, a 0-d integer tensor, or one length per batch, [B].

    Raises:
        ModArgumentError: a prefix of the wrong rank.

    Source: Raffel et al. 2020, T5 (arXiv 1910.10683), section 3.2.1.
    """
    _check_rank("prefix_lm", "prefix", prefix, (0, 1))
    return functools.partial(_prefix_lm_mask, prefix)


def _prefix_lm_mask(
    prefix: int | Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor
) -> Tensor:
    return (kv_idx < _in_batch(prefix, b)) | (q_idx >= kv_idx)


def padding(lengths: Tensor) -> MaskMod:
    """Only real tokens are visible: k < lengths[b].

    Padded queries still see the real keys, so no row is empty. Ignore their output.

    Args:
        lengths: [B] integers.
    """
    return functools.partial(_padding_mask, lengths)


def _padding_mask(lengths: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return kv_idx < lengths[b]


def global_tokens(chosen: int | Tensor) -> MaskMod:
    """Some tokens see every token and are seen by every token: g(q) | g(k).

    Combine it with another mask: or_masks(sliding_window(256), global_tokens(4)).

    Args:
        chosen: an int n for the first n tokens, or bool [S] or [B, S], true for global tokens.

    Raises:
        ModArgumentError: a tensor that is not bool or has the wrong rank.

    Source: Beltagy et al. 2020, Longformer (arXiv 2004.05150), section 3.1.
    """
    if isinstance(chosen, int):
        count = chosen
        return functools.partial(_first_tokens_mask, count)
    if chosen.dtype != torch.bool:
        raise ModArgumentError(
            mod="global_tokens",
            argument="the dtype of chosen",
            value=chosen.dtype,
            allowed="torch.bool",
        )
    per_batch = _is_batched("global_tokens", "chosen", chosen)
    return functools.partial(_global_tokens_mask, chosen, per_batch)


def _global_tokens_mask(
    chosen: Tensor, per_batch: bool, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor
) -> Tensor:
    if per_batch:
        return chosen[b, q_idx] | chosen[b, kv_idx]
    return chosen[q_idx] | chosen[kv_idx]


def _first_tokens_mask(count: int, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return (q_idx < count) | (kv_idx < count)


def document(ids: Tensor, kv_ids: Tensor | None = None) -> MaskMod:
    """Each packed sequence sees only itself: ids[q] == kv_ids[k].

    Args:
        ids: [S] or [B, S] integers, the document of each token; see ids_from_lengths and
            ids_from_offsets.
        kv_ids: the documents of the keys if they differ from the queries'; same rank as ids.

    Raises:
        ModArgumentError: ids of the wrong rank.

    Source: Krell et al. 2021 (arXiv 2107.02027), section 3.2.
    """
    key_ids = ids if kv_ids is None else kv_ids
    per_batch = _is_batched("document", "ids", ids)
    if _is_batched("document", "kv_ids", key_ids) != per_batch:
        raise ModArgumentError(
            mod="document", argument="the rank of kv_ids", value=key_ids.dim(), allowed=ids.dim()
        )
    return functools.partial(_document_mask, ids, key_ids, per_batch)


def _document_mask(
    ids: Tensor,
    key_ids: Tensor,
    per_batch: bool,
    b: Tensor,
    h: Tensor,
    q_idx: Tensor,
    kv_idx: Tensor,
) -> Tensor:
    if per_batch:
        return ids[b, q_idx] == key_ids[b, kv_idx]
    return ids[q_idx] == key_ids[kv_idx]


def packed_causal(ids: Tensor) -> MaskMod:
    """Packed sequences, each causal: (q >= k) & (ids[q] == ids[k]).

    Args and errors: see `document`.
    """
    return and_masks(causal, document(ids))


def ids_from_lengths(lengths: Tensor, total: int | None = None) -> Tensor:
    """The document of each token, for documents of these lengths back to back.

    Args:
        lengths: [D] integers, zeros allowed.
        total: number of tokens S. Tokens after the last document get the id D, as one more
            document. None sums the lengths, which synchronises.

    Returns:
        [S] int32.
    """
    return _ids_from_ends(lengths.cumsum(0), total)


def ids_from_offsets(offsets: Tensor, total: int | None = None) -> Tensor:
    """The document of each token, if document i is tokens offsets[i] to offsets[i + 1].

    Takes `cu_seqlens` of variable-length attention or `offsets` of a jagged nested tensor.

    Args:
        offsets: [D + 1] non-decreasing integers that start at 0.
        total: see `ids_from_lengths`.

    Returns:
        [S] int32.
    """
    return _ids_from_ends(offsets[1:], total)


def _ids_from_ends(ends: Tensor, total: int | None) -> Tensor:
    """A token's document is the number of documents that end at or before it."""
    count = int(ends[-1]) if total is None else total
    tokens = torch.arange(count, device=ends.device, dtype=ends.dtype)
    return torch.searchsorted(ends.contiguous(), tokens, right=True, out_int32=True)


def natten_2d(height: int, width: int, kernel_h: int, kernel_w: int) -> MaskMod:
    """Neighbourhood attention on an image whose rows are consecutive in the sequence.

    With q = (y, x) and k = (v, u): 0 <= v - top(y) < kernel_h and 0 <= u - left(x) < kernel_w,
    where top(y) = clamp(y - kernel_h // 2, 0, height - kernel_h), left likewise. At the border the
    window shifts inwards, so every query sees kernel_h * kernel_w keys.

    Args:
        height: rows of the image; the sequence has height * width tokens.
        width: columns of the image.
        kernel_h: rows of the window, 1 to height.
        kernel_w: columns of the window, 1 to width.

    Raises:
        ModArgumentError: a window that is empty or larger than the image.

    Source: Hassani et al. 2023, Neighborhood Attention Transformer (arXiv 2204.07143), section 3.
    """
    _check_positive("natten_2d", kernel_h=kernel_h, kernel_w=kernel_w)
    for name, kernel, size in (("kernel_h", kernel_h, height), ("kernel_w", kernel_w, width)):
        if kernel > size:
            raise ModArgumentError(
                mod="natten_2d", argument=name, value=kernel, allowed=f"at most {size}"
            )
    return functools.partial(_natten_mask, height, width, kernel_h, kernel_w)


def _natten_mask(
    height: int,
    width: int,
    kernel_h: int,
    kernel_w: int,
    b: Tensor,
    h: Tensor,
    q_idx: Tensor,
    kv_idx: Tensor,
) -> Tensor:
    top = torch.clamp(q_idx // width - kernel_h // 2, 0, height - kernel_h)
    left = torch.clamp(q_idx % width - kernel_w // 2, 0, width - kernel_w)
    down, right = kv_idx // width - top, kv_idx % width - left
    return (down >= 0) & (down < kernel_h) & (right >= 0) & (right < kernel_w)


def _check_positive(mod: str, **values: int) -> None:
    for name, value in values.items():
        if value < 1:
            raise ModArgumentError(mod=mod, argument=name, value=value, allowed="at least 1")


def _in_batch(value: int | Tensor, b: Tensor) -> int | Tensor:
    """The value for batch b: one per batch, [B], or one for all."""
    return value[b] if isinstance(value, Tensor) and value.dim() == 1 else value


def _is_batched(mod: str, argument: str, value: Tensor) -> bool:
    """Whether there is one row per batch, [B, S], rather than one for all, [S]."""
    _check_rank(mod, argument, value, (1, 2))
    return value.dim() == 2


def _check_rank(mod: str, argument: str, value: int | Tensor, allowed: tuple[int, int]) -> None:
    rank = value.dim() if isinstance(value, Tensor) else 0
    if rank not in allowed:
        raise ModArgumentError(
            mod=mod,
            argument=f"the rank of {argument}",
            value=rank,
            allowed=f"{allowed[0]} or {allowed[1]}",
        )
