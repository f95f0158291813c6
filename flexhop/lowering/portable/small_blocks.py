"""Tiles for masks of small blocks: data, measured on an H200 in bf16."""

from __future__ import annotations

from flexhop.lowering.portable.rules import Rule, fits_blocks, is_sm90
from flexhop.lowering.problem import Problem
from flexhop.options import Tile

_WIDTH = 128


def _is_measured(problem: Problem, size: int) -> bool:
    """Whether a call is of the kind that was measured with blocks of `size`, without spills.

    Checks of lengths, of columns, and functions of scores need registers that few warps lack.
    """
    is_full = problem.is_query_multiple(size) and problem.is_key_multiple(size)
    has_width = problem.head_dim == problem.value_head_dim == _WIDTH
    is_plain = not problem.mods.has_score_mod and problem.dropout_p == 0.0
    return is_sm90(problem) and fits_blocks(problem, size) and is_full and has_width and is_plain


SMALL_BLOCKS: tuple[Rule, ...] = (
    # A warp computes 16 x 16 scores, or two warps 32 x 32: more warps repeat the loads of operands
    # and wait for each other. Without a wait, loads from the L2 cache are the limit.
    Rule(
        "mask blocks of 16",
        lambda p: _is_measured(p, 16),
        {
            "grad_query": {128: Tile(16, 16, 1, 3)},
            "grad_key_value": {128: Tile(16, 16, 1, 2)},
        },
    ),
    Rule(
        "mask blocks of 32",
        lambda p: _is_measured(p, 32),
        {
            "grad_query": {128: Tile(32, 32, 2, 3)},
            "grad_key_value": {128: Tile(32, 32, 2, 2)},
        },
    ),
    # What the mask reads is loaded ahead, too. With two stages, two programs fit.
    Rule(
        "mask blocks of 64, a mask_mod that looks pairs up",
        lambda p: _is_measured(p, 64) and p.mods.mask_reads_per_element,
        {"grad_query": {128: Tile(64, 64, 4, 2)}},
    ),
)
