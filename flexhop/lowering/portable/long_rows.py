"""Tiles of kernels whose score_mod computes rows of more than 16 numbers: small networks."""

from __future__ import annotations

from flexhop.lowering.portable.rules import Rule
from flexhop.lowering.problem import Problem
from flexhop.options import Tile

_SHORT = 16  # numbers of a row; tiles of mods with such rows are measured


def _has_long_rows(problem: Problem) -> bool:
    """Whether the numbers of a row and their gradients are the most that registers hold."""
    is_usual = problem.cache is None and problem.itemsize <= 2
    return is_usual and problem.mods.longest_row > _SHORT


_FORWARD, _BACKWARD = Tile(64, 32, 8, 2), Tile(32, 32, 8, 1)
# With the tiles of other mods, a network of a score spills a thousand registers and more, and
# takes five times as long to compile. With these, some kernels spill a few.
LONG_ROWS = (
    Rule(
        "rows of many numbers",
        _has_long_rows,
        {
            "forward": dict.fromkeys((64, 128), _FORWARD),
            **dict.fromkeys(
                ("grad_query", "grad_key_value", "grad_key", "grad_value"),
                dict.fromkeys((64, 128), _BACKWARD),
            ),
        },
        measured=False,
    ),
)
