"""Packed sequences as a block mask of the packed tensors."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from flexhop.block_mask import BlockMask
from flexhop.block_ranges import RangeLists, list_ranges
from flexhop.mods import MaskMod
from flexhop.row_tables import RowTables, Window, local_mask_mod, range_mask, tabulate_rows

_BLOCK = 128


class Packing(NamedTuple):
    """How packed tokens are cut into sequences, and which keys of its sequence a query sees.

    offsets_q, offsets_k: [S + 1], where each sequence begins, and the end of the last one.
    used_k, used_q: [S], how many tokens of each sequence exist, or None for all. longest_q,
    longest_k: at least the lengths of the longest sequences, or None.
    """

    offsets_q: Tensor
    offsets_k: Tensor
    used_k: Tensor | None
    longest_q: int | None
    longest_k: int | None
    window: Window
    used_q: Tensor | None = None


def pack_mask(
    queries: int, keys: int, packing: Packing, mask_mod: MaskMod | None
) -> tuple[RowTables, BlockMask]:
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
    block_mask = mask_ranges(seen, keys, keep, has_full=mask_mod is None, widths=_widths(packing))
    return tables, block_mask


def mask_ranges(
    seen: tuple[Tensor, Tensor],
    keys: int,
    keep: MaskMod,
    *,
    has_full: bool = True,
    widths: tuple[int | None, int | None] = (None, None),
) -> BlockMask:
    """The block mask of queries that see one range of keys each; arguments as for list_ranges.

    keep: the mask_mod of its partial blocks.
    """
    size = (_BLOCK, _BLOCK)
    lists = list_ranges(seen, keys, size, has_full=has_full, widths=widths)
    row, column = (RangeLists(*(t[None, None] for t in side)) for side in lists)
    return BlockMask(
        (seen[0].size(0), keys), row.num_blocks, row.indices, row.full_num_blocks,
        row.full_indices, column.num_blocks, column.indices, column.full_num_blocks,
        column.full_indices, size, keep,
    )  # fmt: skip


def _widths(packing: Packing) -> tuple[int | None, int | None]:
    """The most blocks that a row and a column visit; known where both sides are cut alike."""
    longest = packing.longest_k if packing.longest_q is None else packing.longest_q
    if packing.offsets_q is not packing.offsets_k or longest is None:
        return None, None
    # The first and the last sequence of a block reach beyond it.
    width = (2 * longest + _BLOCK) // _BLOCK + 2
    return width, width
