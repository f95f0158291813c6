"""Decoding: the mask of a step with one query is a row of keys, a plain tensor.

A BlockMask per token would take two dozen operations, and every compiled call that receives it
would check a dozen attributes. A row takes five operations and one check. Its block lists are
computed where it is used: in a compiled model that is inside the graph, and so inside its CUDA
graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from flexhop.block_mask import BlockMask
from flexhop.block_mask.scores import count_up
from flexhop.mods import MaskMod

_BLOCK = 128
STEP = "_flexhop_lists"  # attribute of rows made here: their block lists, once they are known


def visible_keys(
    mask_function: Callable[..., Any],
    sizes: tuple[int, int],
    offsets: tuple[int | Tensor, int],
    attention_mask: Tensor | None,
    device: torch.device,
) -> Tensor:
    """The keys that the one query of a step sees: [B or 1, 1, 1, N] bool.

    Args:
        mask_function: (b, h, q_idx, kv_idx) -> bool, of positions in the sequence; indices may
            have any shapes that broadcast.
        sizes: B and N.
        offsets: the position of the query, and of the first key.
        attention_mask: [B, S] bool by position, False for padding; all from S on is padding.
        device: of the result.
    """
    (batch_size, length), (q_offset, kv_offset) = sizes, offsets
    batch = count_up(batch_size, device).view(-1, 1, 1, 1)
    keys = torch.arange(kv_offset, kv_offset + length, dtype=torch.int32, device=device)
    if isinstance(q_offset, Tensor):
        query = q_offset.to(device)
    else:  # a tensor, because a number would be compiled into a graph
        query = torch.full((), q_offset, dtype=torch.int32, device=device)
    seen = mask_function(batch, batch[:1], query, keys)
    seen = seen.view((1,) * (4 - seen.dim()) + seen.shape)
    if attention_mask is not None:
        tokens = attention_mask[:, kv_offset : kv_offset + length]
        missing = length - tokens.size(1)
        tokens = pad(tokens, (0, missing)) if missing > 0 else tokens
        seen = seen & tokens[:, None, None]
    if not torch.compiler.is_compiling():
        setattr(seen, STEP, None)
    return seen


def is_row(mask: Any, query: Tensor) -> bool:
    """Whether a mask is a row of keys: bool, [B or 1, H or 1, 1, N], for one query."""
    return (
        isinstance(mask, Tensor)
        and mask.dtype == torch.bool
        and mask.dim() == 4
        and query.size(2) == 1
    )


def block_lists(row: Tensor) -> tuple[Tensor, Tensor]:
    """kv_num_blocks and kv_indices of a row: all blocks from its first visible key to its last.

    Masks of decoding are such ranges, but for holes that the row itself hides.
    """
    length = row.size(3)
    # Two or more, because PyTorch specialises on sizes of 1: a cache may grow past one block.
    columns = length // _BLOCK + 2
    block = count_up(length, row.device) // _BLOCK
    last = torch.where(row, block, -1).amax(3)
    first = torch.where(row, block, columns).amin(3)
    spread = first[..., None] + count_up(columns, row.device)
    counts = (last - first + 1).clamp(min=0)
    return counts.to(torch.int32), spread.clamp(max=columns - 1).to(torch.int32)


def row_blocks(row: Tensor, lists: tuple[Tensor, Tensor]) -> BlockMask:
    """The block mask of a row, from its `block_lists`."""
    return BlockMask.from_kv_blocks(
        *lists,
        BLOCK_SIZE=_BLOCK,
        mask_mod=_row_mask(row),
        seq_lengths=(1, row.size(3)),
        compute_q_blocks=False,
    )


def _row_mask(row: Tensor) -> MaskMod:
    """A mask_mod that reads the row; dimensions of size 1 are shared."""
    table = row[:, :, 0]
    by_head, by_batch = row.size(1) != 1, row.size(0) != 1
    table = table if by_head else table[:, 0]
    table = table if by_batch else table[0]

    def row_mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        places = ((b,) if by_batch else ()) + ((h,) if by_head else ())
        return table[(*places, kv_idx)]

    return row_mask
