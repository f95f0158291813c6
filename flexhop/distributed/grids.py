"""The block grid of a mask, converted to units that all masks of a model share.

Tokens are on the same rank for all layers, so the sequence is divided into *units*: the smallest
runs of tokens that are whole query blocks and key blocks in every mask.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexhop.block_mask.fields import dense_blocks
from flexhop.block_mask.lists import block_count, ranges_to_dense, real_sizes
from flexhop.block_mask.mask import BlockMask
from flexhop.distributed.packed import PackedSequences
from flexhop.errors import PlanError
from flexhop.ops.mask_lists import normalized

DEFAULT_BLOCK = 128


class MaskGrid(NamedTuple):
    """A block mask of a whole sequence in dense form, on the CPU.

    partial, full: [B', H', R, C] bool, with B' and H' as in the mask, or 1 if all share their
    lists. block: queries and keys per block. length: tokens.
    """

    partial: Tensor
    full: Tensor
    block: tuple[int, int]
    length: int

    @property
    def visited(self) -> Tensor:
        """[R, C] bool: blocks that some batch and head visits."""
        return (self.partial | self.full).flatten(0, 1).any(0)

    def needs(self, unit: int) -> Tensor:
        """[U, U] bool: whether queries of a unit visit keys of a unit."""
        return self._by_unit(self.visited.long(), unit) > 0

    def work(self, unit: int) -> Tensor:
        """[U, U] int64: (query, key) pairs in visited blocks, averaged over heads."""
        heights, widths = (
            real_sizes(self.length, size, count, torch.device("cpu"))
            for size, count in zip(self.block, self.partial.shape[-2:], strict=True)
        )
        visits = (self.partial | self.full).flatten(0, 1).double().mean(0)
        return self._by_unit(visits * heights[:, None] * widths, unit)

    def _by_unit(self, blocks: Tensor, unit: int) -> Tensor:
        """Sum [R, C] over the blocks of each pair of units."""
        units = block_count(self.length, unit)
        rows, columns = (unit // size for size in self.block)
        missing = units * columns - blocks.size(1), units * rows - blocks.size(0)
        whole = torch.nn.functional.pad(blocks, (0, missing[0], 0, missing[1]))
        return whole.view(units, rows, units, columns).sum((1, 3))


class Demand(NamedTuple):
    """A mask in units, [U, U] each: whether queries visit keys, and how many pairs."""

    needs: Tensor
    work: Tensor

    @classmethod
    def of(cls, grid: MaskGrid, unit: int) -> Demand:
        """The demand of a grid."""
        return cls(grid.needs(unit), grid.work(unit))


def read_masks(masks: Any, length: int | None) -> dict[str, MaskGrid]:
    """Grids of the masks of one model, by name.

    Args:
        masks: one mask, or several by name; each a BlockMask of flexhop or PyTorch,
            PackedSequences, or None, which visits everything.
        length: tokens of the whole sequence; required if every mask is None.

    Raises:
        PlanError: a mask is not for self-attention, or the lengths differ.
    """
    named = masks if isinstance(masks, Mapping) else {"": masks}
    if not named:
        raise PlanError(argument="masks", found="is empty", expected="a plan needs at least one")
    lengths = {name: _length(name, mask) for name, mask in named.items() if mask is not None}
    if length is None:
        length = next(iter(lengths.values()), None)
    if length is None:
        raise PlanError(
            argument="length",
            found="is missing",
            expected="no mask gives the length of the sequence",
        )
    for name, found in lengths.items():
        if found != length:
            raise PlanError(
                argument=_words(name), found=f"is for {found} tokens",
                expected=f"the sequence has {length}",
            )  # fmt: skip
    return {name: _grid(mask, length) for name, mask in named.items()}


def common_unit(grids: Mapping[str, MaskGrid]) -> int:
    """Tokens per unit: the least common multiple of all block sizes and 16.

    Dropout is drawn for 16 queries and keys at once (ops/dropout.py), so these stay together.
    """
    return math.lcm(16, *(size for grid in grids.values() for size in grid.block))


def _words(name: str) -> str:
    return f"the mask {name!r}" if name else "the mask"


def _length(name: str, mask: Any) -> int:
    if isinstance(mask, PackedSequences):
        return mask.total
    queries, keys = BlockMask.of(mask).seq_lengths
    if queries != keys:
        raise PlanError(
            argument=_words(name), found=f"has {queries} queries and {keys} keys",
            expected="context parallelism needs self-attention, with as many keys as queries",
        )  # fmt: skip
    return int(queries)


def _grid(mask: Any, length: int) -> MaskGrid:
    if mask is None:
        return _full_grid(length)
    if isinstance(mask, PackedSequences):
        return _packed_grid(mask)
    partial, full = (dense.cpu() for dense in dense_blocks(_without_repeats(BlockMask.of(mask))))
    return MaskGrid(partial & ~full, full, tuple(mask.BLOCK_SIZE), length)


def _without_repeats(mask: BlockMask) -> BlockMask:
    """The key blocks of a mask, with one of the batches or heads that share their lists."""
    lists = mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices
    given, _ = normalized(tuple(tensor for tensor in lists if tensor is not None))
    return BlockMask.from_kv_blocks(
        *given, BLOCK_SIZE=mask.BLOCK_SIZE, seq_lengths=mask.seq_lengths, compute_q_blocks=False
    )


def _full_grid(length: int) -> MaskGrid:
    blocks = block_count(length, DEFAULT_BLOCK)
    full = torch.ones(1, 1, blocks, blocks, dtype=torch.bool)
    if length % DEFAULT_BLOCK:
        full[..., -1, :] = full[..., :, -1] = False
    return MaskGrid(~full, full, (DEFAULT_BLOCK, DEFAULT_BLOCK), length)


def _packed_grid(mask: PackedSequences) -> MaskGrid:
    """Blocks of packed sequences, by arithmetic; full ones count as partial if a mask_mod hides
    more."""
    tables = mask.tables()
    seen = tables.first[None, None].cpu(), tables.end[None, None].cpu()
    block = (DEFAULT_BLOCK, DEFAULT_BLOCK)
    columns = block_count(mask.total, DEFAULT_BLOCK)
    partial, full = ranges_to_dense(seen, columns, block)
    if mask.total % DEFAULT_BLOCK:
        full, partial = full.clone(), partial.clone()
        partial[..., -1] |= full[..., -1]
        full[..., -1] = False
    if mask.mask_mod is not None:
        partial, full = partial | full, torch.zeros_like(full)
    return MaskGrid(partial, full, block, mask.total)
