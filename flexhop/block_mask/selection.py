"""Indexing a BlockMask: from the user's index to slices, and the remaining length."""

from __future__ import annotations

from typing import NoReturn, SupportsIndex

from torch import Tensor

from flexhop.block_mask.fields import MaskFields, as_int
from flexhop.errors import BlockMaskIndexError, SlicedMaskModError

Index = SupportsIndex | slice | Tensor | list[int]
_Kept = slice | Tensor | list[int]


def sliced_mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> NoReturn:
    """The mask_mod of a selection; it does not know the offset of its indices.

    Raises:
        SlicedMaskModError: always.
    """
    raise SlicedMaskModError()


def select_blocks(
    fields: MaskFields, index: Index | tuple[Index, ...]
) -> tuple[tuple[_Kept, ...], tuple[int, int], bool]:
    """Read an index by batch, head and Q-block.

    Returns:
        An index for the count and index tensors that keeps dimensions, the lengths of the
        selection, and whether it keeps every dimension whole.

    Raises:
        BlockMaskIndexError: more indices than dimensions.
        IndexError: an int that is out of range; this also ends `for part in block_mask`.
    """
    items = index if isinstance(index, tuple) else (index,)
    if items and items[-1] is Ellipsis:  # the rest is kept anyway
        items = items[:-1]
    sizes = fields.kv_num_blocks.shape
    if len(items) > len(sizes):
        raise BlockMaskIndexError(count=len(items))
    selection = tuple(_kept(item, size) for item, size in zip(items, sizes, strict=False))
    new_sizes = fields.kv_num_blocks[selection].shape
    whole = new_sizes == sizes and not any(_is_list(item) for item in selection)
    q_len, kv_len = fields.seq_lengths
    if len(selection) == len(sizes):  # the last dimension is that of the Q-blocks
        q_len = _remaining(selection[-1], (q_len, fields.BLOCK_SIZE[0]), sizes[-1], new_sizes[-1])
    return selection, (q_len, kv_len), whole


def _kept(item: Index, size: int) -> _Kept:
    """An index of one dimension that keeps the dimension."""
    if isinstance(item, Tensor):  # is not read: this must not synchronise
        return item[None] if item.dim() == 0 else item
    position = as_int(item)
    return _as_slice(position, size) if isinstance(position, int) else position


def _is_list(item: object) -> bool:
    """Whether an index lists positions, in any order: a tensor, a list or a NumPy array."""
    return isinstance(item, Tensor) or (hasattr(item, "__len__") and not isinstance(item, slice))


def _as_slice(position: int, size: int) -> slice:
    """The slice of one element at `position`."""
    if position >= size or position < -size:
        raise IndexError(f"index {position} is out of range for a dimension of size {size}")
    start = position + size if position < 0 else position
    return slice(start, start + 1)


def _remaining(
    selection: _Kept, length_and_block: tuple[int, int], blocks: int, chosen: int
) -> int:
    """Number of queries in the chosen blocks; all blocks but the last are whole."""
    length, block = length_and_block
    if not isinstance(selection, slice):
        return chosen * block  # where the last block went is data, and this must not synchronise
    start = 0 if selection.start is None else selection.start
    start = start + blocks if start < 0 else start
    last = max(start, 0) + (chosen - 1) * (1 if selection.step is None else selection.step)
    overhang = blocks * block - length
    return chosen * block - (overhang if chosen > 0 and last == blocks - 1 else 0)
