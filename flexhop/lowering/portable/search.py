"""Tiles that a search tries in addition to the table's."""

from __future__ import annotations

from flexhop.lowering.portable.names import Kernel
from flexhop.options import Tile

# Tiles that `mode="max-autotune"` adds to the table's choice.
_SEARCH: dict[Kernel, tuple[Tile, ...]] = {
    "forward": (
        Tile(128, 128, 8, 2),
        Tile(128, 128, 8, 3),
        Tile(128, 64, 8, 3),
        Tile(128, 64, 4, 3),
        Tile(64, 64, 4, 3),
        Tile(64, 32, 4, 3),
    ),
    "jvp_forward": (
        Tile(128, 64, 8, 1),
        Tile(128, 32, 8, 2),
        Tile(64, 64, 4, 2),
        Tile(64, 32, 4, 2),
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


def search_tiles(kernel: Kernel) -> tuple[Tile, ...]:
    """Further candidate tiles if the user requests a search."""
    return _SEARCH.get(kernel, _SEARCH["grad_key_value"])
