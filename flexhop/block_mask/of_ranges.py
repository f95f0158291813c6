"""Which blocks are non-empty and which are full, if each query sees one range of keys."""

from __future__ import annotations

import torch
from torch import Tensor

from flexhop import analysis
from flexhop.block_mask.scores import CHUNK_ELEMENTS, Grid


def blocks_of_span(span: analysis.Span, grid: Grid) -> tuple[Tensor, Tensor]:
    """(some, every), [B or 1, H or 1, R, C] bool, of a mask of ranges. Does not synchronise.

    If all ranges begin at the first key, or all end at the last one, then the longest of a row of
    blocks touches all that the row touches. Otherwise each query adds one where the blocks that it
    touches begin and subtracts one where they end, and a running sum counts. All queries of a row
    cover a block if the last to begin and the first to end do.
    """
    shape = (grid.batch, grid.heads, grid.q_len)
    first, end = (t.expand(shape) for t in (span.first, span.end))
    if span.starts or span.stops:
        return of_one_side(span, grid, torch.arange(grid.columns, device=first.device))
    step = max(1, CHUNK_ELEMENTS // (shape[0] * shape[1] * (grid.columns + 2)))
    found = [
        _rows_of_span(first[..., part], end[..., part], grid)
        for part in (
            slice(row * grid.block[0], (row + step) * grid.block[0])
            for row in range(0, grid.rows, step)
        )
    ]
    if len(found) == 1:
        return found[0]
    some, every = (torch.cat(parts, dim=2) for parts in zip(*found, strict=True))
    return some, every


def of_one_side(span: analysis.Span, grid: Grid, columns: Tensor) -> tuple[Tensor, Tensor]:
    """The same if all ranges begin at the first key, or all end at the last one.

    Args:
        span: the ranges of all queries; the last one may be repeated to fill a row of blocks.
        grid: the blocks.
        columns: their numbers.
    """
    edge = span.end if span.starts else span.first
    edge = edge.expand(grid.batch, grid.heads, -1)
    least, most = _extremes(edge, edge, (grid.rows, grid.block[0]))
    # Numbers of blocks are compared, not their first keys: ptxas up to 13.1 drops the constant of
    # a sum of two 16-bit halves if only one half is read, and LLVM makes such sums of multiples of
    # small counters. Whole masks were wrong.
    size, reaches_end = grid.block[1], least >= grid.kv_len
    before, until = least // size, (most + (size - 1)) // size
    if span.starts:
        return columns < until, reaches_end | (columns < before)
    return ~reaches_end & (columns >= before), columns >= until


def _extremes(low: Tensor, high: Tensor, sizes: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """The least of `low` and the most of `high` over the queries of each row: [..., R, 1].

    sizes: rows, and queries of one row; the last row may have fewer.
    """
    count, (rows, height) = low.shape[-1], sizes
    if rows * height > count:
        place = torch.arange(rows * height, device=low.device).clamp(max=count - 1)
        low, high = low[..., place], high[..., place]
    least = low.unflatten(-1, (rows, height)).amin(-1, keepdim=True)
    return least, high.unflatten(-1, (rows, height)).amax(-1, keepdim=True)


def _rows_of_span(first: Tensor, end: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
    """The same for some rows of blocks and the ranges of their queries."""
    (height, size), columns, device = grid.block, grid.columns, first.device
    count = first.shape[-1]
    rows = -(-count // height)
    end = torch.where(end > first, end, 0)
    # Whether the queries of a row begin early enough and end late enough is a matter of two.
    least, last = _extremes(end, first, (rows, height))
    begin = torch.arange(columns, device=device) * size
    every = (last <= begin) & (least >= (begin + size).clamp(max=grid.kv_len))
    # Each query adds one at the first block that it touches, and subtracts one after the last.
    start = first // size
    stop = torch.maximum(start, (end + (size - 1)) // size)
    row = torch.arange(count, device=device) // height * (columns + 2)
    where = torch.cat([start + row, stop + row], -1)
    signs = torch.ones(2 * count, dtype=torch.int32, device=device)
    signs = torch.where(torch.arange(2 * count, device=device) < count, signs, -signs)
    marks = torch.zeros((*first.shape[:2], rows * (columns + 2)), dtype=torch.int32, device=device)
    marks = marks.scatter_add(-1, where, signs.expand_as(where)).unflatten(-1, (rows, -1))
    return marks.cumsum(-1, dtype=torch.int32)[..., :columns] > 0, every
