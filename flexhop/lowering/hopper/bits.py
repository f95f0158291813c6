"""Which masks the Hopper kernel finds as bits, computed once for all heads before it runs.

A mask_mod that reads tables costs the kernel as many instructions as the softmax, in every head
anew; a bit for each score costs an eighth of that.
"""

from __future__ import annotations

import dataclasses

from flexhop.lowering.problem import Problem

BLOCK = 128  # of the mask, on both sides
WORDS = BLOCK * 4  # of a block
# Partial blocks of a row of blocks whose bits are stored: 512 bytes for each query, two rows of a
# head. A window or a document has three; where documents meet, every block of the first of them
# is partial. mask_mod is applied to those behind.
STORED = 32
_PROGRAMS = 8  # of a row of blocks, so that those of usual rows have one block
_ROWS = 32  # of a program: 128 words, one for each thread
# What the bits save must outweigh one more launch: heads that share them, and rounds of tiles.
_HEADS = 4
_ROUNDS = 2


@dataclasses.dataclass(frozen=True, slots=True)
class MaskBitsConstants:
    """Constants of hopper/before/mask_bits.py.jinja."""

    BLOCK: int
    ROWS: int
    STORED_BLOCKS: int
    PROGRAMS_PER_ROW: int


def constants() -> MaskBitsConstants:
    """Constants of the kernel that stores the bits."""
    return MaskBitsConstants(BLOCK, _ROWS, STORED, _PROGRAMS)


def stored_blocks(problem: Problem) -> int:
    """Of how many partial blocks of a row bits are stored; 0: mask_mod is applied to all."""
    blocks = problem.blocks
    if blocks is None or (blocks.q_size, blocks.kv_size) != (BLOCK, BLOCK):
        return 0
    if not problem.mask_reads or problem.mask_uses_head or blocks.per_head:
        return 0
    if blocks.has_ranges:  # packed sequences: the kernel makes bits of two numbers per query
        return 0
    if max(problem.head_dim, problem.value_head_dim) > BLOCK:  # whose tiles have 64 keys
        return 0
    tiles = -(-problem.query_len // BLOCK) * problem.batch * problem.query_heads
    pays = problem.query_heads >= _HEADS and tiles >= _ROUNDS * problem.device.multiprocessors
    return STORED if pays else 0


def is_by_batch(problem: Problem) -> bool:
    """Whether batches have bits of their own."""
    per_batch = problem.blocks is not None and problem.blocks.per_batch
    return per_batch or problem.mask_uses_batch
