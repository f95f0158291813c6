"""Block lists where each query sees one range of keys: no element of the mask is looked at.

Packed sequences, causal or with a window, are such masks. Both ends of the range never decrease
from a query to the next, so the blocks that a row or a column visits are a range as well, and the
full ones among them a range inside it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flexhop.block_lists import block_count


class RangeLists(NamedTuple):
    """The block lists of one side, without the axes of batch and head.

    indices of `list_rows` are as BlockMask has them, those of `list_ranges` say where a row's
    entries begin and where they jump: entry i is start + i, plus gap from i = at on.
    """

    num_blocks: Tensor  # [R] int32
    indices: Tensor  # [R, W] int32, or [R, 3]: start, at, gap
    full_num_blocks: Tensor
    full_indices: Tensor


class _Ranges(NamedTuple):
    """Blocks start..stop of each row, of which full_start.. and full_count more are full."""

    start: Tensor
    stop: Tensor
    full_start: Tensor
    full_count: Tensor


def list_ranges(
    seen: tuple[Tensor, Tensor],
    key_length: int,
    block_size: tuple[int, int],
    *,
    has_full: bool,
) -> tuple[RangeLists, RangeLists]:
    """The blocks of a mask whose query i sees the keys first[i] .. end[i] - 1; seen = first, end.

    O(M / block) work and memory. Nothing waits for the device.

    Args:
        seen: two of [M] integers, never decreasing; query i sees nothing where both are equal.
        key_length: N.
        block_size: queries and keys of a block.
        has_full: whether a block that lies in all of its queries' ranges is listed as full.

    Returns:
        key blocks of each row of blocks, and query blocks of each column.
    """
    queries = seen[0].size(0)
    columns = block_count(key_length, block_size[1])
    by_row = _row_ranges(seen, columns, block_size, has_full=has_full)
    by_column = _transpose(by_row, columns, queries // block_size[0])
    return _spell(by_row), _spell(by_column)


def list_rows(
    seen: tuple[Tensor, Tensor], key_length: int, block_size: tuple[int, int], width: int
) -> RangeLists:
    """As list_ranges, per batch and without the columns: for calls that need no gradient.

    Args:
        seen: two of [B, M] integers, never decreasing along a row.
        key_length: N.
        block_size: queries and keys of a block.
        width: the most blocks that a row visits.

    Returns:
        [B, R] and [B, R, W]. A row of blocks that overhangs the queries may have full blocks: what
        kernels compute for queries that do not exist is not stored.
    """
    columns = block_count(key_length, block_size[1])
    ranges = _row_ranges(seen, columns, block_size, has_full=True, full_overhangs=True)
    return _list(ranges, min(width, columns))


def _row_ranges(
    seen: tuple[Tensor, Tensor],
    columns: int,
    block_size: tuple[int, int],
    *,
    has_full: bool,
    full_overhangs: bool = False,
) -> _Ranges:
    first, end = seen
    q_size, kv_size = block_size
    queries = first.size(-1)
    rows = torch.arange(block_count(queries, q_size), device=first.device)
    # The ends never decrease: the first and the last query of a block say all about it.
    top, bottom = rows * q_size, ((rows + 1) * q_size).clamp(max=queries) - 1
    start, stop = _floor(first[..., top], kv_size), _ceil(end[..., bottom], kv_size)
    full_start = _ceil(first[..., bottom], kv_size)
    full_stop = _floor(end[..., top], kv_size)
    count = (full_stop - full_start).clamp(min=0)
    if not has_full:
        count = torch.zeros_like(count)
    if not full_overhangs:  # by the definition of a full block
        count = torch.where(rows < queries // q_size, count, 0)
    return _nested(_Ranges(start, stop, full_start, count), columns)


def _transpose(ranges: _Ranges, columns: int, whole_rows: int) -> _Ranges:
    """The rows that visit each column; the same by symmetry, since no end decreases."""
    column = torch.arange(columns, device=ranges.start.device)
    stop = torch.searchsorted(ranges.start, column, right=True)
    start = torch.searchsorted(ranges.stop, column, right=True)
    # Rows that overhang have no full blocks, and no column finds them. They are not cut off:
    # Triton cannot search in a tensor without elements.
    rows = ranges.start.size(0)
    is_whole = torch.arange(rows, device=column.device) < whole_rows
    full_start = torch.where(is_whole, ranges.full_start, columns)
    lowest = torch.searchsorted(full_start + ranges.full_count, column, right=True)
    highest = torch.searchsorted(full_start, column, right=True)
    return _nested(_Ranges(start, stop, lowest, (highest - lowest).clamp(min=0)), rows)


def _nested(ranges: _Ranges, limit: int) -> _Ranges:
    """The full blocks among the visited ones, these among those that exist.

    True already, unless the ends decrease; then results are wrong, but nothing outside is read.
    """
    start = ranges.start.clamp(0, limit)
    stop = torch.maximum(ranges.stop.clamp(0, limit), start)
    full_start = torch.minimum(torch.maximum(ranges.full_start, start), stop)
    return _Ranges(start, stop, full_start, torch.minimum(ranges.full_count, stop - full_start))


def _spell(ranges: _Ranges) -> RangeLists:
    """Where entries begin and jump; the partial blocks jump over the full ones."""
    start, stop, full_start, full_count = ranges
    nothing = torch.zeros_like(start)
    partial = torch.stack((start, full_start - start, full_count), -1)
    full = torch.stack((full_start, nothing, nothing), -1)
    lists = (stop - start - full_count, partial, full_count, full)
    return RangeLists(*(t.to(torch.int32) for t in lists))


def _list(ranges: _Ranges, width: int) -> RangeLists:
    start, stop, full_start, full_count = (t[..., None] for t in ranges)
    position = torch.arange(width, device=start.device)
    count = stop - start - full_count
    behind = (full_count > 0) & (position >= full_start - start)
    indices = start + position + torch.where(behind, full_count, 0)
    lists = (count[..., 0], indices, full_count[..., 0], full_start + position)
    return RangeLists(*(t.to(torch.int32).contiguous() for t in lists))


def _floor(value: Tensor, block: int) -> Tensor:
    return torch.div(value, block, rounding_mode="floor")


def _ceil(value: Tensor, block: int) -> Tensor:
    return _floor(value + block - 1, block)
