"""Tiles for some kinds of calls, and those of a search: data.

Heads of up to 32 columns, as in Swin, MiniLM and AlphaFold; score_mods that compute rows of more
than 16 numbers, as small networks do; masks of small blocks, measured on an H200 in bf16.
"""

from __future__ import annotations

from flexhop.lowering.portable.rules import (
    SHORT_ROW,
    Kernel,
    Rule,
    fits_blocks,
    has_at_most,
    has_few_columns,
    is_dense,
    is_sm90,
)
from flexhop.lowering.portable.shared import row_bytes_ahead
from flexhop.lowering.problem import Problem
from flexhop.options import Tile

_LONG_MASK = 7  # instructions per score
_WIDTH = 128  # of calls that were measured with small blocks


def _is_light(problem: Problem) -> bool:
    """Whether a step takes few instructions beside its products: it gains from more programs."""
    mods = problem.mods
    return has_few_columns(problem) and mods.mask_cost <= _LONG_MASK and not mods.key_bytes


def _is_usual_sm90(problem: Problem) -> bool:
    return is_sm90(problem) and problem.itemsize == 2 and problem.cache is None


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
    # 128 tokens of 64 columns, ms with (64, 128, 4, 2) and with this: a cap 0.186 and 0.164, first
    # rows and keys 0.170 and 0.144, a bias of keys 0.172 and 0.174, with no mask 0.781 and 0.166.
    Rule(
        "few keys",
        lambda p: _is_usual_sm90(p) and has_at_most(p, 128) and not is_dense(p),
        {"forward": {64: Tile(64, 64, 4, 3)}},
    ),
)


def _reads_in_masks(problem: Problem) -> bool:
    return problem.mods.mask_reads and row_bytes_ahead(problem) == 0


FEW_KEYS: tuple[Rule, ...] = (
    # 64 tokens: in nine of nine calls faster than one step of 64 keys, by 1 to 24 %; a causal
    # mask, which reads nothing, takes 5 % longer.
    Rule(
        "few keys, a mask that reads captured tensors",
        lambda p: _is_usual_sm90(p) and has_at_most(p, 64) and _reads_in_masks(p),
        {"forward": {64: Tile(64, 32, 4, 2), 128: Tile(64, 32, 4, 2)}},
    ),
    Rule(
        "few keys, one kernel for all gradients",
        lambda p: p.key_len <= 64,
        {"gradients": {64: Tile(64, 64, 4, 2), 128: Tile(64, 64, 4, 2)}},
    ),
    Rule(
        "few keys, one kernel for all gradients",
        lambda p: True,
        {"gradients": {64: Tile(64, 128, 8, 2)}},
    ),
)


def _has_long_rows(problem: Problem) -> bool:
    """Whether the numbers of a row and their gradients are the most that registers hold."""
    is_usual = problem.cache is None and problem.itemsize <= 2
    return is_usual and problem.mods.longest_row > SHORT_ROW


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


# Bytes of local memory per thread above which a kernel takes half as long steps: they took 0.26 to
# 0.83 of the time from 88 and 25 bytes on, and 1.03 with 64 (docs/lab/unusual.md).
LOCAL_BYTES: dict[Kernel, int] = {"grad_query": 16, "grad_key_value": 64}


def shorter(kernel: Kernel, tile: Tile) -> Tile:
    """Half of the queries, or keys, that a program takes per step; two steps are loaded ahead."""
    by_key = kernel == "grad_key_value"
    m, n = (tile.block_m // 2, tile.block_n) if by_key else (tile.block_m, tile.block_n // 2)
    return Tile(m, n, tile.num_warps, min(tile.num_stages, 2))
