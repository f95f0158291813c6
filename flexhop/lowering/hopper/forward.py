"""The Hopper forward kernel: what it supports, its tile and its constants.

Pure functions of Problem. The kernel is in templates/hopper/forward/; docs/lab/hopper.md gives the
reasons for the numbers.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

from flexhop.compat.kernels import gluon_versions
from flexhop.lowering.hopper import bits
from flexhop.lowering.hopper.constants import ELEMENTS, SharedConstants, block_sizes, shared
from flexhop.lowering.hopper.loops import awaits_values_first, is_table, separate_loops
from flexhop.lowering.hopper.tiles import (
    ROWS,
    HopperTile,
    block_obstacles,
    copies_pairs,
    gathers,
    is_long,
    keeps_queries,
    memories,
    stages_out,
    table_tile,
    wider,
)
from flexhop.lowering.portable import kernels
from flexhop.lowering.portable.rules import (
    FEW_COLUMNS,
    fits_blocks,
    has_at_most,
    has_few_columns,
)
from flexhop.lowering.portable.shared import row_bytes_ahead, weighing
from flexhop.lowering.problem import ModFacts, Problem
from flexhop.options import KernelOptions

_LARGEST_WIDTH = 256
# Instructions of score_mod per score above which the portable kernel is faster, at 128 columns and
# at other widths.
_COSTLY_SCORE_128, _COSTLY_SCORE = 24, 20
# Likewise at 64 columns, unless score_mod follows distances: it took 0.90 of the time for a cap in
# a tensor (15), 0.93 for `sin`, 0.95 for `softplus` (14), and 1.00 for `gelu` (17). For a mod
# of keys, the first number counts: distances in space (10 to 15) took it 1.5 to 2.4 times as long.
_COSTLY_SCORE_64 = 13
# Columns up to which the portable kernel is faster if score_mod reads rows of keys: 1.04 (128
# columns, causal) to 1.6 times (64, no mask); at 256 half as fast.
_WIDTH_OF_ROWS = 128
# Columns up to which the portable kernel is faster if score_mod reads at keys (1.1 to 1.6 times)
# or if a mask_mod of so many instructions is asked about every score (1.05 to 1.9 times); or, if
# it becomes bits that leave most blocks whole, with a score_mod of so many (1.1 to 1.6 times).
_WIDTH_OF_READS, _COSTLY_MASK, _COSTLY_SCORE_OF_IDS = 64, 6, 6
# Keys, and instructions of the mask, up to which the portable kernel is faster if there is any
# score_mod: it took 0.72 to 0.86 of the time for documents in 1024 tokens, 0.80 to 0.93 for
# windows of 32 and 256 in 1024 and 2048, 0.97 to 1.0 for a causal mask in 1024, 0.97 to 1.02 for
# documents in 4096; and 0.91 to 1.1 without a score_mod.
_FEW_KEYS, _FEW_KEYS_OF_WINDOWS, _CHEAP_MASK = 1024, 2048, 8
# Keys up to which the Hopper kernel is faster all the same: 0.77 to 0.98 of the time with 128 keys
# and a score_mod, 0.90 and 0.94 with 256 keys and a bias of keys; equal with 512.
_ONE_TILE, _FEW_READ_KEYS = 128, 256
# With few columns the portable kernel is as fast (0.98 to 1.3 times) under a mask that stays a
# function or has up to so many instructions, and 1.1 times without mask and score_mod. A mask of
# 10.3, which becomes bits, took it 1.02 times as long, tables by distance 1.9 to 2.4 times.
_COSTLY_MASK_OF_FEW = 10
# Under such masks, and without one, a score_mod of positions that takes so many takes the portable
# kernel longer: 1.3 to 1.7 times for distances in space and tables by two coordinates (10 to 15).
_COSTLY_SCORE_OF_FEW = 10
_TABLE_SCORE = 6  # instructions of a sum with an entry of a table by distance
# Above it, a kernel with opaque keys is tried: of 14 functions of positions eight spilled 0 to 10
# bytes, six 30 to 455; with opaque keys these spilled 6 to 294 (sm_90, Triton 3.6).
FEW_BYTES = 16
# With distances, 0 to 40 of 16 such functions, one 288; with opaque keys 0 to 120 and 240.
_FEW_BYTES_OF_DISTANCES = 64
# Kernels with 296 bytes and more ran at 0.3 to 0.6 times the portable kernel's speed.
_LOCAL_BYTES = 256
# Key heads of a section, and how near an even share must be; more than 8 were not tried. Causal,
# an H200, sections of 4 or 8 instead of 7, 3, or 1: 1.03 times as fast at 128 columns and 8k, 1.07
# at 64 and 16k, 1.05 at 256 and 16k, 1.03 at 128 and 32k. Without a mask tiles are equal, and 7
# heads are as good as 8.
_FEWEST_IN_SECTION, _MOST_EVEN, _NEAR = 4, 8, 1.5
# A slope is divided by the scale and must not become infinite.
_SMALLEST_SCALE = 2.0**-20


@dataclasses.dataclass(frozen=True, slots=True)
class HopperForwardConstants(SharedConstants):
    """Constants of hopper/forward/kernel.py.jinja; names as in templates/README.md."""

    NUM_CONSUMERS: int
    IS_SPLIT: bool
    PACKED_HEADS: int
    HEADS_PER_TILE: int
    IS_GATHERED: bool
    KV_BLOCKS: int
    Q_BLOCKS: int
    ONE_LOOP: bool
    VALUES_FIRST: bool
    STORES_EMPTY_TILES: bool
    Q_IN_REGISTERS: bool
    STAGE_OUT: bool
    SPARSE_KV_BLOCK_SIZE: int
    QK_HEAD_DIM_ROUNDED: int
    V_HEAD_DIM_ROUNDED: int
    QK_REST: int
    V_REST: int
    HEADS_PER_SECTION: int
    HAS_SLOPE: bool
    HAS_BEND: bool
    ROWS_GUARANTEED_SAFE: bool
    RETURN_MAX: bool
    HIDES_KEYS: bool
    BY_DISTANCE: bool
    USES_KEYS: bool
    MASK_READS: bool
    PAIR_BYTES: int
    WEIGHING: str
    LN_2: float = math.log(2)


def obstacles(problem: Problem, options: KernelOptions) -> Iterator[str]:
    """Why the kernel does not support a call, most general reason first; empty if it does."""
    yield from operand_obstacles(problem, _LARGEST_WIDTH)
    tile = table_tile(problem)
    yield from block_obstacles(problem, tile)
    if options.forward is not None:
        yield "kernel_options set a tile of the portable kernel"
    if options.short_queries == "decode":
        yield "kernel_options select the decode kernel"
    if options.prescale_qk:
        yield "it does not support prescale_qk"
    yield from filter(None, [gluon_versions.obstacle()])


def slower(problem: Problem, options: KernelOptions) -> Iterator[str]:
    """Why the portable kernel is probably faster, from measurements; backend overrides it."""
    if kernels.forward_kernel(problem, options) == "decode":
        yield "the decode kernel is faster for so few queries"
    if max(problem.query_len, problem.key_len) <= ROWS:
        yield f"tiles would be half empty, since there are at most {ROWS} queries"
    if has_few_columns(problem) and _spares_little(problem):
        yield f"up to {FEW_COLUMNS} columns the portable kernel is as fast"
    copies = copies_pairs(problem, table_tile(problem)) and not has_few_columns(problem)
    if _reads_rows(problem) and wider(problem) <= _WIDTH_OF_ROWS and not copies:
        yield "the portable kernel loads the rows of keys that score_mod reads ahead"
    # Small blocks, several of which make a tile here, were not compared.
    if wider(problem) <= _WIDTH_OF_READS and not fits_blocks(problem, ROWS):
        yield from _slower_reads(problem)
    most = _most_instructions(problem)
    if problem.mods.score_cost > most:
        yield (
            f"score_mod takes about {problem.mods.score_cost:.0f} instructions per score: above "
            f"{most} the portable kernel is faster"
        )


def _reads_rows(problem: Problem) -> bool:
    """Whether rows that score_mod reads are what a kernel waits for most.

    Bits save more: 0.35 instead of 0.57 ms if a table of pairs hides scores. Under a causal mask
    such a kernel took 0.212 instead of 0.196, for rows of bytes 0.189 instead of 0.216.
    """
    if problem.blocks is None:
        return row_bytes_ahead(problem) > 0
    return row_bytes_ahead(problem) > 1 and not bits.of_queries(problem).blocks


def _most_instructions(problem: Problem) -> int:
    columns, mods = wider(problem), problem.mods
    if columns == 128 or (columns < 128 and mods.score_uses_keys):
        return _COSTLY_SCORE_128
    if columns == 64 and not _follows_distances(mods):
        return _COSTLY_SCORE_64
    return _COSTLY_SCORE


def _spares_little(problem: Problem) -> bool:
    """Whether there is no mask, or one that bits would not shorten much; and no distances.

    Without one, 0.533 instead of 0.593 ms for a factor by batch and head, 1.14 instead of 1.29 for
    softplus; equal for a bias of keys. Tables by distance took twice as long, lines 7 % longer.
    """
    mods = problem.mods
    is_costly = mods.score_uses_keys and mods.score_cost >= _COSTLY_SCORE_OF_FEW
    if is_costly or _follows_distances(mods):
        return False
    if problem.blocks is None:
        return not mods.reads_per_element
    return mods.mask_cost <= _COSTLY_MASK_OF_FEW or not bits.of_queries(problem).blocks


def _slower_reads(problem: Problem) -> Iterator[str]:
    mods, stored = problem.mods, bits.of_queries(problem)
    # Of masks that become bits, those that read ids leave most blocks whole: 0.25 instead of 0.53
    # ms for documents with a bias. Others would be asked in nearly all.
    reads_ids = bits.reads_ids(problem, stored)
    saves_bits = stored.blocks and not reads_ids
    has_steps = not has_at_most(problem, _FEW_READ_KEYS if mods.key_bytes else _ONE_TILE)
    if mods.key_bytes and has_steps and not (mods.reads_per_element or saves_bits):
        yield "score_mod reads at keys, and the portable kernel does so ahead"
    if _has_short_mask(problem) and has_steps and mods.score_cost >= 1:
        yield "with a score_mod under a mask of so few keys the portable kernel is faster"
    is_costly = mods.score_cost >= _COSTLY_SCORE_OF_IDS
    if reads_ids and is_costly and has_steps and not _follows_distances(mods):
        yield (
            "mask_mod leaves most blocks whole, and score_mod takes about "
            f"{mods.score_cost:.0f} instructions per score: from {_COSTLY_SCORE_OF_IDS} on the "
            "portable kernel is faster"
        )
    question = bits.long_question(problem, stored, _COSTLY_MASK)
    if question and not _follows_distances(mods):
        yield f"{question} the portable kernel is faster"


def _has_short_mask(problem: Problem) -> bool:
    """Whether there is a cheap mask of few keys, and nothing that is computed for diagonals."""
    mods = problem.mods
    keys = _FEW_KEYS if mods.mask_band is None else _FEW_KEYS_OF_WINDOWS
    is_short = problem.blocks is not None and problem.key_len <= keys
    by_diagonal = mods.has_distances or mods.has_key_slope
    return is_short and mods.mask_cost <= _CHEAP_MASK and not by_diagonal


def _follows_distances(mods: ModFacts) -> bool:
    """Whether score_mod adds a line, or reads a table by distance.

    The portable kernel reads a table once for each score: 0.96 instead of 0.47 ms.
    """
    return mods.has_key_slope or is_table(mods)


def local_memory_limit(problem: Problem, options: KernelOptions) -> int | None:
    """Most local memory in bytes per thread for which the kernel pays off; None: not checked.

    Wait for the compilation only if a score_mod is long enough to need registers.
    """
    return _LOCAL_BYTES if is_long(problem) and options.backend == "auto" else None


def operand_obstacles(problem: Problem, largest_width: int) -> Iterator[str]:
    """Why the operands rule out a Hopper kernel."""
    if problem.dtype not in ELEMENTS:
        yield f"it supports bfloat16 and float16, not {problem.dtype}"
    for name, width in (("head", problem.head_dim), ("value head", problem.value_head_dim)):
        if width > largest_width:
            yield f"it supports {name} sizes up to {largest_width}, not {width}"
    if problem.cache is not None:
        how = "paged" if problem.cache.page_size else "converted by a mod"
        yield f"it copies contiguous keys unchanged, but these keys are {how}"
    if problem.bulk_obstacle:
        yield problem.bulk_obstacle
    if problem.dropout_p > 0.0:
        yield "it does not support dropout"


def stored_bits(problem: Problem, tile: HopperTile) -> bits.StoredBits:
    """The mask's bits that the kernel reads; words belong to whole blocks."""
    whole = not gathers(problem, tile).is_gathered and tile.packed_heads == 1
    return bits.of_queries(problem) if whole else bits.NONE


def attempts(problem: Problem, options: KernelOptions) -> Iterator[tuple[bool, int | None]]:
    """Kernels to try in order: whether keys are hidden (see `constants`), the most local memory.

    Two are compiled if the faster one spills. Nothing is waited for if it cannot.
    """
    mods = problem.mods
    few = _FEW_BYTES_OF_DISTANCES if mods.has_distances else FEW_BYTES
    # LLVM then knows what keys have in common: `kv_idx % 4` has two values in a thread.
    uses_keys = mods.score_uses_keys and not mods.has_key_slope
    if is_long(problem) or mods.reads_by_position or mods.has_distances or uses_keys:
        yield False, few if mods.score_cost > _TABLE_SCORE else None
    yield True, local_memory_limit(problem, options)


def constants(
    problem: Problem, options: KernelOptions, tile: HopperTile, *, hides_keys: bool | None = None
) -> HopperForwardConstants:
    """Constants of the kernel.

    hides_keys: whether keys are opaque to LLVM where score_mod sees them; None: as in the first
    attempt. Otherwise neighbours are read together, and functions of the distance are computed
    once for a diagonal, which takes more registers.
    """
    if hides_keys is None:
        hides_keys, _ = next(attempts(problem, options))
    # As in the portable kernel: without a mod in between, the scale is folded into the exponent.
    gathered = gathers(problem, tile)
    has_slope = (
        problem.mods.has_key_slope
        and problem.scale > _SMALLEST_SCALE
        and not gathered.is_gathered
        and tile.packed_heads == 1
    )
    has_pairs = copies_pairs(problem, tile)  # then score_mod adds no line
    # Rows of several heads, and keys of several blocks, are no diagonals.
    shares_distances = (
        problem.mods.has_distances
        and not (hides_keys or has_slope or has_pairs or gathered.is_gathered)
        and tile.packed_heads == 1
    )
    scales = (problem.mods.takes_scores and not has_slope) or problem.scale <= 0
    kv_size = block_sizes(problem, tile)[1]
    multiples = (tile.block_m, kv_size)
    stored = stored_bits(problem, tile)
    common = shared(problem, tile, stored, multiples=multiples, scales=scales)
    qk_columns, v_columns = memories(problem.head_dim), memories(problem.value_head_dim)
    if gathered.is_gathered:
        # Keys are no neighbours, and missing blocks are keys that do not exist.
        common |= {"HAS_SPANS": False, "HAS_BAND": False, "CHECK_KV": True}
        common["CHECK_SCORES"] = not problem.is_key_multiple(kv_size)
    return HopperForwardConstants(
        **common,
        NUM_CONSUMERS=tile.num_sharers,
        IS_SPLIT=tile.is_split,
        PACKED_HEADS=tile.packed_heads,
        HEADS_PER_TILE=tile.heads,
        IS_GATHERED=gathered.is_gathered,
        KV_BLOCKS=gathered.kv_blocks,
        Q_BLOCKS=gathered.q_blocks,
        ONE_LOOP=not any(separate_loops(problem, tile, stored)),
        VALUES_FIRST=awaits_values_first(problem, tile, stored),
        STORES_EMPTY_TILES=_expects_empty_tiles(problem),
        Q_IN_REGISTERS=keeps_queries(problem, tile),
        STAGE_OUT=stages_out(problem, tile),
        SPARSE_KV_BLOCK_SIZE=kv_size,
        QK_HEAD_DIM_ROUNDED=qk_columns[0],
        V_HEAD_DIM_ROUNDED=v_columns[0],
        QK_REST=qk_columns[1],
        V_REST=v_columns[1],
        HEADS_PER_SECTION=max(1, _heads_per_section(problem) // tile.heads),
        HAS_SLOPE=has_slope,
        HAS_BEND=has_slope and problem.mods.has_key_bend,
        # Of several rows of blocks, one may see nothing in a tile of keys.
        ROWS_GUARANTEED_SAFE=options.rows_guaranteed_safe and gathered.q_blocks == 1,
        RETURN_MAX=problem.returns_max,
        HIDES_KEYS=hides_keys,
        BY_DISTANCE=shares_distances,
        USES_KEYS=problem.mods.has_score_mod and problem.mods.score_uses_keys,
        MASK_READS=problem.mods.mask_reads_keys,
        PAIR_BYTES=problem.mods.copied_bytes * has_pairs,
        # A line has sums of its own.
        WEIGHING=repr("fused" if has_slope else weighing(problem)),
    )  # fmt: skip


def _expects_empty_tiles(problem: Problem) -> bool:
    """Whether some tiles of queries may see no keys, as far as the mask_mod tells.

    If a tile does although none was expected, as lists may say, it only takes longer. Packed
    sequences rarely have one without keys.
    """
    if problem.blocks is None or problem.is_packed:
        return False
    return not problem.mods.mask_keeps_own or problem.query_len > problem.key_len


def _heads_per_section(problem: Problem) -> int:
    """Query heads of a section, as in the portable kernel.

    Under a mask, four key heads at least, and if possible sections of equal size: a small last one
    leaves programs idle.
    """
    heads = kernels.heads_per_section(problem)
    total = problem.batch * problem.kv_heads
    wanted = min(total, max(_FEWEST_IN_SECTION, heads // problem.group))
    if problem.blocks is None or problem.is_packed or wanted > _MOST_EVEN:
        return heads
    even = [n for n in range(1, min(total, 2 * wanted) + 1) if total % n == 0]
    nearest = min(even, key=lambda n: (max(n / wanted, wanted / n), -n))
    is_near = max(nearest / wanted, wanted / nearest) <= _NEAR
    return (nearest if is_near else wanted) * problem.group
