"""What pieces of heads change in the constants of kernels (templates/portable/wide)."""

from __future__ import annotations

import dataclasses
from typing import Any

from flexhop.lowering.portable import caches
from flexhop.lowering.portable.constants import (
    DecodePieces,
    GradKeyValuePieces,
    PieceConstants,
)
from flexhop.lowering.portable.rules import Kernel
from flexhop.lowering.problem import Problem, head_pieces
from flexhop.options import Tile

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
    return not changed and not caches.reads_halves(problem, cache, tile)
