"""Which masks become bits, computed once for all heads before the Hopper kernels run.

A mask_mod of more than one comparison costs a kernel as many instructions as the softmax, again in
every head. One bit per score costs an eighth of that. Each pass has its own bits: in the forward
kernel words belong to queries, in the backward kernel to keys.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

from flexhop.lowering.portable.rules import fits_blocks
from flexhop.lowering.problem import MaskBlocks, Problem

# Partial blocks per row of blocks whose bits may always be stored: with blocks of 128 x 128, 512
# bytes per query. A window or a document has three. Where documents meet, every block of the first
# of them is partial. Blocks beyond the limit evaluate mask_mod.
_FEWEST = 32
_MOST_MEMORY = 0.5  # fraction of query's memory, if more blocks than these are stored
_PROGRAMS = 8  # programs per row of blocks; in usual rows, each has one block
_ROWS = 32  # rows per program: 128 words, one per thread
# Instructions per score in a step: the cost of stored bits, and what a mask must save beyond it.
# It is less if the mask waits for memory. It is more if some blocks may be left to mask_mod,
# because full blocks then share a loop with blocks that have bits, and look theirs up as well. It
# is less, too, if no block is full: of `(q % 3 != 1) & (q // 11 >= k // 11)`, 3.6 instructions,
# a step has 662 and 720 instructions at 64 and 128 columns, and 531 and 585 with bits.
_BIT_COST = 2.4
_FEWEST_SAVED, _FEWEST_SAVED_OF_READS, _MORE_SAVED_IN_ONE_LOOP = 2.2, 1.0, 2.0
_FEWEST_SAVED_EVERYWHERE = 1.0
# Backward kernels wait for bits, which they do not read ahead. At (4, 16, 16, 4096, 64) on an
# H200, masks of 7.3 and 9.3 instructions saved 12 and 9 % with bits, and those of 6.8 and 3.5 lost
# 8 and 4 %. At 128 columns, masks of 3.5 to 9.3 instructions lost 2 to 6 %; steps of 128 x 64
# scores have 435 instructions with bits, and take as long as steps with 575 without.
_FEWEST_SAVED_OF_KEYS = {64: 4.5, 128: 7.4}
# One more launch pays off if there are rounds of tiles.
_ROUNDS = 2
_SMALL = 64  # blocks up to here are gathered, several for a tile


class StoredBits(NamedTuple):
    """The bits that one kernel reads.

    rows, columns: of a block; the kernel's threads own rows. blocks: partial blocks per row of
    blocks that have bits; 0: mask_mod decides about all. holds_all: whether no row can have more
    of them. by_batch: whether batches have their own bits.
    """

    rows: int
    columns: int
    blocks: int
    holds_all: bool
    by_batch: bool

    @property
    def unit(self) -> int:
        """Columns that one word of each thread covers in part: 32 of 128, or 16 of 64."""
        return 128 if self.columns % 128 == 0 else 64

    @property
    def words(self) -> int:
        """Words per block: four threads share a row."""
        return self.rows * self.columns // self.unit * 4


NONE = StoredBits(128, 128, 0, False, False)


@dataclasses.dataclass(frozen=True, slots=True)
class MaskBitsConstants:
    """Constants of hopper/before/mask_bits.py.jinja."""

    ROW_SIZE: int
    COLUMN_SIZE: int
    UNIT: int
    BY_KEY: bool
    ROWS: int
    STORED_BLOCKS: int
    PROGRAMS_PER_ROW: int


def constants(stored: StoredBits, *, by_key: bool) -> MaskBitsConstants:
    """Constants of the kernel that stores the bits; by_key: for the backward kernel."""
    return MaskBitsConstants(
        ROW_SIZE=stored.rows,
        COLUMN_SIZE=stored.columns,
        UNIT=stored.unit,
        BY_KEY=by_key,
        ROWS=_ROWS,
        STORED_BLOCKS=stored.blocks,
        PROGRAMS_PER_ROW=_PROGRAMS,
    )


def kernel_constants(stored: StoredBits) -> dict[str, Any]:
    """Constants of a kernel that reads bits, or of one that evaluates mask_mod."""
    return {
        "STORED_BLOCKS": stored.blocks,
        "HOLDS_ALL_BITS": stored.holds_all,
        "BITS_BY_BATCH": stored.by_batch,
        "BITS_ROWS": stored.rows,
        "BITS_WORDS": stored.words,
        "BITS_UNIT": stored.unit,
    }


def of_queries(problem: Problem) -> StoredBits:
    """The bits of the forward kernel."""
    blocks = problem.blocks
    if blocks is None or not _is_possible(problem, blocks):
        return NONE
    columns = _Columns(blocks.kv_columns, -(-problem.key_len // blocks.kv_size))
    fewest = _FEWEST_SAVED, _FEWEST_SAVED + _MORE_SAVED_IN_ONE_LOOP
    if problem.mods.mask_is_scattered:
        fewest = _FEWEST_SAVED_EVERYWHERE, _FEWEST_SAVED_EVERYWHERE
    saving = _Saving(problem.mods.asked_cost, *fewest)
    return _choose(problem, (blocks.q_size, blocks.kv_size), problem.query_len, columns, saving)


def of_keys(problem: Problem) -> StoredBits:
    """The bits of the backward kernel."""
    blocks = problem.blocks
    if blocks is None or not _is_possible(problem, blocks):
        return NONE
    if problem.is_deterministic and blocks.q_columns is None:  # full blocks are in between
        return NONE
    columns = _Columns(blocks.q_columns, -(-problem.query_len // blocks.q_size))
    is_narrow = max(problem.head_dim, problem.value_head_dim) <= 64
    fewest = _FEWEST_SAVED_OF_KEYS[64 if is_narrow else 128]
    cost = problem.mods.asked_grad_cost
    if problem.mods.mask_reads:  # what masks read at queries alone was not compared
        cost = min(cost, problem.mods.asked_cost)
    saving = _Saving(cost, fewest, fewest + _MORE_SAVED_IN_ONE_LOOP)
    return _choose(problem, (blocks.kv_size, blocks.q_size), problem.key_len, columns, saving)


def _is_possible(problem: Problem, blocks: MaskBlocks) -> bool:
    """Whether heads share a mask that is more than two numbers per query."""
    is_shared = not (problem.mods.mask_uses_head or blocks.per_head)
    return problem.mods.has_mask_mod and is_shared and not (blocks.has_ranges or problem.has_spans)


def asks(problem: Problem, stored: StoredBits) -> bool:
    """Whether a kernel with these bits evaluates mask_mod for all scores of partial blocks."""
    return problem.mods.has_mask_mod and not (problem.has_spans or stored.blocks)


def reads_ids(problem: Problem, stored: StoredBits) -> bool:
    """Whether stored bits are those of ids, as of documents, which leave most blocks whole."""
    mods = problem.mods
    return stored.blocks > 0 and mods.mask_reads and not mods.mask_reads_per_element


def long_question(problem: Problem, stored: StoredBits, most: int) -> str:
    """A reason if mask_mod is asked and has more than `most` instructions; empty otherwise.

    Bands, ranges and small blocks were not compared.
    """
    has_ranges = problem.blocks is not None and problem.blocks.has_ranges
    is_other = has_ranges or problem.mods.mask_band is not None or fits_blocks(problem, _SMALL)
    if is_other or not asks(problem, stored) or problem.mods.mask_cost <= most:
        return ""
    return (
        f"mask_mod takes about {problem.mods.mask_cost:.0f} instructions per score and does not "
        f"become bits: above {most}"
    )


class _Saving(NamedTuple):
    """Instructions of mask_mod per score, and how many bits must save to pay off.

    fewest_in_one_loop: if blocks without bits may share the loop.
    """

    cost: float
    fewest: float
    fewest_in_one_loop: float


class _Columns(NamedTuple):
    """How many blocks a row may list: at most, if that is known, and at this compilation."""

    most: int | None
    seen: int


def _choose(
    problem: Problem, sides: tuple[int, int], length: int, columns: _Columns, saving: _Saving
) -> StoredBits:
    """Choose bits for a kernel whose lists have `length / sides[0]` rows."""
    by_batch = is_by_batch(problem)
    whole = NONE._replace(rows=sides[0], columns=sides[1], by_batch=by_batch)
    copies = problem.batch if by_batch else 1
    row_bytes = 4 * whole.words * copies * -(-length // sides[0])
    queries = problem.batch * problem.query_heads * problem.query_len * problem.head_dim
    room = int(_MOST_MEMORY * queries * problem.itemsize) // max(1, row_bytes)
    fewest = max(1, _FEWEST * 128 * 128 // (sides[0] * sides[1]))
    stored = min(max(room, fewest), columns.seen)
    holds_all = columns.most is not None and columns.most <= stored
    if not _pays(problem, copies, saving, holds_all=holds_all):
        return NONE
    return whole._replace(blocks=stored, holds_all=holds_all)


def is_by_batch(problem: Problem) -> bool:
    """Whether batches have their own bits."""
    per_batch = problem.blocks is not None and problem.blocks.per_batch
    return per_batch or problem.mods.mask_uses_batch


def _pays(problem: Problem, copies: int, saving: _Saving, *, holds_all: bool) -> bool:
    """Whether the heads' savings outweigh a launch that computes mask_mod once for them."""
    sharers = problem.batch * problem.query_heads // copies
    # One of the sharers still pays for the mask, and all of them pay for reading bits.
    saved = saving.cost * (1 - 1 / max(1, sharers)) - _BIT_COST
    tiles = -(-problem.query_len // 128) * problem.batch * problem.query_heads
    least = saving.fewest if holds_all else saving.fewest_in_one_loop
    if problem.mods.mask_reads:
        least = _FEWEST_SAVED_OF_READS
    return saved >= least and tiles >= _ROUNDS * problem.device.multiprocessors
