"""Tiles for mods that read captured tensors at a query or at a key, such as ids of documents.

What is read at the queries or keys of a tile has to be less than one number for each thread.
Triton takes as many numbers as threads for an expensive load, and gives the scores the layout of
its result. A maximum of a row then takes five exchanges between threads for each score: with
documents of 64 columns on sm_90, a step of 64 x 128 scores by four warps has 3400 instructions,
two steps of 64 x 64 have 1040.

It copies elements of four bytes ahead if no branch is around them, as around a mask in the forward
kernel, and has no layout for them.
"""

from __future__ import annotations

from flexhop.lowering.portable.rules import (
    Rule,
    has_few_columns,
    is_mma_sync,
    is_sm90,
    is_sm100,
)
from flexhop.lowering.portable.shared import has_mask_loop, row_bytes_ahead
from flexhop.lowering.problem import Problem
from flexhop.options import Tile

_REASON = "captured tensors read by position"
_COPIED_AHEAD = frozenset({4})  # bytes of an element
_LONG_MASK = 20  # instructions per score
# Of score_mods that read rows of keys, such as a bias of pairs. Loops load these rows ahead, like
# keys, so a third stage pays off.
_ROWS_REASON = "rows of keys read per score"


def _reads_rows(problem: Problem) -> bool:
    return is_sm90(problem) and problem.itemsize == 2 and row_bytes_ahead(problem) > 0


def _reads_wide_rows(problem: Problem) -> bool:
    return _reads_rows(problem) and row_bytes_ahead(problem) > _NARROW


_NARROW = 2  # bytes per score, of a bias of pairs in 16 bits
ROWS: tuple[Rule, ...] = (
    # Additions to the gradient of a bias are the limit: small tiles, many programs.
    Rule(
        _ROWS_REASON,
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
        _ROWS_REASON,
        lambda p: _reads_wide_rows(p) and p.mods.mask_reads_by_position,
        {"forward": {64: Tile(128, 32, 8, 3), 128: Tile(128, 32, 8, 3)}},
    ),
    Rule(
        _ROWS_REASON,
        _reads_wide_rows,
        {"forward": {64: Tile(128, 32, 4, 3), 128: Tile(128, 32, 4, 3)}},
    ),
    Rule(
        _ROWS_REASON,
        _reads_rows,
        {
            "forward": {64: Tile(128, 64, 8, 3), 128: Tile(128, 64, 8, 3)},
            "grad_query": {128: Tile(64, 64, 4, 3)},
            "grad_key_value": {128: Tile(64, 64, 4, 2)},
        },
    ),
)


def _reads_keys(problem: Problem) -> bool:
    """Whether the forward kernel reads elements at keys that are not copied ahead."""
    return problem.mods.mask_reads_keys or not problem.mods.key_bytes <= _COPIED_AHEAD


def _reads(problem: Problem) -> bool:
    """The same at queries or keys."""
    return problem.mods.mask_reads_by_position or _reads_keys(problem)


def _reads_others(problem: Problem) -> bool:
    """The same for the kernel for short queries, which has no branch around a mask."""
    mods = problem.mods
    return not mods.key_bytes | mods.mask_key_bytes <= _COPIED_AHEAD


_POSITIONS: tuple[Rule, ...] = (
    # What the loop of partial blocks loads ahead leaves the usual tile no second stage. A masked
    # step then had 4,028 and 5,857 instructions, 760 and 943 of them for spills; two of this tile
    # have 2,136 and 3,068, and none.
    Rule(
        "a mask of pairs",
        lambda p: is_sm90(p) and has_mask_loop("forward", p),
        {"forward": {128: Tile(128, 64, 8, 3)}},
        measured=False,
    ),
    # Forward, 64 columns, ms by tile: (64, 128, 4), (128, 64, 8), (64, 64, 4), (128, 128, 8).
    # Documents 1.34, 0.19, 0.17, 0.25; keys' bytes in a mask 3.64, 0.56, 0.56, 0.75; a bias of
    # keys in bf16 6.0, 0.73, 0.76, 1.08. In fp32, the first is the fastest by a sixth.
    Rule(_REASON, lambda p: is_sm90(p) and _reads_keys(p), {"forward": {64: Tile(64, 64, 4, 3)}}),
    Rule(
        _REASON,
        lambda p: is_sm90(p) and _reads_others(p),
        {"decode": {64: Tile(128, 64, 4, 4)}},
    ),
    # 0.58 and 0.44 ms for dilations of heads, of which each score takes a remainder.
    Rule(
        "a long mask_mod",
        lambda p: is_sm90(p) and p.mods.mask_cost > _LONG_MASK,
        {"forward": {64: Tile(64, 64, 4, 3)}},
    ),
    # The usual tiles with more warps, or fewer keys for each: chosen from machine code.
    Rule(
        _REASON,
        lambda p: is_sm100(p) and _reads_keys(p),
        {"forward": {64: Tile(128, 64, 8, 3)}},
        measured=False,
    ),
    Rule(
        _REASON,
        lambda p: is_sm100(p) and _reads_others(p),
        {"decode": {64: Tile(128, 64, 4, 4)}},
        measured=False,
    ),
    Rule(
        _REASON,
        lambda p: is_mma_sync(p) and _reads(p),
        {"forward": {64: Tile(128, 64, 8, 3), 128: Tile(128, 32, 8, 3)}},
        measured=False,
    ),
)

# Rows of keys move in stages, and decide before.
READS: tuple[Rule, ...] = (*ROWS, *_POSITIONS)
