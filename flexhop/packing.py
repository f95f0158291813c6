"""Packed sequences as a block mask of the packed tensors."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from flexhop.block_ranges import RangeLists, list_ranges
from flexhop.mods import MaskMod
from flexhop.row_tables import RowTables, Window, local_mask_mod, range_mask, tabulate_rows

_BLOCK = 128


class Packing(NamedTuple):
    """How packed tokens are cut into sequences, and which keys of its sequence a query sees.

    offsets_q, offsets_k: [S + 1], where each sequence begins, and the end of the last one.
    used_k, used_q: [S], how many tokens of each sequence exist, or None for all.
    """

    offsets_q: Tensor
    offsets_k: Tensor
    used_k: Tensor | None
    window: Window
    used_q: Tensor | None = None


class RangeMask(NamedTuple):
    """A BlockMask whose rows visit one range of blocks each, in O(blocks) memory.

    Fields are those of BlockMask; indices are [1, 1, R, 3], see RangeLists.
    """

    seq_lengths: tuple[int, int]
    kv_num_blocks: Tensor
    kv_indices: Tensor
    full_kv_num_blocks: Tensor
    full_kv_indices: Tensor
    q_num_blocks: Tensor
    q_indices: Tensor
    full_q_num_blocks: Tensor
    full_q_indices: Tensor
    BLOCK_SIZE: tuple[int, int]
    mask_mod: MaskMod
    has_ranges: bool = True


def pack_mask(
    queries: int, keys: int, packing: Packing, mask_mod: MaskMod | None
) -> tuple[RowTables, RangeMask]:
    """The tables and the block mask of packed sequences, made without looking at the mask.

    Args:
        queries: T, number of query tokens. keys: U.
        packing: the sequences.
        mask_mod: in local indices, or None.
    """
    tables = tabulate_rows(
        packing.offsets_q, packing.offsets_k, queries, packing.window,
        (packing.used_q, packing.used_k),
    )  # fmt: skip
    keep = range_mask(tables) if mask_mod is None else local_mask_mod(mask_mod, tables)
    seen = tables.first, tables.end
    return tables, mask_ranges(seen, keys, keep, has_full=mask_mod is None)


def mask_ranges(
    seen: tuple[Tensor, Tensor], keys: int, keep: MaskMod, *, has_full: bool = True
) -> RangeMask:
    """The mask of queries that see one range of keys each; arguments as for list_ranges.

    keep: the mask_mod of its partial blocks.
    """
    size = (_BLOCK, _BLOCK)
    lists = list_ranges(seen, keys, size, has_full=has_full)
    row, column = (RangeLists(*(t[None, None] for t in side)) for side in lists)
    return RangeMask((seen[0].size(0), keys), *row, *column, size, keep)
