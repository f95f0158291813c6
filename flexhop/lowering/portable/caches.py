"""What a cache changes in the choice of a kernel: pure functions of its facts."""

from __future__ import annotations

import torch

from flexhop.lowering.portable.constants import CacheConstants
from flexhop.lowering.problem import Cache, Device, Problem
from flexhop.options import Tile

# Tiles are cut to pages of this many keys and more, so that a page is looked up once; smaller
# tiles would cost more than to look up the page of every key.
_SMALLEST_PAGE = 64
# Numbers of one byte that portable/cache/halves.py.jinja knows.
_FAST = {torch.int8, torch.float8_e4m3fn, torch.float8_e5m2}


def wants_one_page(cache: Cache) -> bool:
    """Whether tiles should not reach beyond a page."""
    # Numbers of one byte take tiles of as many bytes.
    smallest = _SMALLEST_PAGE * (2 if stores_bytes(cache) else 1)
    return cache.page_size >= smallest and cache.page_size % smallest == 0


def stores_bytes(cache: Cache | None) -> bool:
    """Whether key and value are numbers of one byte."""
    return cache is not None and cache.key_dtype.itemsize == cache.value_dtype.itemsize == 1


def looks_up_keys(cache: Cache | None) -> bool:
    """Whether the page of every key is looked up."""
    return cache is not None and cache.page_size > 0 and not wants_one_page(cache)


def lacks_type(device: Device, dtype: torch.dtype) -> bool:
    """Whether Triton has no such numbers on a device; kernels then read their bits."""
    return dtype == torch.float8_e4m3fn and device.capability < (8, 9)


def reads_halves(problem: Problem, cache: Cache, tile: Tile) -> bool:
    """Whether products of the decode kernel are of float16 numbers, which bytes turn into fast."""
    stored = {cache.key_dtype, cache.value_dtype}
    changed = cache.has_key_mod or cache.has_value_mod
    if not cache.has_pairs or changed or not stored <= _FAST or problem.itemsize != 2:
        return False
    # Products of 64 rows take keys from shared memory, and no converted ones from registers.
    # Pairs need an even number of columns, and products more than 8 of each kind.
    fits = tile.block_m < 64 and problem.value_head_dim > 16 and problem.value_head_dim % 2 == 0
    return fits and not any(lacks_type(problem.device, dtype) for dtype in stored)


def constants(problem: Problem, cache: Cache, tile: Tile, *, decodes: bool) -> CacheConstants:
    """Constants of the functions that read the cache; decodes: in the decode kernel."""
    block = tile.block_n if problem.blocks is None else problem.blocks.kv_size
    fits = cache.page_size > 0 and cache.page_size % tile.block_n == 0
    as_halves = decodes and reads_halves(problem, cache, tile)
    return CacheConstants(
        PAGE_SIZE=cache.page_size,
        ONE_PAGE=fits and block % tile.block_n == 0,
        HAS_KEY_MOD=cache.has_key_mod,
        HAS_VALUE_MOD=cache.has_value_mod,
        HAS_KEY_FACTOR=cache.has_key_factor,
        HAS_VALUE_FACTOR=cache.has_value_factor,
        KEY_AS_BITS=lacks_type(problem.device, cache.key_dtype),
        VALUE_AS_BITS=lacks_type(problem.device, cache.value_dtype),
        AS_HALVES=as_halves,
        # Where addresses of pages want registers, it was no gain on an H200.
        SUM_LATE=as_halves and cache.page_size == 0,
    )


def loop_memory(cache: Cache, elements: tuple[int, int], itemsize: int, tile: Tile) -> int:
    """Bytes of shared memory for tiles of key and value on their way.

    Args:
        cache: where they come from.
        elements: of a tile of keys, and of one of values.
        itemsize: bytes of an element of query, which they become.
        tile: says how many are on their way.
    """
    stored = (cache.key_dtype.itemsize, cache.value_dtype.itemsize)
    total = sum(n * size * tile.num_stages for n, size in zip(elements, stored, strict=True))
    changes = cache.has_key_mod or cache.has_value_mod or stored != (itemsize, itemsize)
    # Products of fewer rows take their right side from registers.
    staged = changes and tile.block_m >= 64
    return total + (sum(elements) * itemsize if staged else 0)
