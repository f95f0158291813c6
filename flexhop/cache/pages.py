"""Where a paged cache stores the keys of each sequence: what kernels need to know."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flexhop.errors.base import shape_text


class PageTable(NamedTuple):
    """Which pages of a KV cache hold which keys of each sequence.

    Key i of sequence b is row i % page_size of page pages[b, i // page_size]. Entries beyond a
    sequence's last page and rows beyond its last key may hold anything. They are never read.

    Args:
        pages: [B, W] int32, numbers of pages.
        page_size: keys per page, at least 1. 16, 32, 64 and so on are fast.
        lengths: [B] int32, keys of each sequence, 0 to W * page_size.

    Source: Kwon et al. 2023, PagedAttention (arXiv 2309.06180), section 4.
    """

    pages: Tensor
    page_size: int
    lengths: Tensor

    @property
    def capacity(self) -> int:
        """Most keys that a sequence can have: W * page_size."""
        return self.pages.size(1) * self.page_size


def in_pages(cache: Tensor, page_size: int) -> Tensor:
    """A cache as [P, Hkv, page_size, D], without a copy.

    Args:
        cache: that, or [1, Hkv, P * page_size, D].
        page_size: divides the length of the latter.
    """
    if cache.size(2) == page_size:
        return cache
    return cache[0].unflatten(1, (-1, page_size)).transpose(0, 1)


def cache_mistake(cache: Tensor, page_size: int) -> str:
    """Why a tensor is not a cache of such pages; empty if it is one."""
    if cache.dim() != 4:
        return f"has {cache.dim()} dimensions"
    is_flat = cache.size(0) == 1 and cache.size(2) % page_size == 0
    if cache.size(2) != page_size and not is_flat:
        return f"has shape {shape_text(cache.shape)}"
    return "has no pages" if cache.size(0) == 0 or cache.size(2) == 0 else ""


def table_mistake(table: PageTable, query: Tensor) -> tuple[str, str]:
    """What is wrong with a page table's tensors, and what was expected; ("", "") if nothing.

    Reads no values.
    """
    batch = query.size(0)
    for name, tensor, rank in (("pages", table.pages, 2), ("lengths", table.lengths, 1)):
        expected = f"int32 with {rank} dimensions, the first of size {batch}, query's batch"
        if tensor.dtype != torch.int32:
            return f"has {name} of {tensor.dtype}", f"they must be {expected}"
        if tensor.dim() != rank or tensor.size(0) != batch:
            return f"has {name} of shape {shape_text(tensor.shape)}", f"they must be {expected}"
        if tensor.device != query.device:
            return f"has {name} on {tensor.device}", f"query is on {query.device}"
    if table.pages.size(1) == 0:
        return (
            f"has pages of shape {shape_text(table.pages.shape)}",
            "each sequence needs at least one column",
        )
    return "", ""


def value_mistake(table: PageTable, num_pages: int) -> tuple[str, str]:
    """The same for lengths and the pages that they reach. Synchronises."""
    lengths = table.lengths.long()
    for b, length in enumerate(lengths.tolist()):
        if not 0 <= length <= table.capacity:
            room = f"{table.pages.size(1)} pages of {table.page_size} keys hold {table.capacity}"
            return f"has length {length} for sequence {b}", room
    first = torch.arange(table.pages.size(1), device=lengths.device) * table.page_size
    used = first < lengths[:, None]
    wrong = used & ((table.pages < 0) | (table.pages >= num_pages))
    if not bool(wrong.any()):
        return "", ""
    b, column = wrong.nonzero()[0].tolist()
    found = int(table.pages[b, column])
    if found < 0:
        return (
            f"has length {int(lengths[b])} for sequence {b}",
            f"only {column * table.page_size} keys have pages: entry {column} is {found}. Reserve "
            "more pages first",
        )
    return f"has page {found} at [{b}, {column}]", f"the cache has {num_pages} pages"
