"""Caches for tests: sequences of different lengths in pages whose order is drawn from a seed."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

import flexhop


@dataclasses.dataclass
class Paged:
    """The keys and values of some sequences, in order and in pages.

    key, value: [B, Hkv, N, D], N what the table has room for; rows behind a sequence are NaN, or
    the largest number where the dtype has no NaN. key_cache, value_cache: [P, Hkv, page_size, D].
    """

    key: Tensor
    value: Tensor
    key_cache: Tensor
    value_cache: Tensor
    table: flexhop.PageTable

    @property
    def length(self) -> int:
        return self.table.capacity


def place(
    key: Tensor, value: Tensor, lengths: list[int], page_size: int, seed: int = 0, spare: int = 2
) -> Paged:
    """Put sequences into pages; nothing that a kernel may not read is a number."""
    generator = torch.Generator().manual_seed(seed)
    batch, _, length, _ = key.shape
    width = length // page_size
    assert width * page_size == length
    counts = [-(-n // page_size) for n in lengths]
    total = sum(counts) + spare
    order = torch.randperm(total, generator=generator, dtype=torch.int32)
    # Behind the last page of a sequence anything may stand.
    pages = torch.full((batch, width), 2**30, dtype=torch.int32)
    pages[:, ::2] = -1
    used = 0
    for b, count in enumerate(counts):
        pages[b, :count] = order[used : used + count]
        used += count
    caches = []
    for tensor in (key, value):
        cache = torch.empty(total, tensor.size(1), page_size, tensor.size(3), dtype=tensor.dtype)
        _forbid(cache)
        for b, count in enumerate(counts):
            for entry in range(count):
                rows = slice(entry * page_size, min(lengths[b], (entry + 1) * page_size))
                part = tensor[b, :, rows]
                cache[pages[b, entry], :, : part.size(1)] = part
        caches.append(cache)
    table = flexhop.PageTable(pages, page_size, torch.tensor(lengths, dtype=torch.int32))
    return Paged(key, value, caches[0], caches[1], table)


def _forbid(cache: Tensor) -> None:
    if cache.dtype == torch.int8:
        cache.fill_(127)
    elif cache.element_size() == 1:
        cache.view(torch.uint8).fill_(0x7F)  # NaN in both formats
    else:
        cache.fill_(torch.nan)


def hide_rest(mask_mod: flexhop.mods.MaskMod, lengths: list[int]) -> flexhop.mods.MaskMod:
    """mask_mod, and nothing behind the end of a sequence."""
    ends = torch.tensor(lengths)

    def visible(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return mask_mod(b, h, q_idx, kv_idx) & (kv_idx < ends[b])

    return visible
