"""Packed sequences as tables over query tokens: the range that each sees, and its position.

Sequence s has the query tokens offsets_q[s] .. offsets_q[s + 1] - 1 and the key tokens
offsets_k[s] .. offsets_k[s + 1] - 1 of the packed tensors. A query sees one range of keys, so a
kernel masks with two numbers per query and none per key; in the backward pass, two per key.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from flexhop.mods.bounded import bounded
from flexhop.mods.functions import MaskMod, ScoreMod, and_masks


class Window(NamedTuple):
    """How far a query sees around the key that it is aligned with; None: to the end.

    left, right: keys before and after it. bottom_right: align the last query with the last key of
    its sequence; otherwise the first with the first.
    """

    left: int | None = None
    right: int | None = None
    bottom_right: bool = True


class RowTables(NamedTuple):
    """For each query token of the packed tensor, [M] int32 each; then facts about all of them."""

    sequence: Tensor
    position: Tensor  # position in its sequence; a neighbour's if there is no such query
    key_start: Tensor  # where the keys of its sequence start
    last_key: Tensor  # the last key position in its sequence, 0 if there is none
    first: Tensor  # the keys that it sees, first .. end - 1, in the packed tensor
    end: Tensor
    is_alike: bool = False  # whether queries and keys have the same offsets
    # For each key token, [N] int32: its sequence, and its position as that of a query.
    key_sequence: Tensor | None = None
    key_position: Tensor | None = None

    def with_keys(self, by_key: RowTables) -> RowTables:
        """by_key: the tables of keys as if they were queries."""
        return self._replace(key_sequence=by_key.sequence, key_position=by_key.position)


def tabulate_rows(
    offsets_q: Tensor,
    offsets_k: Tensor,
    queries: int,
    window: Window,
    used: tuple[Tensor | None, Tensor | None] = (None, None),
) -> RowTables:
    """Tables for `queries` tokens; tokens of no sequence, as in holes, see nothing.

    Args:
        offsets_q, offsets_k: [S + 1] non-decreasing integers.
        queries: M.
        window: which keys of its sequence a query sees.
        used: [S] each, how many of a sequence's queries and keys to use, or None for all; the rest
            is a hole.
    """
    token = torch.arange(queries, device=offsets_q.device, dtype=torch.int32)
    last = offsets_q.size(0) - 2
    sequence = (torch.searchsorted(offsets_q, token, right=True, out_int32=True) - 1).clamp(
        0, last
    )
    lengths_q, lengths_k = _lengths(offsets_q, used[0]), _lengths(offsets_k, used[1])
    position = token - offsets_q[sequence]
    key_start, length_k = offsets_k[sequence], lengths_k[sequence]
    aligned = position
    if window.bottom_right:
        aligned = position + length_k - lengths_q[sequence]
    exists = (position >= 0) & (position < lengths_q[sequence])
    # Both ends must be non-decreasing: tokens before the first sequence point to its first key,
    # those after a sequence to its end.
    nothing = torch.where(position < 0, 0, length_k)
    seated = torch.minimum(position, lengths_q[sequence] - 1).clamp(min=0)
    seen_from = _limit(aligned, window.left, -1, length_k, torch.zeros_like(position))
    seen_to = _limit(aligned + 1, window.right, 1, length_k, length_k)
    tables = (
        sequence, seated, key_start, (length_k - 1).clamp(min=0),
        key_start + torch.where(exists, seen_from, nothing),
        key_start + torch.where(exists, seen_to, nothing),
    )  # fmt: skip
    is_alike = offsets_q is offsets_k
    return RowTables(*(table.to(torch.int32) for table in tables), is_alike=is_alike)


def _lengths(offsets: Tensor, used: Tensor | None) -> Tensor:
    lengths = offsets.diff()
    return lengths if used is None else torch.minimum(lengths, used.to(lengths.dtype))


def _limit(
    aligned: Tensor, reach: int | None, sign: int, length: Tensor, without: Tensor
) -> Tensor:
    if reach is None:
        return without
    return torch.minimum((aligned + sign * reach).clamp(min=0), length)


def range_mask(tables: RowTables) -> MaskMod:
    """A mask_mod for packed tensors that keeps each query's range."""
    first, end = tables.first, tables.end

    def packed_mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (kv_idx >= first[q_idx]) & (kv_idx < end[q_idx])

    return packed_mask


def _localize(tables: RowTables) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]:
    """Map packed q_idx and kv_idx to the number of the sequence and the positions within it.

    Keys of other sequences get a valid position too, although their scores are not used: a table
    that a mod reads has no entries beyond its sequence.
    """
    sequence, position = tables.sequence, tables.position
    start, last = tables.key_start, tables.last_key
    key_sequence, key_position = tables.key_sequence, tables.key_position

    def localize(q_idx: Tensor, kv_idx: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        number, query = sequence[q_idx], position[q_idx]
        # Same offsets, so kernels know the distance to the key.
        place = query + (kv_idx - q_idx) if tables.is_alike else kv_idx - start[q_idx]
        if key_sequence is None or key_position is None:
            return number, query, bounded(place, last[q_idx])
        same = number, key_sequence[kv_idx]
        return number, query, bounded(place, last[q_idx], key_position[kv_idx], same)

    return localize


def local_mask_mod(mask_mod: MaskMod, tables: RowTables) -> MaskMod:
    """A mask_mod for packed tensors: the ranges, and within them mask_mod with local indices."""
    localize = _localize(tables)

    def local_mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        sequence, query, key = localize(q_idx, kv_idx)
        return mask_mod(sequence, h, query, key)

    return and_masks(range_mask(tables), local_mask)


def local_score_mod(score_mod: ScoreMod, tables: RowTables) -> ScoreMod:
    """A score_mod for packed tensors that calls score_mod with local indices."""
    localize = _localize(tables)

    def local_score(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        sequence, query, key = localize(q_idx, kv_idx)
        return score_mod(score, sequence, h, query, key)

    return local_score
