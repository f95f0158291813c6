"""Packed sequences as a block mask of the packed tensors; windows as users write them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexhop import errors
from flexhop.mods.functions import MaskMod
from flexhop.ops.call import Mistake, note_mistake
from flexhop.sequences.row_tables import (
    RowTables,
    Window,
    local_mask_mod,
    range_mask,
    tabulate_rows,
)

_BLOCK = 128


class Packing(NamedTuple):
    """How packed tokens divide into sequences, and which keys of its sequence a query sees.

    offsets_q, offsets_k: [S + 1], where each sequence begins, and the end of the last one.
    used_k, used_q: [S], how many tokens of each sequence exist, or None for all.
    """

    offsets_q: Tensor
    offsets_k: Tensor
    used_k: Tensor | None
    window: Window
    used_q: Tensor | None = None


class RangeMask(NamedTuple):
    """A mask whose queries see one range of keys each, given by the ends of the ranges.

    Both ends are non-decreasing from query to query, so kernels find the blocks of a row from the
    ends of its first and last query. Query i sees keys first_key[i] .. end_key[i] - 1; key j is
    seen by queries first_query[j] .. end_query[j] - 1.

    Args:
        seq_lengths: (M, N), numbers of queries and keys.
        first_key: [1, 1, M] int32. end_key: [1, 1, M, 1] int32.
        first_query: [1, 1, N] int32. end_query: [1, 1, N, 1] int32.
        is_all: whether the ranges are the whole mask; otherwise mask_mod hides keys within them.
        BLOCK_SIZE: queries and keys per block in kernels.
        mask_mod: the same as a function.
    """

    seq_lengths: tuple[int, int]
    first_key: Tensor
    end_key: Tensor
    first_query: Tensor
    end_query: Tensor
    is_all: bool
    BLOCK_SIZE: tuple[int, int]
    mask_mod: MaskMod


def pack_mask(
    queries: int, keys: int, packing: Packing, mask_mod: MaskMod | None
) -> tuple[RowTables, RangeMask]:
    """The tables and the block mask of packed sequences, without evaluating the mask.

    Args:
        queries: T, number of query tokens. keys: U.
        packing: the sequences.
        mask_mod: takes local indices; or None.
    """
    offsets_q, offsets_k, used_k, window, used_q = packing
    tables = tabulate_rows(offsets_q, offsets_k, queries, window, (used_q, used_k))
    # From the keys' side, before and after are swapped.
    mirrored = Window(window.right, window.left, window.bottom_right)
    by_key = tabulate_rows(offsets_k, offsets_q, keys, mirrored, (used_k, used_q))
    tables = tables.with_keys(by_key)
    keep = range_mask(tables) if mask_mod is None else local_mask_mod(mask_mod, tables)
    seen = (tables.first, tables.end), (by_key.first, by_key.end)
    return tables, mask_ranges(*seen, keep, is_all=mask_mod is None)


def mask_ranges(
    by_query: tuple[Tensor, Tensor],
    by_key: tuple[Tensor, Tensor],
    keep: MaskMod,
    *,
    is_all: bool = True,
) -> RangeMask:
    """A mask whose queries see one range of keys each.

    Args:
        by_query: first and end, [M] non-decreasing integers: query i sees keys first[i] .. end[i]
            - 1.
        by_key: first and end, [N]: key j is seen by queries first[j] .. end[j] - 1.
        keep: the mask_mod.
        is_all: whether the ranges are the whole mask; otherwise `keep` hides keys within them.
    """
    lengths = by_query[0].size(0), by_key[0].size(0)
    ends = (*_shaped(*by_query), *_shaped(*by_key))
    return RangeMask(lengths, *ends, is_all, (_BLOCK, _BLOCK), keep)


def _shaped(first: Tensor, end: Tensor) -> tuple[Tensor, Tensor]:
    first, end = first.to(torch.int32), end.to(torch.int32)
    return first[None, None], end[None, None, :, None]


def window_mistake(window: Any) -> Mistake | None:
    """What is wrong with a window. flash-attn's -1 would mean that the next key is the first."""
    is_pair = isinstance(window, (tuple, list)) and len(window) == 2
    if is_pair and all([n is None or (isinstance(n, int) and n >= 0) for n in window]):
        return None
    allowed = "two numbers (before, after) from 0, or None for no bound (flash-attn's -1)"
    found = window if is_pair else type(window).__name__
    return note_mistake(
        errors.OptionValueError, name="window_size", value=str(found), allowed=allowed
    )
