"""Tiles for heads of up to 32 columns, as in Swin, MiniLM and AlphaFold."""

from __future__ import annotations

from flexhop.lowering.portable.rules import Rule, has_few_columns, is_sm90
from flexhop.lowering.problem import Problem
from flexhop.options import Tile

_LONG_MASK = 7  # instructions per score


def _is_light(problem: Problem) -> bool:
    """Whether a step takes few instructions beside its products: it gains from more programs."""
    mods = problem.mods
    return has_few_columns(problem) and mods.mask_cost <= _LONG_MASK and not mods.key_bytes


FEW: tuple[Rule, ...] = (
    # Forward, H200, ms with (64, 64, 4, 3) and with the usual tile: no mods 0.471 and 0.537,
    # causal 0.363 and 0.365, blocks of 13 tokens 0.124 and 0.129, masks of 4 to 7 instructions
    # 0.236 and 0.274, 0.795 and 0.857, 0.283 and 0.296. A mask of 9 had 1.88 and 1.75, and a
    # score_mod that reads numbers of keys 0.823 and 0.688.
    Rule(
        "few columns",
        lambda p: is_sm90(p) and _is_light(p),
        {"forward": {64: Tile(64, 64, 4, 3)}},
    ),
)
