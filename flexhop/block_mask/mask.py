"""BlockMask: which blocks of keys each block of queries visits.

The attention matrix is divided into blocks of BLOCK_SIZE = (queries, keys). A block is *full* if
every query in it sees every key, and *partial* if some do. A block in which no query sees a key is
not listed. docs/block_mask.md illustrates the format.
"""

from __future__ import annotations

from types import NoneType
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask as TorchBlockMask

from flexhop.block_mask.fields import (
    TENSOR_FIELDS,
    block_size_pair,
    check_fields,
    dense_blocks,
    is_mask_like,
    narrow_lists,
)
from flexhop.block_mask.lists import (
    block_count,
    dense_to_lists,
    real_sizes,
    transpose_lists,
    write_order,
)
from flexhop.block_mask.picture import MaskPictures
from flexhop.block_mask.saving import SavedMask, dump_context, load_context
from flexhop.block_mask.selection import Index, select_blocks, sliced_mask_mod
from flexhop.block_mask.tensorlike import TensorLikeMask
from flexhop.compat.pytree import Serializer, register_container
from flexhop.compat.sizes import is_symbolic
from flexhop.errors import BlockMaskFieldError, BlockMaskTypeError, UnsupportedFeatureError
from flexhop.mods.functions import MaskMod, noop_mask


class BlockMask(MaskPictures, TensorLikeMask, SavedMask, TorchBlockMask):  # pyright: ignore[reportIncompatibleMethodOverride]
    """A block-sparse attention mask: lists of blocks, and the mask_mod for the partial ones.

    Four pairs of int32 tensors, with R blocks of queries and C blocks of keys:

    - kv_num_blocks [B, H, R], kv_indices [B, H, R, C]: partial key blocks of each query block.
    - full_kv_num_blocks, full_kv_indices: the full ones; None if they were not separated.
    - q_num_blocks [B, H, C], q_indices [B, H, C, R] and full_q_num_blocks, full_q_indices: the
      same, read by column, for the backward pass; None if they were not computed.

    Only the first num_blocks entries of a row of indices count. A full block lies within both
    lengths: a block that extends past the end is partial. If B or H is 1, all batches or heads
    share the lists. There is no `__eq__`, so masks hash and are guarded by identity; compare with
    `same_structure`.

    Args:
        seq_lengths: lengths of query and key, in tokens.
        kv_num_blocks: [B, H, R]; all fields may omit batch and head.
        kv_indices: [B, H, R, W]; W may be less than C if no row visits more than W blocks.
        full_kv_num_blocks: like kv_num_blocks, or None.
        full_kv_indices: like kv_indices, or None.
        q_num_blocks: [B, H, C], or None.
        q_indices: [B, H, C, W], or None.
        full_q_num_blocks: like q_num_blocks, or None.
        full_q_indices: like q_indices, or None.
        BLOCK_SIZE: queries and keys per block.
        mask_mod: mask_mod(b, h, q_idx, kv_idx) -> bool, applied in partial blocks.
        dq_write_order: see `write_order`; metadata for kernels that add dQ in a fixed order.
        dq_write_order_full: the same for full blocks.
        dq_kv_order: an explicit order of key blocks behind dq_write_order, [B, H, C].
        dq_kv_order_spt: that order as a flag: True is descending, False ascending.

    Raises:
        BlockMaskFieldError: a pair is incomplete, or the dtype, rank, shape or device of a tensor
            does not fit the others.
        BlockSizeError: BLOCK_SIZE is not positive.
    """

    def __init__(
        self,
        seq_lengths: tuple[int, int],
        kv_num_blocks: Tensor,
        kv_indices: Tensor,
        full_kv_num_blocks: Tensor | None,
        full_kv_indices: Tensor | None,
        q_num_blocks: Tensor | None,
        q_indices: Tensor | None,
        full_q_num_blocks: Tensor | None,
        full_q_indices: Tensor | None,
        BLOCK_SIZE: tuple[int, int] = (128, 128),
        mask_mod: MaskMod = noop_mask,
        *,
        dq_write_order: Tensor | None = None,
        dq_write_order_full: Tensor | None = None,
        dq_kv_order: Tensor | None = None,
        dq_kv_order_spt: bool | None = None,
    ) -> None:
        self.seq_lengths = seq_lengths
        self.kv_num_blocks = kv_num_blocks
        self.kv_indices = kv_indices
        self.full_kv_num_blocks = full_kv_num_blocks
        self.full_kv_indices = full_kv_indices
        self.q_num_blocks = q_num_blocks
        self.q_indices = q_indices
        self.full_q_num_blocks = full_q_num_blocks
        self.full_q_indices = full_q_indices
        self.dq_write_order = dq_write_order
        self.dq_write_order_full = dq_write_order_full
        self.dq_kv_order = dq_kv_order
        self.dq_kv_order_spt = dq_kv_order_spt
        self.BLOCK_SIZE = block_size_pair(BLOCK_SIZE)
        self.mask_mod = mask_mod
        narrow_lists(self)
        check_fields(self)

    @classmethod
    def from_kv_blocks(
        cls,
        kv_num_blocks: Tensor,
        kv_indices: Tensor,
        full_kv_num_blocks: Tensor | None = None,
        full_kv_indices: Tensor | None = None,
        BLOCK_SIZE: int | tuple[int, int] = 128,
        mask_mod: MaskMod | None = None,
        seq_lengths: tuple[int, int] | None = None,
        compute_q_blocks: bool = True,
        *,
        dq_write_order: Tensor | None = None,
        dq_write_order_full: Tensor | None = None,
        dq_kv_order: Tensor | bool | None = None,
    ) -> BlockMask:
        """Create a mask from the key blocks of each query block.

        Used entries must name blocks of the mask. Compiled calls trust them, because reading them
        would wait for the GPU: kernels read outside the key if an entry is too large.

        Args:
            kv_num_blocks: [B, H, R] int32, number of partial blocks in each row of blocks.
            kv_indices: [B, H, R, W] int32, their columns. Without seq_lengths, W is the number of
                key blocks. Lists of int64, as topk returns them, are copied.
            full_kv_num_blocks: [B, H, R] int32, number of full blocks, or None.
            full_kv_indices: [B, H, R, W] int32, or None.
            BLOCK_SIZE: queries and keys per block; an int means a square.
            mask_mod: applied in partial blocks. None keeps every pair.
            seq_lengths: lengths of query and key, in tokens. None assumes whole blocks, as many as
                the index tensor has room for.
            compute_q_blocks: also list the query blocks of each key block, which the backward pass
                needs.
            dq_write_order: the order of additions to dQ, for kernels that fix it, or None.
            dq_write_order_full: the same for full blocks, or None.
            dq_kv_order: its order of key blocks: True is descending, False ascending; a tensor is
                [B, H, C].

        Raises:
            BlockMaskFieldError, BlockSizeError: as for the class.
        """
        if not isinstance(dq_kv_order, (bool, Tensor, NoneType)):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise BlockMaskFieldError(
                field="dq_kv_order",
                reason=f"dq_kv_order must be a bool, a tensor or None, not {dq_kv_order!r}",
            )
        block_size = block_size_pair(BLOCK_SIZE)
        if kv_indices.dim() < 2:
            raise BlockMaskFieldError(field="kv_indices", reason="it must have 2 dimensions")
        if seq_lengths is None:
            rows, columns = kv_indices.shape[-2], kv_indices.shape[-1]
            seq_lengths = (rows * block_size[0], columns * block_size[1])
        mask = cls(
            seq_lengths,
            kv_num_blocks,
            kv_indices,
            full_kv_num_blocks,
            full_kv_indices,
            None,
            None,
            None,
            None,
            block_size,
            noop_mask if mask_mod is None else mask_mod,
            dq_write_order=dq_write_order,
            dq_write_order_full=dq_write_order_full,
            dq_kv_order=dq_kv_order if isinstance(dq_kv_order, Tensor) else None,
            dq_kv_order_spt=dq_kv_order if isinstance(dq_kv_order, bool) else None,
        )
        if compute_q_blocks:
            mask.list_query_blocks(block_count(seq_lengths[1], block_size[1]))
        return mask

    @classmethod
    def from_torch(cls, mask: Any) -> BlockMask:
        """Convert PyTorch's own BlockMask, of any version; the tensors are shared."""
        # The dq fields came with 2.13.
        fields = {name: getattr(mask, name, None) for name in (*TENSOR_FIELDS, "dq_kv_order_spt")}
        return cls(
            seq_lengths=mask.seq_lengths,
            BLOCK_SIZE=mask.BLOCK_SIZE,
            mask_mod=mask.mask_mod,
            **cast(dict[str, Any], fields),
        )

    @classmethod
    def of(cls, value: object) -> BlockMask:
        """Return a flexhop BlockMask as is, or convert one of PyTorch.

        Raises:
            BlockMaskTypeError: value is neither.
        """
        if isinstance(value, BlockMask):
            return value
        if not is_mask_like(value):
            raise BlockMaskTypeError(found=type(value).__name__)
        return cls.from_torch(value)

    def visited_area(self) -> int:
        """Number of (query, key) pairs in visited blocks, within the lengths. Synchronises."""
        visited = self._visited()
        heights, widths = (
            real_sizes(self.seq_lengths[i], self.BLOCK_SIZE[i], visited.shape[i - 2], self.device)
            for i in (0, 1)
        )
        return int((visited * heights[:, None] * widths).sum().item())

    def density(self) -> float:
        """The visited fraction of the matrix, 0 to 1. Synchronises."""
        total = self.numel()
        return self.visited_area() / total if total else 0.0

    def sparsity(self) -> float:
        """The fraction of the matrix that is not visited, in percent. Synchronises."""
        return 100 * (1 - self.density())

    def num_partial_blocks(self) -> int:
        """Number of partial blocks, over batches and heads. Synchronises."""
        return int(self.kv_num_blocks.sum().item())

    def num_full_blocks(self) -> int:
        """Number of full blocks, over batches and heads. Synchronises."""
        full = self.full_kv_num_blocks
        return 0 if full is None else int(full.sum().item())

    def to_dense(self) -> Tensor:
        """[B, H, R, C] int32: 1 where a block is visited, partial or full."""
        return self._visited().int()

    def same_structure(self, other: BlockMask) -> bool:
        """Whether both visit the same blocks of the same lengths. Synchronises.

        Ignores mask_mod, the order of entries, unused entries and the query side.
        """
        if self.shape != other.shape or self.BLOCK_SIZE != other.BLOCK_SIZE:
            return False
        return all(
            torch.equal(a, b) for a, b in zip(dense_blocks(self), dense_blocks(other), strict=True)
        )

    def __getitem__(self, index: Index | tuple[Index, ...]) -> BlockMask:
        """Select batches, heads and blocks of queries.

        An int or a 0-d tensor keeps its dimension, with size 1. Selecting renumbers the rows.
        Unless every dimension is kept whole, the new mask's mask_mod raises SlicedMaskModError
        until you set one that adds the offset. A tensor of Q-blocks selects whole blocks, so the
        length is a multiple of the block size.

        Raises:
            BlockMaskIndexError: more indices than batch, head and Q-block.
            IndexError: an int that is out of range.
            UnsupportedFeatureError: dq_kv_order is a tensor, which selecting would invalidate.
        """
        self._refuse_explicit_order("Indexing")
        mask = self._without_spare_row()
        selection, lengths, whole = select_blocks(mask, index)
        full = mask.full_kv_num_blocks, mask.full_kv_indices
        full = tuple(None if field is None else field[selection] for field in full)
        partial = mask.kv_num_blocks[selection], mask.kv_indices[selection]
        return self._rebuilt(partial, full, lengths, self.mask_mod if whole else sliced_mask_mod)

    def _without_spare_row(self) -> BlockMask:
        """The key side, without the row for which lists of a compiled function have room.

        Where the length is symbolic, the row stays: its place is not known.
        """
        rows = block_count(self.seq_lengths[0], self.BLOCK_SIZE[0])
        if is_symbolic(rows) or self.kv_num_blocks.shape[-1] <= rows:
            return self
        partial = self.kv_num_blocks[..., :rows], self.kv_indices[..., :rows, :]
        full: tuple[Tensor | None, Tensor | None] = (None, None)
        if self.full_kv_num_blocks is not None and self.full_kv_indices is not None:
            full = self.full_kv_num_blocks[..., :rows], self.full_kv_indices[..., :rows, :]
        sizes = self.seq_lengths, self.BLOCK_SIZE, self.mask_mod
        return BlockMask(sizes[0], *partial, *full, None, None, None, None, *sizes[1:])

    def _adjust(self, new_q_len: int, new_kv_len: int) -> BlockMask:
        """Crop to shorter lengths, or extend by blocks that are not visited.

        Full blocks that now extend past the end become partial.

        Raises:
            UnsupportedFeatureError: dq_kv_order is a tensor.
        """
        self._refuse_explicit_order("Adjusting")
        partial, full = dense_blocks(self)
        grow = (
            0,
            block_count(new_kv_len, self.BLOCK_SIZE[1]) - partial.shape[-1],
            0,
            block_count(new_q_len, self.BLOCK_SIZE[0]) - partial.shape[-2],
        )
        partial, full = (torch.nn.functional.pad(dense, grow) for dense in (partial, full))
        inside = torch.zeros_like(full)
        inside[..., : new_q_len // self.BLOCK_SIZE[0], : new_kv_len // self.BLOCK_SIZE[1]] = True
        return self._rebuilt(
            dense_to_lists(partial | (full & ~inside)),
            (None, None) if self.full_kv_indices is None else dense_to_lists(full & inside),
            (new_q_len, new_kv_len),
            self.mask_mod,
        )

    @classmethod
    def from_state_dict(cls, state: dict[str, Any], mask_mod: MaskMod = noop_mask) -> BlockMask:
        """Undo `state_dict`; mask_mod is the function that the mask was created with."""
        return cls(mask_mod=mask_mod, **state)

    def _visited(self) -> Tensor:
        """Partial and full blocks: [B, H, R, C] bool."""
        partial, full = dense_blocks(self)
        return partial | full

    def list_query_blocks(self, columns: int) -> None:
        """Fill the query side from the key side, for the first `columns` blocks of keys."""
        self.q_num_blocks, self.q_indices = transpose_lists(
            self.kv_num_blocks, self.kv_indices, columns
        )
        if self.full_kv_num_blocks is not None and self.full_kv_indices is not None:
            self.full_q_num_blocks, self.full_q_indices = transpose_lists(
                self.full_kv_num_blocks, self.full_kv_indices, columns
            )

    def compute_dq_write_order(self, descending: bool) -> None:
        """Fill dq_write_order and dq_write_order_full from the query side.

        Args:
            descending: whether dQ is added from the last key block to the first.

        Raises:
            BlockMaskFieldError: there is no query side.
        """
        visited = self._visited()
        if self.q_indices is None:
            raise BlockMaskFieldError(
                field="dq_write_order", reason="it is derived from q_indices, which is None"
            )
        self.dq_kv_order_spt = descending
        self.dq_write_order = write_order(visited, self.q_indices, descending)
        if self.full_q_indices is not None:
            self.dq_write_order_full = write_order(visited, self.full_q_indices, descending)

    def _dq_kv_order(self) -> Tensor | bool | None:
        """The order of key blocks, as a tensor or as a flag."""
        return self.dq_kv_order_spt if self.dq_kv_order is None else self.dq_kv_order

    def _refuse_explicit_order(self, verb: str) -> None:
        if self.dq_kv_order is not None:
            raise UnsupportedFeatureError(
                feature=f"{verb} a BlockMask with a tensor dq_kv_order",
                reason="the order refers to the old positions of blocks",
                hint="Create a mask with a dq_write_order for the selection",
            )

    def _rebuilt(
        self,
        partial: tuple[Tensor, Tensor],
        full: tuple[Tensor | None, ...],
        lengths: tuple[int, int],
        mask_mod: MaskMod,
    ) -> BlockMask:
        """A mask of other blocks, with the same derived fields as this one."""
        mask = BlockMask.from_kv_blocks(
            *partial,
            *full,
            BLOCK_SIZE=self.BLOCK_SIZE,
            mask_mod=mask_mod,
            seq_lengths=lengths,
            compute_q_blocks=self.q_indices is not None,
        )
        mask.dq_kv_order_spt = self.dq_kv_order_spt
        if self.dq_write_order is not None:
            mask.compute_dq_write_order(bool(self.dq_kv_order_spt))
        return mask


# Private, except to the pytree registry.
register_container(
    BlockMask,
    BlockMask._flatten,  # pyright: ignore[reportPrivateUsage]
    BlockMask._unflatten,  # pyright: ignore[reportPrivateUsage]
    BlockMask._flatten_with_keys,  # pyright: ignore[reportPrivateUsage]
    Serializer("flexhop.BlockMask", dump_context, load_context),
)
