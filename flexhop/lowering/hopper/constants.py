"""Constants that the Hopper forward and backward kernels share."""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

import torch

from flexhop.lowering.hopper import bits
from flexhop.lowering.portable.shared import exp_scale, is_batch_inner
from flexhop.lowering.problem import Problem

ELEMENTS = {torch.bfloat16: "gl.bfloat16", torch.float16: "gl.float16"}


class _Tile(Protocol):
    @property
    def block_m(self) -> int: ...
    @property
    def block_n(self) -> int: ...
    @property
    def num_slots(self) -> int: ...


@dataclasses.dataclass(frozen=True, slots=True)
class SharedConstants:
    """Names as in templates/README.md."""

    BLOCK_M: int
    BLOCK_N: int
    NUM_SLOTS: int
    ELEMENT: str
    TILES_PER_Q_BLOCK: int
    TILES_PER_KV_BLOCK: int
    HAS_BLOCKS: bool
    HAS_RANGES: bool
    HAS_SPANS: bool
    HAS_BAND: bool
    BAND_FIRST: int
    BAND_END: int
    HAS_FULL_BLOCKS: bool
    HAS_PARTIAL_BLOCKS: bool
    STORED_BLOCKS: int
    HOLDS_ALL_BITS: bool
    BITS_BY_BATCH: bool
    BITS_ROWS: int
    BITS_WORDS: int
    BITS_UNIT: int
    CHECK_Q: bool
    CHECK_KV: bool
    CHECK_SCORES: bool
    QK_HEAD_DIM: int
    V_HEAD_DIM: int
    Q_HEADS: int
    GQA_GROUP: int
    KV_BATCH_SHARED: bool
    BATCH_INNER: bool
    HAS_SCORE_MOD: bool
    SCALE_SCORES: bool
    SM_SCALE: float
    EXP_SCALE: float


def block_sizes(problem: Problem, tile: _Tile) -> tuple[int, int]:
    """Queries and keys per block of the mask; without a mask, per tile."""
    if problem.blocks is None:
        return tile.block_m, tile.block_n
    return problem.blocks.q_size, problem.blocks.kv_size


def shared(
    problem: Problem,
    tile: _Tile,
    stored: bits.StoredBits,
    *,
    multiples: tuple[int, int],
    scales: bool,
) -> dict[str, Any]:
    """Values of SharedConstants.

    Args:
        problem: the call's problem.
        tile: tile of the kernel.
        stored: the bits that it reads.
        multiples: numbers of queries and of keys. A length that is known to be a multiple of them
            needs no checks.
        scales: whether scores are scaled before mods see them. Otherwise the scale is folded into
            the exponent.
    """
    given = problem.blocks
    q_size, kv_size = block_sizes(problem, tile)
    first, end = problem.mods.mask_band or (0, 0)
    checks_q = not problem.is_query_multiple(multiples[0])
    checks_kv = not problem.is_key_multiple(multiples[1])
    return {
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "NUM_SLOTS": tile.num_slots,
        "ELEMENT": ELEMENTS[problem.dtype],
        "TILES_PER_Q_BLOCK": max(1, q_size // tile.block_m),
        "TILES_PER_KV_BLOCK": max(1, kv_size // tile.block_n),
        "HAS_BLOCKS": given is not None,
        "HAS_RANGES": given is not None and given.has_ranges,
        "HAS_SPANS": problem.has_spans,
        "HAS_BAND": problem.has_band,
        "BAND_FIRST": first,
        "BAND_END": end,
        "HAS_FULL_BLOCKS": given is not None and given.has_full,
        "HAS_PARTIAL_BLOCKS": given is not None and problem.mods.has_mask_mod,
        **bits.kernel_constants(stored),
        "CHECK_Q": checks_q,
        "CHECK_KV": checks_kv,
        # Ranges end with the keys, and blocks that extend past the end are not full.
        "CHECK_SCORES": checks_kv and (problem.has_band or not problem.has_spans),
        "QK_HEAD_DIM": problem.head_dim,
        "V_HEAD_DIM": problem.value_head_dim,
        "Q_HEADS": problem.query_heads,
        "GQA_GROUP": problem.group,
        "KV_BATCH_SHARED": problem.kv_batch_shared,
        "BATCH_INNER": is_batch_inner(problem),
        "HAS_SCORE_MOD": problem.mods.has_score_mod,
        "SCALE_SCORES": scales,
        "SM_SCALE": problem.scale,
        "EXP_SCALE": exp_scale(problem, scales=scales),
    }
