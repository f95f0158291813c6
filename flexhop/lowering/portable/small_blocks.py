"""Tiles for masks of small blocks: data, measured on an H200 in bf16."""

from __future__ import annotations

from flexhop.lowering.portable.rules import Rule, fits_blocks, is_sm90
from flexhop.options import Tile

SMALL_BLOCKS: tuple[Rule, ...] = (
    # A warp computes 16 x 16 scores, or two warps 32 x 32: more warps repeat the loads of operands
    # and wait for each other. Without a wait, loads from the L2 cache are the limit.
    Rule(
        "mask blocks of 16",
        lambda p: is_sm90(p) and fits_blocks(p, 16),
        {
            "grad_query": {128: Tile(16, 16, 1, 3)},
            "grad_key_value": {128: Tile(16, 16, 1, 2)},
        },
    ),
    Rule(
        "mask blocks of 32",
        lambda p: is_sm90(p) and fits_blocks(p, 32),
        {
            "grad_query": {128: Tile(32, 32, 2, 3)},
            "grad_key_value": {128: Tile(32, 32, 2, 2)},
        },
    ),
    # What the mask reads is loaded ahead, too. With two stages, two programs fit.
    Rule(
        "mask blocks of 64, a mask_mod that looks pairs up",
        lambda p: is_sm90(p) and fits_blocks(p, 64) and p.mods.mask_reads_per_element,
        {"grad_query": {128: Tile(64, 64, 4, 2)}},
    ),
)
