"""The mask of partial blocks as bits, computed once for all heads before the Hopper kernel runs.

A mask_mod that reads tables costs the kernel as many instructions as the softmax, in every head
anew; a bit for each score costs it an eighth of that.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from flexhop.lowering.problem import Problem

BLOCK = 128  # of the mask, on both sides
WORDS = 4  # of a row of a block
# Partial blocks of a row of blocks whose bits are stored; of documents and windows that are longer
# than a block there are three. mask_mod is applied to those behind.
STORED = 4
# What the bits save must outweigh one more launch: heads that share them, and rounds of tiles.
_HEADS = 4
_ROUNDS = 2


@dataclasses.dataclass(frozen=True, slots=True)
class MaskBitsConstants:
    """Constants of mask_bits.py.jinja."""

    BLOCK: int
    STORED_BLOCKS: int
    HAS_RANGES: bool
    OFFSET_DTYPE: str = "tl.int32"


def constants(problem: Problem) -> MaskBitsConstants:
    """Constants of the kernel."""
    assert problem.blocks is not None
    return MaskBitsConstants(BLOCK, stored_blocks(problem), problem.blocks.has_ranges)


def stored_blocks(problem: Problem) -> int:
    """How many partial blocks of a row the Hopper kernel finds as bits; 0: it applies mask_mod."""
    blocks = problem.blocks
    if blocks is None or (blocks.q_size, blocks.kv_size) != (BLOCK, BLOCK):
        return 0
    if blocks.per_head or problem.mask_uses_head or not problem.mask_reads:
        return 0
    if max(problem.head_dim, problem.value_head_dim) > BLOCK:  # tiles of 64 keys
        return 0
    tiles = -(-problem.query_len // BLOCK) * problem.batch * problem.query_heads
    if problem.query_heads < _HEADS or tiles < _ROUNDS * problem.device.multiprocessors:
        return 0
    return STORED


def is_by_batch(problem: Problem) -> bool:
    """Whether batches have bits of their own."""
    assert problem.blocks is not None
    return problem.mask_uses_batch or problem.blocks.per_batch


def output_size(problem: Problem, query: Any, count_rows: Any) -> list[Any]:
    """[N, 1, 128, 4]: the bits' words, N blocks. count_rows(length): rows of blocks."""
    batch, _, length, _ = query.get_size()
    rows = count_rows(length) * stored_blocks(problem)
    return [rows * batch if is_by_batch(problem) else rows, 1, BLOCK, WORDS]
