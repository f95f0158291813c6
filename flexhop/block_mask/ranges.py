"""Block lists where each query sees one range of keys: no element of the mask is looked at."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flexhop.block_mask.lists import block_count, find_ranges


class RangeLists(NamedTuple):
    """The block lists of one side, as BlockMask has them but without the axes of heads."""

    num_blocks: Tensor  # [B, R] int32
    indices: Tensor  # [B, R, W] int32
    full_num_blocks: Tensor
    full_indices: Tensor


def list_rows(
    seen: tuple[Tensor, Tensor], key_length: int, block_size: tuple[int, int], width: int
) -> RangeLists:
    """The blocks that each row visits: for calls that need no gradient.

    Args:
        seen: two of [B, M] integers, never decreasing along a row: query i sees the keys
            first[i] .. end[i] - 1.
        key_length: N.
        block_size: queries and keys of a block.
        width: the most blocks that a row visits.

    Returns:
        [B, R] and [B, R, W]. A row of blocks that overhangs the queries may have full blocks: what
        kernels compute for queries that do not exist is not stored.
    """
    columns = block_count(key_length, block_size[1])
    ranges = find_ranges(seen, columns, block_size, full_overhangs=True)
    start, stop, full_start, full_count = (t[..., None] for t in ranges)
    position = torch.arange(min(width, columns), device=start.device)
    count = stop - start - full_count
    behind = (full_count > 0) & (position >= full_start - start)
    indices = start + position + torch.where(behind, full_count, 0)
    lists = (count[..., 0], indices, full_count[..., 0], full_start + position)
    return RangeLists(*(t.to(torch.int32).contiguous() for t in lists))
