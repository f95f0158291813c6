"""Tiles to try, per kernel, architecture, dtype and head size; data, measured where it says so."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from flexhop.lowering.problem import Problem, round_head_dim
from flexhop.options import Tile

Kernel = Literal["forward", "grad_query", "grad_key_value"]

# Width of the wider head -> tile, for 16-bit operands on Hopper (sm_90).
_HOPPER: dict[Kernel, dict[int, Tile]] = {
    "forward": {
        64: Tile(128, 128, 8, 3),
        128: Tile(128, 128, 8, 2),
        256: Tile(128, 64, 8, 2),
        512: Tile(64, 32, 8, 2),
    },
    "grad_query": {
        64: Tile(128, 64, 8, 3),
        128: Tile(128, 64, 8, 2),
        256: Tile(64, 64, 8, 2),
        512: Tile(32, 32, 8, 1),
    },
    "grad_key_value": {
        64: Tile(64, 128, 8, 3),
        128: Tile(64, 128, 8, 2),
        256: Tile(32, 64, 8, 2),
        512: Tile(32, 32, 8, 1),
    },
}
# Ampere and Ada: mma.sync keeps operands in registers, so tiles are smaller.
_AMPERE: dict[Kernel, dict[int, Tile]] = {
    "forward": {
        64: Tile(128, 64, 4, 3),
        128: Tile(128, 32, 4, 3),
        256: Tile(64, 32, 4, 2),
        512: Tile(32, 16, 4, 1),
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
_FLOAT32: dict[Kernel, dict[int, Tile]] = {
    "forward": {
        64: Tile(64, 32, 4, 2),
        128: Tile(32, 32, 4, 2),
        256: Tile(16, 32, 4, 1),
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
        return _FLOAT32[kernel][width]
    hopper = problem.device.capability[0] in (9, 10)
    return (_HOPPER if hopper else _AMPERE)[kernel][width]


def search_tiles(kernel: Kernel) -> tuple[Tile, ...]:
    """Further tiles worth measuring when the user asks for a search."""
    return _SEARCH[kernel]


def smaller_tiles(tile: Tile) -> Iterator[Tile]:
    """A ladder down from `tile` to the smallest there is: fewer stages first, then the longer side."""
    yield tile
    while (tile.block_m, tile.block_n, tile.num_stages) != (16, 16, 1):
        if tile.num_stages > 1:
            tile = Tile(tile.block_m, tile.block_n, tile.num_warps, tile.num_stages - 1)
        elif tile.block_m >= tile.block_n:
            tile = Tile(tile.block_m // 2, tile.block_n, min(tile.num_warps, 4), 1)
        else:
            tile = Tile(tile.block_m, tile.block_n // 2, min(tile.num_warps, 4), 1)
        yield tile
