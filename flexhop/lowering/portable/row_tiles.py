"""Tiles for score_mods that read captured tensors in rows of keys, such as a bias of pairs.

Loops load these rows ahead, like keys, so a third stage pays off.
"""

from __future__ import annotations

from flexhop.lowering.portable.rules import Rule, has_few_columns, is_sm90
from flexhop.lowering.portable.shared import row_bytes_ahead
from flexhop.lowering.problem import Problem
from flexhop.options import Tile

_REASON = "rows of keys read per score"


def _reads_rows(problem: Problem) -> bool:
    return is_sm90(problem) and problem.itemsize == 2 and row_bytes_ahead(problem) > 0


def _reads_wide_rows(problem: Problem) -> bool:
    return _reads_rows(problem) and row_bytes_ahead(problem) > _NARROW


_NARROW = 2  # bytes per score, of a bias of pairs in 16 bits
ROWS: tuple[Rule, ...] = (
    # Additions to the gradient of a bias are the limit: small tiles, many programs.
    Rule(
        _REASON,
        lambda p: _reads_rows(p) and has_few_columns(p),
        {
            "forward": {64: Tile(64, 64, 4, 3)},
            "grad_query": {64: Tile(64, 32, 4, 3)},
            "grad_key_value": {64: Tile(32, 64, 4, 3)},
        },
    ),
    # Forward, ms by tile: (128, 64, 8), (128, 32, 8), (128, 32, 4), and in-tree's kernel. 128
    # columns 1.22, 0.84, 0.86, 0.79; causal 0.68, 0.60, 0.51, 0.55; documents 0.50, 0.35, 0.91,
    # 0.42; 64 columns 0.73, 0.61, 0.56; documents -, 0.26, 0.39. In 16 bits 0.81, 0.82, 0.83, 0.76
    # and with 64 columns 0.47, 0.57, 0.53, 0.71.
    Rule(
        _REASON,
        lambda p: _reads_wide_rows(p) and p.mods.mask_reads_by_position,
        {"forward": {64: Tile(128, 32, 8, 3), 128: Tile(128, 32, 8, 3)}},
    ),
    Rule(
        _REASON, _reads_wide_rows, {"forward": {64: Tile(128, 32, 4, 3), 128: Tile(128, 32, 4, 3)}}
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
