"""Block lists of masks whose queries see one range of keys each, without evaluating the mask."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flexhop.block_mask.lists import block_count, find_ranges


class RangeLists(NamedTuple):
    """The block lists of one side, as in BlockMask but without the head axis."""

    num_blocks: Tensor  # [B, R] int32
    indices: Tensor  # [B, R, W] int32
    full_num_blocks: Tensor
    full_indices: Tensor


def list_rows(
    seen: tuple[Tensor, Tensor], key_length: int, block_size: tuple[int, int], width: int
) -> RangeLists:
    """The blocks that each row visits, for calls without gradients.

    Args:
        seen: two of [B, M] integers, non-decreasing along a row: query i sees keys first[i] ..
            end[i] - 1.
        key_length: N.
        block_size: queries and keys per block.
        width: most blocks that a row visits.

    Returns:
        [B, R] and [B, R, W]. A row of blocks that extends past the queries may have full blocks:
        kernels do not store results of queries that do not exist.
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
