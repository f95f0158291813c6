"""A third door: scaled_dot_product_attention, with the arguments of torch.nn.functional."""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from flexhop import errors
from flexhop.attention import attend
from flexhop.errors.base import shape_text
from flexhop.masks import causal
from flexhop.mods.functions import ScoreMod
from flexhop.ops.call import Mistake, note_mistake, note_wrong_type
from flexhop.ops.dropout_seed import Dropout
from flexhop.sequences.nested import Operands, has_nested, pack, unpack
from flexhop.sequences.ranges import RangeMask, mask_ranges
from flexhop.sequences.row_tables import Window


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """softmax(query·keyᵀ · scale + mask)·value, as one fused kernel, for dense and nested tensors.

    Under `torch.compile` it becomes one fused kernel. Without, it runs the definition. There is no
    other backend to fall back to: a call that the kernel does not support is an error.

    Args:
        query: [B, Hq, M, D], with any number of batch dimensions, as for [H, M, D] and [M, D]. Or
            a jagged nested tensor [S, Hq, ragged, D], with or without holes; then key and value
            are nested as well.
        key: [B, Hkv, N, D]; value: [B, Hkv, N, Dv]. Batches and heads of size 1 broadcast.
        attn_mask: for dense operands. It broadcasts to [B, Hq, M, N] without being expanded,
            except over several batch dimensions. bool: True means visible. float32 or the dtype of
            query: added to the scaled scores.
        dropout_p: probability that a weight becomes 0. The others are divided by 1 - dropout_p. It
            applies in training and evaluation; see docs/dropout.md.
        is_causal: query i sees keys 0 to i, within each sequence.
        scale: the factor of q·k. None is 1/sqrt(D).
        enable_gqa: allow Hq to be a multiple of Hkv.

    Returns:
        out [B, Hq, M, Dv], nested if query is. A query that sees no key has out 0.

    Raises:
        OptionValueError: dropout_p is not in [0, 1).
        OptionConflictError: attn_mask and is_causal at once.
        AttentionMaskError: attn_mask of another dtype or device, or that does not broadcast.
        NestedOperandError: nested operands that do not fit, or with attn_mask.
        FlexhopError: as for flex_attention.

    Source: torch.nn.functional.scaled_dot_product_attention (torch 2.13).
    """
    operands = (query, key, value)
    mistake = note_wrong_type(query, key, value, scale, None, is_causal=is_causal)
    is_causal = mistake is None and is_causal
    mistake = mistake or _argument_mistake(attn_mask, is_causal)
    choices = _Choices(scale, enable_gqa, Dropout(dropout_p))
    return _dispatch(operands, attn_mask, is_causal, choices, mistake)


class _Choices(NamedTuple):
    """Arguments that are passed on unchanged."""

    scale: float | None
    enable_gqa: bool
    dropout: Dropout


def _dispatch(
    operands: Operands,
    attn_mask: Tensor | None,
    is_causal: bool,
    choices: _Choices,
    mistake: Mistake | None,
) -> Tensor:
    """Call the nested or the dense implementation."""
    if mistake is None and has_nested(*operands):
        return _nested(operands, attn_mask, is_causal, choices)
    if mistake is None:
        mistake = _rank_mistake(operands)
    if mistake is not None:
        return _attend(operands, (None, None), choices, mistake)
    rank, outer = operands[0].dim(), _outer(operands)
    operands = _broadcast(operands, outer)
    mistake = _mask_mistake(attn_mask, operands, outer)
    if mistake is not None:
        return _attend(operands, (None, None), choices, mistake)
    if attn_mask is not None:
        attn_mask = _folded_mask(attn_mask, outer)
    block_mask = causal_blocks(*operands[:2]) if is_causal else None
    score_mod = None if attn_mask is None else mask_score(attn_mask)
    shares_heads = choices.enable_gqa or operands[1].size(1) == 1
    choices = _Choices(choices.scale, shares_heads, choices.dropout)
    out = _attend(operands, (score_mod, block_mask), choices)
    if rank > 4:
        return out.unflatten(0, outer)
    return out.reshape(out.shape[4 - rank :]) if rank < 4 else out


def _attend(
    operands: Operands,
    mods: tuple[ScoreMod | None, RangeMask | None],
    choices: _Choices,
    mistake: Mistake | None = None,
) -> Tensor:
    scale, enable_gqa, dropout = choices
    out = attend(
        *operands, *mods, scale, enable_gqa, False, None, None, dropout=dropout, mistake=mistake
    )
    return cast(Tensor, out)


def _nested(
    operands: Operands,
    attn_mask: Tensor | None,
    is_causal: bool,
    choices: _Choices,
) -> Tensor:
    window = Window(None, 0 if is_causal else None, bottom_right=False)
    packed = pack(operands, None, None, window)
    mistake = packed.mistake
    if mistake is None and attn_mask is not None:
        mistake = note_mistake(
            errors.NestedOperandError, argument="attn_mask", found="is given with nested operands",
            expected="these need flex_attention with create_nested_block_mask",
        )  # fmt: skip
    if mistake is not None:
        return _attend(operands, (None, None), choices, mistake)
    out = _attend(packed.operands, (None, packed.block_mask), choices)
    return unpack(out, operands[0])


def _outer(operands: Operands) -> tuple[int, ...]:
    """The sizes of several batch dimensions, or of none."""
    if operands[0].dim() <= 4:
        return ()
    return tuple(torch.broadcast_shapes(*[t.shape[:-3] for t in operands]))


def _broadcast(operands: Operands, outer: tuple[int, ...]) -> Operands:
    """Expand to four dimensions, a common batch and a common number of heads, as views.

    Key and value may keep batch 1 and one head, which kernels share. Several batch dimensions,
    `outer`, become one.
    """
    if outer:
        operands = tuple(t.expand(*outer, *t.shape[-3:]).flatten(0, -4) for t in operands)  # pyright: ignore[reportAssignmentType]
    query, key, value = (t[(None,) * (4 - t.dim())] if t.dim() < 4 else t for t in operands)
    for dim in (0, 1):
        key, value = _alike(key, value, dim)
        if query.size(dim) == 1 and key.size(dim) != 1:
            query = _expanded(query, dim, key.size(dim))
    return query, key, value


def _alike(key: Tensor, value: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    if key.size(dim) == 1 and value.size(dim) != 1:
        return _expanded(key, dim, value.size(dim)), value
    if value.size(dim) == 1 and key.size(dim) != 1:
        return key, _expanded(value, dim, key.size(dim))
    return key, value


def _expanded(tensor: Tensor, dim: int, size: int) -> Tensor:
    sizes = [-1, -1, -1, -1]
    sizes[dim] = size
    return tensor.expand(sizes)


def causal_blocks(query: Tensor, key: Tensor) -> RangeMask:
    """Query i sees keys 0..i. Computed by arithmetic: the mask is not evaluated."""
    queries, keys = query.size(2), key.size(2)
    row, column = (torch.arange(n, device=query.device) for n in (queries, keys))
    by_query = torch.zeros_like(row), (row + 1).clamp(max=keys)
    by_key = column.clamp(max=queries), torch.full_like(column, queries)
    return mask_ranges(by_query, by_key, causal)


def mask_score(attn_mask: Tensor) -> ScoreMod:
    """A score_mod that reads attn_mask; dimensions of size 1 are read at 0."""
    missing = 4 - attn_mask.dim()
    kept = [axis for axis in range(missing, 4) if attn_mask.size(axis - missing) != 1]
    table = attn_mask.squeeze()
    is_bool = attn_mask.dtype == torch.bool

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        indices = (b, h, q_idx, kv_idx)
        entry = table[tuple(indices[axis] for axis in kept)] if kept else table
        return torch.where(entry, score, -float("inf")) if is_bool else score + entry

    return score_mod


def _argument_mistake(attn_mask: Tensor | None, is_causal: bool) -> Mistake | None:
    if attn_mask is not None and not isinstance(attn_mask, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
        return _mask_error(f"is a {type(attn_mask).__name__}", "must be a tensor or None")
    if attn_mask is not None and is_causal:
        return note_mistake(
            errors.OptionConflictError, first="attn_mask", second="is_causal=True",
            reason="include the causal part in the mask",
        )  # fmt: skip
    return None


def _rank_mistake(operands: Operands) -> Mistake | None:
    for argument, tensor in zip(("query", "key", "value"), operands, strict=True):
        if tensor.dim() < 2 or tensor.dim() != operands[0].dim():
            expected = max(2, operands[0].dim())
            return note_mistake(
                errors.RankError, argument=argument, rank=tensor.dim(), expected=expected
            )
    batches = [_numbers(t.shape[:-3]) for t in operands] if operands[0].dim() > 4 else []
    for sizes in zip(*batches, strict=True):
        if len({size for size in sizes if size != 1}) > 1:
            query, key, value = map(shape_text, batches)
            return note_mistake(
                errors.BatchError, query_batch=query, key_batch=key, value_batch=value
            )
    return None


def _folded_mask(attn_mask: Tensor, outer: tuple[int, ...]) -> Tensor:
    """A mask for one batch dimension instead of several. Heads and lengths are not expanded."""
    if attn_mask.dim() <= 3 or not outer:
        return attn_mask
    inner = attn_mask.shape[-3:]
    return attn_mask.expand(*outer, *inner).reshape(-1, *inner)


def _mask_mistake(
    attn_mask: Tensor | None, operands: Operands, outer: tuple[int, ...]
) -> Mistake | None:
    if attn_mask is None:
        return None
    query, key, _ = operands
    if attn_mask.dtype not in (torch.bool, torch.float32, query.dtype):
        found = f"is {attn_mask.dtype}"
        floats = " or ".join(dict.fromkeys((str(torch.float32), str(query.dtype))))
        return _mask_error(found, f"must be torch.bool or {floats}")
    if attn_mask.device != query.device:
        return _mask_error(f"is on {attn_mask.device}", f"query is on {query.device}")
    sizes = (*(outer or query.shape[:1]), query.size(1), query.size(2), key.size(2))
    own = tuple(attn_mask.shape)
    fits = len(own) <= len(sizes) and all(
        [size == 1 or size == full for size, full in zip(own[::-1], sizes[::-1], strict=False)]
    )
    if fits:
        return None
    return _mask_error(
        f"has shape {shape_text(own)}", f"must broadcast to {shape_text(sizes)}, which are batch, "
        "heads, queries and keys",
    )  # fmt: skip


def _numbers(sizes: tuple[Any, ...]) -> tuple[int, ...]:
    return tuple(int(size) for size in sizes)


def _mask_error(found: str, expected: str) -> Mistake:
    return note_mistake(errors.AttentionMaskError, found=found, expected=expected)
