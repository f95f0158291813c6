"""Which blocks are non-empty and which are full, if each query sees one range of keys."""

from __future__ import annotations

import torch
from torch import Tensor

from flexhop import analysis
from flexhop.block_mask.scores import CHUNK_ELEMENTS, Grid


def blocks_of_span(span: analysis.Span, grid: Grid) -> tuple[Tensor, Tensor]:
    """(some, every), [B or 1, H or 1, R, C] bool, of a mask of ranges. Does not synchronise.

    A query touches the blocks from its first key's to its last key's, and covers those between. It
    adds one where those that it touches begin and subtracts one where they end, and a running sum
    counts. All queries of a row cover a block if the last to begin and the first to end do.
    """
    shape = (grid.batch, grid.heads, grid.q_len)
    first, end = (t.expand(shape) for t in (span.first, span.end))
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


def _rows_of_span(first: Tensor, end: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
    """The same for some rows of blocks and the ranges of their queries."""
    (height, size), columns, device = grid.block, grid.columns, first.device
    count = first.shape[-1]
    rows = -(-count // height)
    end = torch.where(end > first, end, 0)
    # Whether the queries of a row begin early enough and end late enough is a matter of two.
    place = torch.arange(rows * height, device=device).clamp(max=count - 1)
    last, least = (t[..., place] if rows * height > count else t for t in (first, end))
    last = last.unflatten(-1, (rows, height)).amax(-1, keepdim=True)
    least = least.unflatten(-1, (rows, height)).amin(-1, keepdim=True)
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
