"""A paged KV cache: the physical page of each logical block of each sequence.

The cache is one pair of tensors [1, Hkv, n_pages * page_size, D] for all sequences. A sequence
owns pages in any order. `flex_attention` reads them through a page table (`table`). As in PyTorch,
it can also read them through a block mask of physical blocks and mods that translate positions
back. This class creates both from logical ones.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flexhop.block_mask.mask import BlockMask
from flexhop.cache.pages import PageTable
from flexhop.errors import (
    BlockSizeError,
    CacheShapeError,
    OptionValueError,
    PagesExhaustedError,
    UnmappedPositionError,
)
from flexhop.errors.base import shape_text
from flexhop.mods.functions import MaskMod, ScoreMod, noop_mask, noop_score


class PagedAttention:
    """Page table of a KV cache that sequences of different lengths share.

    Args:
        n_pages: number of pages.
        page_size: tokens per page, at least 1.
        max_batch_size: most sequences in the cache at once.
        device: the device of the tables, the same as that of the cache.

    Attributes:
        page_table: [max_batch_size, n_pages] int64, the physical page of each logical block of a
            sequence; -1 if there is none.
        physical_to_logical: the reverse, [max_batch_size, n_pages] int64.
        capacity: [max_batch_size] int64, the number of tokens that each sequence's pages hold.
        empty_pages: free pages; the last is assigned first.

    Raises:
        OptionValueError: a number below 1.

    Source: torch.nn.attention.experimental._paged_attention.PagedAttention; Kwon et al. 2023
    (arXiv 2309.06180), section 4.
    """

    def __init__(
        self, n_pages: int, page_size: int, max_batch_size: int, device: str = "cuda"
    ) -> None:
        numbers = {"n_pages": n_pages, "page_size": page_size, "max_batch_size": max_batch_size}
        for name, number in numbers.items():
            if number < 1:
                raise OptionValueError(name=name, value=number, allowed="at least 1")
        self.n_pages = n_pages
        self.page_size = page_size
        self.page_table = torch.full((max_batch_size, n_pages), -1, device=device)
        self.physical_to_logical = torch.full((max_batch_size, n_pages), -1, device=device)
        self.capacity = torch.zeros(max_batch_size, dtype=torch.int64, device=device)
        self.empty_pages = list(range(n_pages - 1, -1, -1))
        # A copy on the host, so that growing a sequence does not synchronise.
        self._owned: list[list[int]] = [[] for _ in range(max_batch_size)]

    def reserve(self, batch_idx: Tensor | int, seq_len: Tensor | int) -> None:
        """Reserve pages for at least `seq_len` tokens of a sequence.

        Args:
            batch_idx: the sequence; one number.
            seq_len: tokens; one number.

        Raises:
            OptionValueError: no such sequence.
            PagesExhaustedError: too few empty pages. The table is unchanged.
        """
        sequence = self._sequence(batch_idx)
        owned = self._owned[sequence]
        wanted = -(-int(seq_len) // self.page_size) - len(owned)
        if wanted <= 0:
            return
        if wanted > len(self.empty_pages):
            raise PagesExhaustedError(requested=wanted, empty=len(self.empty_pages))
        pages = self.empty_pages[-wanted:]
        del self.empty_pages[-wanted:]
        first = len(owned)
        owned.extend(pages)
        device = self.page_table.device
        physical = torch.tensor(pages, device=device)
        self.page_table[sequence, first : first + wanted] = physical
        self.physical_to_logical[sequence, physical] = torch.arange(
            first, first + wanted, device=device
        )
        self.capacity[sequence] = len(owned) * self.page_size

    def erase(self, batch_idx: Tensor | int) -> None:
        """Free all pages of a sequence. Their contents stay until they are overwritten.

        Raises:
            OptionValueError: no such sequence.
        """
        sequence = self._sequence(batch_idx)
        self.empty_pages.extend(self._owned[sequence])
        self._owned[sequence] = []
        self.page_table[sequence] = -1
        self.physical_to_logical[sequence] = -1
        self.capacity[sequence] = 0

    def assign(
        self,
        batch_idx: Tensor,
        input_pos: Tensor,
        k_val: Tensor,
        v_val: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
    ) -> None:
        """Write keys and values at some positions of some sequences into the cache, in place.

        Args:
            batch_idx: [B] integers, the sequences.
            input_pos: [B, S] integers, positions in them; each must have a page.
            k_val: [B, Hkv, S, D], without gradient; v_val: [B, Hkv, S, Dv].
            k_cache: [1, Hkv, n_pages * page_size, D]; v_cache: the same with Dv.

        Raises:
            CacheShapeError: shapes that do not match, or a value that requires a gradient.
            UnmappedPositionError: a position without a page. Not checked in compiled code and
                during CUDA graph capture, which cannot synchronise.
        """
        self._check_cache(batch_idx, input_pos, (k_val, v_val), (k_cache, v_cache))
        block = input_pos.to(torch.int64) // self.page_size
        page = self.page_table[batch_idx].gather(1, block.clamp(0, self.n_pages - 1))
        if not (torch.compiler.is_compiling() or _is_capturing(page)):
            self._check_mapped(batch_idx, input_pos, block, page)
        place = (page * self.page_size + input_pos % self.page_size).flatten()
        for cache, value in ((k_cache, k_val), (v_cache, v_val)):
            # [B, H, S, D] in the order of `place`, [B, S].
            tokens = value.transpose(1, 2).flatten(0, 1).transpose(0, 1)
            tokens = tokens[None].to(cache.dtype)
            if cache.dtype.itemsize == 1:  # PyTorch copies no float8 by index
                cache, tokens = cache.view(torch.uint8), tokens.view(torch.uint8)
            cache.index_copy_(2, place, tokens)

    def table(self, kv_len: Tensor, batch_idx: Tensor | None = None) -> PageTable:
        """The page_table for flex_attention, whose kernels look up the pages.

        Block masks and mods use logical positions and need no conversion. Pass the cache
        unchanged.

        Args:
            kv_len: [B] integers, the number of keys of each sequence. All of them need reserved
                pages.
            batch_idx: [B] integers, the sequence of each batch; 0 .. B - 1 by default.
        """
        rows = (
            self.page_table[: kv_len.size(0)] if batch_idx is None else self.page_table[batch_idx]
        )
        return PageTable(rows.to(torch.int32), self.page_size, kv_len.to(torch.int32))

    def convert_logical_block_mask(
        self,
        block_mask: BlockMask,
        batch_idx: Tensor | None = None,
        kv_len: Tensor | None = None,
    ) -> BlockMask:
        """Convert a block mask of the sequences to one of the cache.

        Blocks without a page are dropped. Full blocks that extend beyond kv_len become partial.

        Args:
            block_mask: of logical positions, with blocks of page_size keys; batch B or 1.
            batch_idx: [B] integers, the sequence of each batch; 0 .. B - 1 by default.
            kv_len: [B], the number of keys of each sequence. None: all that the mask covers.

        Raises:
            BlockSizeError: the key block size differs from the page size.
        """
        if block_mask.BLOCK_SIZE[1] != self.page_size:
            raise BlockSizeError(
                block_size=block_mask.BLOCK_SIZE,
                reason=f"blocks of keys must be as long as a page, {self.page_size} tokens",
            )
        if batch_idx is None:
            batch_idx = torch.arange(
                block_mask.kv_num_blocks.size(0), device=block_mask.kv_num_blocks.device
            )
        partial = self._translate(
            block_mask.kv_num_blocks, block_mask.kv_indices, batch_idx, kv_len
        )
        if block_mask.full_kv_num_blocks is None or block_mask.full_kv_indices is None:
            lists, full_lists = self._list(partial.page, partial.is_mapped), (None, None)
        else:
            full = self._translate(
                block_mask.full_kv_num_blocks, block_mask.full_kv_indices, batch_idx, kv_len
            )
            pages = torch.cat([partial.page, full.page], -1)
            masked = torch.cat([partial.is_mapped, full.is_mapped & ~full.is_whole], -1)
            lists = self._list(pages, masked)
            full_lists = self._list(full.page, full.is_mapped & full.is_whole)
        return BlockMask.from_kv_blocks(
            *lists,
            *full_lists,
            BLOCK_SIZE=block_mask.BLOCK_SIZE,
            mask_mod=self.get_mask_mod(block_mask.mask_mod, kv_len, batch_idx),
            seq_lengths=(block_mask.seq_lengths[0], self.n_pages * self.page_size),
            compute_q_blocks=block_mask.q_indices is not None,
        )

    def get_mask_mod(
        self,
        mask_mod: MaskMod | None,
        kv_len: Tensor | None = None,
        batch_idx: Tensor | None = None,
    ) -> MaskMod:
        """A mask_mod of the cache. It hides keys of other sequences and keys beyond kv_len.

        Args:
            mask_mod: of logical positions; None: every key is visible.
            kv_len: [B], keys of each batch that exist; None for all.
            batch_idx: [B], the sequence of each batch; None if they are the same.
        """
        inner = noop_mask if mask_mod is None else mask_mod
        to_logical, page_size = self._logical_pages(batch_idx), self.page_size

        def paged_mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            block = to_logical[b, kv_idx // page_size]
            position = block.clamp(min=0) * page_size + kv_idx % page_size
            keep = (block >= 0) & inner(b, h, q_idx, position)
            return keep if kv_len is None else keep & (position < kv_len[b])

        return paged_mask

    def get_score_mod(
        self,
        score_mod: ScoreMod | None,
        kv_len: Tensor | None = None,
        batch_idx: Tensor | None = None,
    ) -> ScoreMod:
        """A score_mod of the cache. Scores of other sequences and beyond kv_len are -inf.

        Args: as for get_mask_mod.
        """
        inner = noop_score if score_mod is None else score_mod
        to_logical, page_size = self._logical_pages(batch_idx), self.page_size

        def paged_score(
            score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor
        ) -> Tensor:
            block = to_logical[b, kv_idx // page_size]
            position = block.clamp(min=0) * page_size + kv_idx % page_size
            keep = block >= 0
            if kv_len is not None:
                keep = keep & (position < kv_len[b])
            return torch.where(keep, inner(score, b, h, q_idx, position), -torch.inf)

        return paged_score

    def _logical_pages(self, batch_idx: Tensor | None) -> Tensor:
        """[B, n_pages]: the table itself, so that a captured graph sees it grow, or its rows."""
        table = self.physical_to_logical
        return table if batch_idx is None else table[batch_idx]

    def _translate(
        self, counts: Tensor, indices: Tensor, batch_idx: Tensor, kv_len: Tensor | None
    ) -> _Translated:
        width, batch = indices.size(-1), batch_idx.size(0)
        logical = indices.expand(batch, -1, -1, -1).to(torch.int64).clamp(0, self.n_pages - 1)
        page = self.page_table[batch_idx].gather(1, logical.flatten(1)).view(logical.shape)
        listed = torch.arange(width, device=indices.device) < counts[..., None]
        is_mapped = listed.expand(logical.shape) & (page >= 0)
        is_whole = torch.ones_like(is_mapped)
        if kv_len is not None:
            length = kv_len.view(-1, 1, 1, 1)
            is_mapped = is_mapped & (logical * self.page_size < length)
            is_whole = (logical + 1) * self.page_size <= length
        return _Translated(page, is_mapped, is_whole)

    def _list(self, page: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
        """The wanted pages of each row in their order: counts, and indices padded with 0."""
        place = torch.where(wanted, wanted.cumsum(-1) - 1, self.n_pages)
        room = page.new_zeros((*page.shape[:-1], self.n_pages + 1))
        indices = room.scatter(-1, place, page)[..., : self.n_pages]
        counts = wanted.sum(-1, dtype=torch.int32)
        return counts, indices.to(torch.int32).contiguous()

    def _sequence(self, batch_idx: Tensor | int) -> int:
        sequence, last = int(batch_idx), len(self._owned) - 1
        if not 0 <= sequence <= last:
            raise OptionValueError(name="batch_idx", value=sequence, allowed=f"from 0 to {last}")
        return sequence

    def _check_cache(
        self,
        batch_idx: Tensor,
        input_pos: Tensor,
        values: tuple[Tensor, Tensor],
        caches: tuple[Tensor, Tensor],
    ) -> None:
        batch, steps = batch_idx.size(0), input_pos.size(-1)
        tokens = self.n_pages * self.page_size
        for name, value, cache in zip("kv", values, caches, strict=True):
            if value.requires_grad:
                raise CacheShapeError(
                    argument=f"{name}_val", found="requires a gradient",
                    expected="a cache has no gradient; detach it",
                )  # fmt: skip
            expected = (batch, cache.size(1), steps, cache.size(3))
            if tuple(value.shape) != expected or tuple(input_pos.shape) != (batch, steps):
                raise CacheShapeError(
                    argument=f"{name}_val", found=f"has shape {shape_text(value.shape)}",
                    expected=f"batch_idx, input_pos and {name}_cache imply {shape_text(expected)}",
                )  # fmt: skip
            if cache.size(0) != 1 or cache.size(2) != tokens:
                raise CacheShapeError(
                    argument=f"{name}_cache", found=f"has shape {shape_text(cache.shape)}",
                    expected=f"{self.n_pages} pages need batch 1 and {tokens} tokens",
                )  # fmt: skip

    def _check_mapped(
        self, batch_idx: Tensor, input_pos: Tensor, block: Tensor, page: Tensor
    ) -> None:
        wrong = ((page < 0) | (block >= self.n_pages) | (input_pos < 0)).nonzero().tolist()
        if wrong:
            row, column = wrong[0]
            sequence = int(batch_idx[row])
            raise UnmappedPositionError(
                position=int(input_pos[row, column]),
                sequence=sequence,
                capacity=int(self.capacity[sequence]),
            )


class _Translated(NamedTuple):
    """Entries of block lists, [B, H, R, W]: pages; which exist; which lie wholly in kv_len."""

    page: Tensor
    is_mapped: Tensor
    is_whole: Tensor


def _is_capturing(tensor: Tensor) -> bool:
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()
