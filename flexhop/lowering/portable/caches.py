"""How a KV cache, or heads in pieces, affect a kernel: pure functions of a call's facts."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from flexhop.lowering.portable.constants import (
    CacheConstants,
    DecodePieces,
    GradKeyValuePieces,
    PieceConstants,
)
from flexhop.lowering.portable.rules import Kernel
from flexhop.lowering.problem import Cache, Device, Problem, head_pieces
from flexhop.options import Tile

# Tiles shrink to pages of at least this many keys, so that a page is looked up once. Smaller tiles
# would cost more than looking up the page of every key.
_SMALLEST_PAGE = 64
# One-byte dtypes that portable/cache/halves.py.jinja supports.
_FAST = {torch.int8, torch.float8_e4m3fn, torch.float8_e5m2}


def wants_one_page(cache: Cache) -> bool:
    """Whether a tile should stay within one page."""
    # One-byte elements take tiles with as many bytes.
    smallest = _SMALLEST_PAGE * (2 if stores_bytes(cache) else 1)
    return cache.page_size >= smallest and cache.page_size % smallest == 0


def stores_bytes(cache: Cache | None) -> bool:
    """Whether key and value are stored in one byte."""
    return cache is not None and cache.key_dtype.itemsize == cache.value_dtype.itemsize == 1


def looks_up_keys(cache: Cache | None) -> bool:
    """Whether the kernel looks up the page of every key."""
    return cache is not None and cache.page_size > 0 and not wants_one_page(cache)


def lacks_type(device: Device, dtype: torch.dtype) -> bool:
    """Whether Triton lacks the dtype on a device; kernels then read its bits."""
    return dtype == torch.float8_e4m3fn and device.capability < (8, 9)


def reads_halves(problem: Problem, cache: Cache, tile: Tile) -> bool:
    """Whether the decode kernel's products are in float16, to which bytes convert fast."""
    stored = {cache.key_dtype, cache.value_dtype}
    changed = cache.has_key_mod or cache.has_value_mod
    if not cache.has_pairs or changed or not stored <= _FAST or problem.itemsize != 2:
        return False
    # Products of 64 rows read keys from shared memory, not converted ones from registers.
    fits = tile.block_m < 64 and problem.value_head_dim > 16 and problem.value_head_dim % 2 == 0
    fits = fits and not (problem.is_wide and head_pieces(problem.value_head_dim).rest == 16)
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
        # If page addresses need registers, it did not help on an H200.
        SUM_LATE=as_halves and cache.page_size == 0,
    )


def loop_memory(cache: Cache, elements: tuple[int, int], itemsize: int, tile: Tile) -> int:
    """Shared memory in bytes for prefetched tiles of key and value.

    Args:
        cache: where they come from.
        elements: elements per tile of keys, and per tile of values.
        itemsize: bytes per element of query, to which they convert.
        tile: gives the number of prefetched tiles.
    """
    stored = (cache.key_dtype.itemsize, cache.value_dtype.itemsize)
    total = sum(n * size * tile.num_stages for n, size in zip(elements, stored, strict=True))
    changes = cache.has_key_mod or cache.has_value_mod or stored != (itemsize, itemsize)
    # Products of fewer rows read their right operand from registers.
    staged = changes and tile.block_m >= 64
    return total + (sum(elements) * itemsize if staged else 0)


# Constants of the kernels that hold a head in one piece.
_OF_ONE_PIECE = (
    "QK_HEAD_DIM_ROUNDED", "V_HEAD_DIM_ROUNDED", "OUT_HEAD_DIM_ROUNDED", "WRITES_VALUE",
    "ISOLATE_MASK_MOD", "HAS_MERGED_LISTS", "KEEP_PRODUCTS", "MASK_LOOP",
)  # fmt: skip


def in_pieces(
    kernel: Kernel, problem: Problem, tile: Tile, values: dict[str, Any]
) -> dict[str, Any]:
    """Constants of a kernel whose heads are in pieces, from those of one whose heads are not."""
    kept = {name: value for name, value in values.items() if name not in _OF_ONE_PIECE}
    return kept | dataclasses.asdict(_pieces(kernel, problem, tile))


def _pieces(kernel: Kernel, problem: Problem, tile: Tile) -> PieceConstants:
    key, value = head_pieces(problem.head_dim), head_pieces(problem.value_head_dim)
    widths = (*key, *value)
    if kernel == "decode":
        return DecodePieces(*widths, VALUE_IS_KEY=reads_once(problem, tile))
    if kernel in ("grad_key", "grad_value"):
        written = key if kernel == "grad_key" else value
        return GradKeyValuePieces(*widths, OUT_FIRST=written.first, OUT_REST=written.rest)
    return PieceConstants(*widths)


def reads_once(problem: Problem, tile: Tile) -> bool:
    """Whether the tiles of keys that were read are also those of values."""
    key, value = head_pieces(problem.head_dim), head_pieces(problem.value_head_dim)
    is_all = problem.value_head_dim == problem.head_dim
    is_first = problem.value_head_dim == key.first and value.rest == 0
    if not problem.value_is_key or not (is_all or is_first):
        return False
    cache = problem.cache
    if cache is None:
        return True
    # In pairs, values are read in other words than keys.
    changed = cache.has_key_mod or cache.has_value_mod
    return not changed and not reads_halves(problem, cache, tile)
