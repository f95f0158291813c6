"""Tiles to try, per kernel, architecture, dtype and head size; data, measured where it says so."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from flexhop.lowering.portable import caches, splits
from flexhop.lowering.problem import Problem, round_head_dim
from flexhop.options import Tile

Kernel = Literal["forward", "decode", "grad_query", "grad_key_value", "grad_key", "grad_value"]

# Width of the wider head -> tile, for 16-bit operands on Hopper (sm_90). Measured on an H200, bf16
# (docs/benchmarks.md); at 128 columns and above one program with eight warps fills a
# multiprocessor.
_HOPPER: dict[Kernel, dict[int, Tile]] = {
    "forward": {
        64: Tile(64, 128, 4, 2),
        128: Tile(128, 128, 8, 2),
        256: Tile(128, 64, 8, 2),
        512: Tile(64, 32, 8, 2),
    },
    "decode": {
        64: Tile(128, 128, 4, 3),
        128: Tile(64, 64, 4, 3),
        256: Tile(64, 32, 4, 2),
        512: Tile(16, 32, 4, 2),
    },
    "grad_query": {
        64: Tile(64, 64, 4, 3),
        128: Tile(128, 64, 8, 3),
        256: Tile(128, 64, 8, 1),
        512: Tile(32, 32, 8, 1),
    },
    "grad_key_value": {
        64: Tile(64, 64, 4, 3),
        128: Tile(64, 128, 8, 2),
        256: Tile(32, 64, 8, 2),
        512: Tile(32, 32, 8, 1),
    },
    "grad_key": {256: Tile(32, 128, 8, 2), 512: Tile(32, 32, 8, 1)},
    "grad_value": {256: Tile(32, 128, 8, 2), 512: Tile(32, 64, 8, 1)},
}
# Without a mask and a score_mod: more registers are free, and two programs of four warps on one
# multiprocessor hide each other's softmax.
_HOPPER_DENSE: dict[Kernel, dict[int, Tile]] = {
    "forward": {64: Tile(128, 64, 8, 3), 128: Tile(128, 64, 4, 2)},
    "grad_query": {64: Tile(128, 64, 8, 3)},
    "grad_key_value": {64: Tile(32, 128, 4, 3), 128: Tile(64, 128, 8, 3)},
}
# At most 16 rows: one program of eight warps for each multiprocessor, with two wide tiles on their
# way, keeps memory busy under any score_mod; smaller tiles need two programs for that.
_HOPPER_FEW_ROWS: dict[Kernel, dict[int, Tile]] = {
    "decode": {128: Tile(16, 128, 8, 3), 256: Tile(16, 64, 8, 3)},
}
# Numbers of one byte, and pages that are looked up for each key: the work for a tile is that of
# its threads' instructions, and fewer warps repeat fewer of them. Two programs share a
# multiprocessor: tiles have equal bytes.
_HOPPER_BYTES: dict[Kernel, dict[int, Tile]] = {
    "decode": {128: Tile(16, 128, 4, 3)},
}
_HOPPER_SMALL_PAGES: dict[Kernel, dict[int, Tile]] = {
    "decode": {128: Tile(16, 64, 4, 4)},
}
# Blackwell (sm_100): accumulators pass through registers on their way to the softmax.
# Chosen to fit without spills; not measured.
_BLACKWELL: dict[Kernel, dict[int, Tile]] = {
    "forward": {128: Tile(128, 64, 8, 3)},
    "grad_query": {128: Tile(64, 64, 8, 2)},
}
# Random numbers are drawn for a whole tile at once, and want registers. Measured likewise.
_HOPPER_DROPOUT: dict[Kernel, dict[int, Tile]] = {
    "forward": {64: Tile(128, 64, 8, 3), 128: Tile(128, 64, 8, 3)},
    "grad_key_value": {64: Tile(64, 64, 4, 3), 128: Tile(32, 128, 8, 3)},
}
# Captured gradients as integers of 64 bits. Chosen to spill little; atomics take the time.
_EXACT_SUMS: dict[Kernel, dict[int, Tile]] = {
    "grad_query": {64: Tile(64, 32, 4, 2), 128: Tile(64, 32, 4, 2), 256: Tile(32, 32, 8, 1)},
}
# Tables read per score: their loads compete with the operands' for time, so more programs help.
_HOPPER_PER_ELEMENT: dict[Kernel, dict[int, Tile]] = {
    "forward": {128: Tile(128, 32, 4, 3)},
}
# Ampere and Ada: mma.sync keeps operands in registers, so tiles are smaller.
_AMPERE: dict[Kernel, dict[int, Tile]] = {
    "forward": {
        64: Tile(128, 64, 4, 3),
        128: Tile(128, 32, 4, 3),
        256: Tile(64, 32, 4, 2),
        512: Tile(32, 16, 4, 1),
    },
    "decode": {
        64: Tile(64, 64, 4, 3),
        128: Tile(64, 32, 4, 3),
        256: Tile(32, 32, 4, 2),
        512: Tile(16, 16, 4, 2),
    },
    "grad_query": {
        64: Tile(64, 64, 4, 2),
        128: Tile(64, 32, 4, 2),
        256: Tile(32, 32, 8, 1),
        512: Tile(16, 16, 4, 1),
    },
    "grad_key_value": {
        64: Tile(64, 64, 4, 2),
        128: Tile(32, 64, 4, 2),
        256: Tile(16, 32, 4, 1),
        512: Tile(16, 16, 4, 1),
    },
}
# As _EXACT_SUMS and _HOPPER_DROPOUT; more warps have more registers. Chosen without spills, not
# measured.
_AMPERE_EXACT: dict[Kernel, dict[int, Tile]] = {
    "grad_query": {64: Tile(64, 32, 8, 2), 128: Tile(64, 32, 8, 2)},
}
_AMPERE_DROPOUT: dict[Kernel, dict[int, Tile]] = {
    "forward": {128: Tile(128, 32, 8, 3)},
    "grad_key_value": {64: Tile(64, 64, 8, 2)},
}
# Triton 3.9 needs more registers for some kernels, which spill with the tiles above. Chosen
# without spills there, not measured.
_NEWER_HOPPER: dict[Kernel, dict[int, Tile]] = {"grad_query": {256: Tile(64, 64, 8, 2)}}
_NEWER_EXACT: dict[Kernel, dict[int, Tile]] = {"grad_query": {128: Tile(64, 32, 8, 2)}}
_NEWER_AMPERE_DROPOUT: dict[Kernel, dict[int, Tile]] = {
    "grad_key_value": {64: Tile(64, 64, 4, 2)},
}
# What addresses and conversions of a cache need of the registers.
_AMPERE_CACHED: dict[Kernel, dict[int, Tile]] = {
    "forward": {128: Tile(64, 32, 4, 3)},
}
_FLOAT32: dict[Kernel, dict[int, Tile]] = {
    "forward": {
        64: Tile(64, 32, 4, 2),
        128: Tile(32, 32, 4, 2),
        256: Tile(16, 32, 4, 1),
        512: Tile(16, 16, 4, 1),
    },
    "decode": {
        64: Tile(32, 32, 4, 2),
        128: Tile(32, 32, 4, 2),
        256: Tile(16, 32, 4, 2),
        512: Tile(16, 16, 4, 1),
    },
    "grad_query": {
        64: Tile(32, 32, 4, 2),
        128: Tile(32, 16, 4, 1),
        256: Tile(16, 16, 4, 1),
        512: Tile(16, 16, 8, 1),
    },
    "grad_key_value": {
        64: Tile(32, 32, 4, 2),
        128: Tile(16, 32, 4, 1),
        256: Tile(16, 16, 4, 1),
        512: Tile(16, 16, 8, 1),
    },
}
# What `mode="max-autotune"` adds to the table's choice.
_SEARCH: dict[Kernel, tuple[Tile, ...]] = {
    "forward": (
        Tile(128, 128, 8, 2),
        Tile(128, 128, 8, 3),
        Tile(128, 64, 8, 3),
        Tile(128, 64, 4, 3),
        Tile(64, 64, 4, 3),
        Tile(64, 32, 4, 3),
    ),
    "decode": (
        Tile(64, 128, 4, 3),
        Tile(64, 128, 8, 3),
        Tile(64, 64, 2, 4),
        Tile(64, 64, 4, 3),
        Tile(64, 64, 4, 4),
        Tile(64, 32, 4, 4),
    ),
    "grad_query": (
        Tile(128, 64, 8, 2),
        Tile(128, 32, 8, 3),
        Tile(64, 64, 4, 2),
        Tile(64, 64, 8, 2),
        Tile(64, 32, 4, 3),
    ),
    "grad_key_value": (
        Tile(64, 128, 8, 2),
        Tile(64, 64, 4, 2),
        Tile(64, 64, 8, 2),
        Tile(32, 128, 8, 2),
        Tile(32, 64, 4, 2),
    ),
}


def table_tile(kernel: Kernel, problem: Problem) -> Tile:
    """The table's tile, before it is fitted to the device and the mask."""
    width = max(64, round_head_dim(max(problem.head_dim, problem.value_head_dim)))
    if problem.itemsize > 2:
        return _lookup(_FLOAT32, kernel, width)
    is_new = problem.device.capability[0] in (9, 10)
    for table, applies in (_hopper_exceptions if is_new else _ampere_exceptions)(problem):
        if applies and width in table.get(kernel, {}):
            return table[kernel][width]
    return _lookup(_HOPPER if is_new else _AMPERE, kernel, width)


_Exceptions = tuple[tuple[dict[Kernel, dict[int, Tile]], bool], ...]


def _ampere_exceptions(problem: Problem) -> _Exceptions:
    return (
        (_AMPERE_EXACT, problem.sums_exactly),
        (_EXACT_SUMS, problem.sums_exactly),
        (_NEWER_AMPERE_DROPOUT, _has_newer_triton(problem) and problem.dropout_p > 0.0),
        (_AMPERE_DROPOUT, problem.dropout_p > 0.0),
        (_AMPERE_CACHED, problem.cache is not None),
    )


def _hopper_exceptions(problem: Problem) -> _Exceptions:
    """Also for Blackwell."""
    few = splits.rows(problem) <= 16
    is_newer = _has_newer_triton(problem) and problem.device.capability[0] == 9
    return (
        (_NEWER_EXACT, is_newer and problem.sums_exactly),
        (_EXACT_SUMS, problem.sums_exactly),
        (_NEWER_HOPPER, is_newer),
        (_BLACKWELL, problem.device.capability[0] == 10),
        (_HOPPER_BYTES, few and caches.stores_bytes(problem.cache)),
        (_HOPPER_SMALL_PAGES, few and caches.looks_up_keys(problem.cache)),
        (_HOPPER_DROPOUT, problem.dropout_p > 0.0),
        (_HOPPER_FEW_ROWS, few),
        (_HOPPER_PER_ELEMENT, problem.reads_per_element),
        (_HOPPER_DENSE, _is_dense(problem)),
    )


def _has_newer_triton(problem: Problem) -> bool:
    return problem.device.triton >= (3, 9)


def _is_dense(problem: Problem) -> bool:
    """Whether nothing but the products takes registers; a cache's addresses would."""
    return problem.blocks is None and not problem.has_score_mod and problem.cache is None


def _lookup(table: dict[Kernel, dict[int, Tile]], kernel: Kernel, width: int) -> Tile:
    """A kernel that writes one of two gradients has its own tiles, or those of both."""
    return table.get(kernel, table["grad_key_value"])[width]


def search_tiles(kernel: Kernel) -> tuple[Tile, ...]:
    """Further tiles worth measuring when the user asks for a search."""
    return _SEARCH.get(kernel, _SEARCH["grad_key_value"])


def smaller_tiles(tile: Tile) -> Iterator[Tile]:
    """A ladder down from `tile` to the smallest: fewer stages first, then the longer side."""
    yield tile
    while (tile.block_m, tile.block_n, tile.num_stages) != (16, 16, 1):
        if tile.num_stages > 1:
            tile = Tile(tile.block_m, tile.block_n, tile.num_warps, tile.num_stages - 1)
        elif tile.block_m >= tile.block_n:
            tile = Tile(tile.block_m // 2, tile.block_n, min(tile.num_warps, 4), 1)
        else:
            tile = Tile(tile.block_m, tile.block_n // 2, min(tile.num_warps, 4), 1)
        yield tile
