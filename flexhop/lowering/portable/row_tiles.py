"""Tiles for score_mods that read captured tensors in rows of keys, such as a bias of pairs.

Loops load these rows ahead, like keys, so a third stage pays off.
"""

from __future__ import annotations

from flexhop.lowering.portable.rules import Rule, is_sm90
from flexhop.lowering.portable.shared import row_bytes_ahead
from flexhop.lowering.problem import Problem
from flexhop.options import Tile

_REASON = "rows of keys read per score"


def _reads_rows(problem: Problem) -> bool:
    return is_sm90(problem) and problem.itemsize == 2 and row_bytes_ahead(problem) > 0


# Additions to the gradient of a bias are the limit with few columns: small tiles, many programs.
_FEW_COLUMNS = 32
ROWS: tuple[Rule, ...] = (
    Rule(
        _REASON,
        lambda p: _reads_rows(p) and max(p.head_dim, p.value_head_dim) <= _FEW_COLUMNS,
        {
            "forward": {64: Tile(64, 64, 4, 3)},
            "grad_query": {64: Tile(64, 32, 4, 3)},
            "grad_key_value": {64: Tile(32, 64, 4, 3)},
        },
    ),
    Rule(
        _REASON,
        _reads_rows,
        {
            "forward": {64: Tile(128, 64, 8, 3), 128: Tile(128, 64, 8, 3)},
            "grad_query": {128: Tile(64, 64, 4, 3)},
            "grad_key_value": {128: Tile(64, 64, 4, 2)},
        },
    ),
)
