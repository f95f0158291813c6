"""Block lists and their dense form: the tensor arithmetic under BlockMask.

A pair (num_blocks [..., R], indices [..., R, W]) says which columns each of R rows visits: the
first num_blocks entries of its row of indices. Nothing here synchronises or lets a shape depend on
data, so everything can be traced and captured in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from flexhop.compat.sizes import is_symbolic

# Entries of lists to create at once: about 20 bytes of temporaries each.
LISTED_AT_ONCE = 4 * 1024 * 1024


def block_count(length: int, block: int) -> int:
    """Number of blocks that cover `length` positions; the last one may extend past the end."""
    return (length + block - 1) // block


def listed_count(length: int, block: int) -> int:
    """Number of blocks that lists have room for: one more than exist if length is symbolic.

    PyTorch specialises on sizes of 1, and would reject an exported program whose lengths include
    single blocks. Kernels never visit the extra block.
    """
    spare = block if is_symbolic(length) else 0
    return block_count(length + spare, block)


def by_memory(change: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """A change of tensors that keeps shapes, and what batches or heads share."""

    def changed(tensor: Tensor) -> Tensor:
        one = in_memory(tensor)
        return change(tensor) if one is tensor else change(one).expand(tensor.shape)

    return changed


def in_memory(tensor: Tensor) -> Tensor:
    """One of the batches or heads that share memory; the tensor itself if none do."""
    for dim in range(tensor.dim()):
        if is_shared(tensor, dim):
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def is_shared(tensor: Tensor, dim: int) -> bool:
    """Whether all places of a dimension, such as all heads, have the same memory."""
    return tensor.stride(dim) == 0 and tensor.size(dim) > 1


def lists_to_dense(num_blocks: Tensor, indices: Tensor, columns: int) -> Tensor:
    """Mark the visited columns of each row.

    Args:
        num_blocks: [..., R] int32, used entries per row.
        indices: [..., R, W] int32; entries from num_blocks on are ignored, whatever their value.
            So is a used entry that names no column of the grid.
        columns: C, the width of the grid; independent of W.

    Returns:
        [..., R, C] bool.
    """
    position = torch.arange(indices.shape[-1], device=indices.device, dtype=torch.int32)
    named = (position < num_blocks[..., None]) & (indices >= 0) & (indices < columns)
    # Ignored entries go to an extra column that is cut off: no shape depends on data.
    target = torch.where(named, indices, columns).long()
    dense = torch.zeros(
        (*indices.shape[:-1], columns + 1), dtype=torch.bool, device=indices.device
    )
    return dense.scatter(-1, target, True)[..., :columns]


class BlockRanges(NamedTuple):
    """Blocks start .. stop - 1 of each row; full_count of them, from full_start on, are full."""

    start: Tensor
    stop: Tensor
    full_start: Tensor
    full_count: Tensor


def find_ranges(
    seen: tuple[Tensor, Tensor],
    columns: int,
    block_size: tuple[int, int],
    *,
    full_overhangs: bool = False,
) -> BlockRanges:
    """The blocks of a mask whose query i sees keys first[i] .. end[i] - 1; seen = first, end.

    Kernels use the same rule (templates/portable/ranges.py.jinja).

    Args:
        seen: two of [..., M] integers, both non-decreasing along a row; a query whose two are
            equal sees nothing.
        columns: C, number of blocks of keys.
        block_size: queries and keys per block.
        full_overhangs: whether a row of blocks that extends past the queries may have full blocks.

    Returns:
        [..., R] each. If ends decrease, the blocks are wrong, but they exist and full ones are
        visited.
    """
    first, end = seen
    q_size, kv_size = block_size
    queries = first.size(-1)
    rows = torch.arange(block_count(queries, q_size), device=first.device)
    # The ends never decrease, so a block's first and last query determine it.
    top, bottom = rows * q_size, ((rows + 1) * q_size).clamp(max=queries) - 1
    start = _floor(first[..., top], kv_size).clamp(0, columns)
    stop = torch.maximum(_ceil(end[..., bottom], kv_size).clamp(0, columns), start)
    full_start = torch.minimum(torch.maximum(_ceil(first[..., bottom], kv_size), start), stop)
    full_stop = torch.minimum(_floor(end[..., top], kv_size), stop)
    count = (full_stop - full_start).clamp(min=0)
    if not full_overhangs:  # by definition of a full block
        count = torch.where(rows < queries // q_size, count, 0)
    return BlockRanges(start, stop, full_start, count)


def ranges_to_dense(
    seen: tuple[Tensor, Tensor], columns: int, block_size: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    """Mark the partial and full blocks of each row: [..., R, C] bool; args of find_ranges."""
    ranges = (t[..., None] for t in find_ranges(seen, columns, block_size))
    start, stop, full_start, full_count = ranges
    column = torch.arange(columns, device=start.device)
    full = (column >= full_start) & (column < full_start + full_count)
    return (column >= start) & (column < stop) & ~full, full


def _floor(value: Tensor, block: int) -> Tensor:
    return torch.div(value, block, rounding_mode="floor")


def _ceil(value: Tensor, block: int) -> Tensor:
    return _floor(value + block - 1, block)


def dense_to_lists(dense: Tensor, *, in_graph: bool = False) -> tuple[Tensor, Tensor]:
    """List the marked columns of each row, ascending, then the unmarked ones, ascending.

    Args:
        dense: [..., R, C] bool.
        in_graph: whether a graph is being traced; Dynamo detects itself.

    Returns:
        num_blocks [..., R] and indices [..., R, C], both int32 and contiguous.
    """
    num_blocks = dense.sum(-1, dtype=torch.int32)
    if in_graph or torch.compiler.is_compiling() or dense.numel() <= LISTED_AT_ONCE:
        return num_blocks, _order_by_running_sums(dense, num_blocks)
    order = torch.empty(dense.shape, dtype=torch.int32, device=dense.device)
    step = max(1, LISTED_AT_ONCE * dense.shape[-2] // dense.numel())
    for row in range(0, dense.shape[-2], step):
        rows = slice(row, row + step)
        order[..., rows, :] = _order_by_running_sums(dense[..., rows, :], num_blocks[..., rows])
    return num_blocks, order


def _order_by_running_sums(dense: Tensor, num_blocks: Tensor) -> Tensor:
    """The indices of `dense_to_lists`: a column's place is the number of marks before it.

    Args:
        dense: [..., R, C] bool; temporaries take about 20 bytes of each entry.
        num_blocks: [..., R] int32, marks per row.
    """
    column = torch.arange(dense.shape[-1], device=dense.device, dtype=torch.int32)
    ahead = dense.cumsum(-1, dtype=torch.int32)  # marks up to and including a column
    place = torch.where(dense, ahead - 1, num_blocks[..., None] + column - ahead)
    columns = column.expand_as(place)
    return columns.scatter(-1, place.long(), columns)  # every place is written


def transpose_lists(num_blocks: Tensor, indices: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    """For each column, the rows that visit it, ascending: ([..., C], [..., C, R]), int32."""
    return dense_to_lists(lists_to_dense(num_blocks, indices, columns).mT)


def real_sizes(length: int, block: int, blocks: int, device: torch.device) -> Tensor:
    """How many positions below `length` each of `blocks` blocks contains: [blocks] int64."""
    start = torch.arange(blocks, device=device) * block
    return (length - start).clamp(0, block)


def write_order(visited: Tensor, q_indices: Tensor, descending: bool) -> Tensor:
    """The turn of each key block in adding to the dQ of each query block, if the order is fixed.

    Args:
        visited: [..., R, C] bool, partial and full blocks together.
        q_indices: [..., C, W] int32, the query blocks of each key block.
        descending: the last key block of a row adds first; otherwise the first one does.

    Returns:
        [..., C, W] int32: for entry w of column c, the turn (from 0) of c in row q_indices[c, w].
    """
    earlier = visited.cumsum(-1, dtype=torch.int32) - visited.int()
    if descending:
        earlier = visited.sum(-1, keepdim=True, dtype=torch.int32) - 1 - earlier
    batch = torch.broadcast_shapes(visited.shape[:-2], q_indices.shape[:-2])
    # Unused entries may hold any number, such as -1; their result is never used.
    rows = q_indices.clamp(0, visited.shape[-2] - 1).long()
    turns = earlier.mT.expand(*batch, -1, -1)
    return turns.gather(-1, rows.expand(*batch, -1, -1))


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
