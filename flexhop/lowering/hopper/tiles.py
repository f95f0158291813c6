"""The tiles of Hopper kernels: what a program holds, and how blocks of the mask fill it.

Pure functions of Problem. docs/lab/hopper.md gives the reasons for the numbers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

from flexhop.lowering.hopper import bits
from flexhop.lowering.hopper.constants import block_sizes
from flexhop.lowering.problem import MaskBlocks, Problem

# Queries per consumer of the forward kernel, keys of the backward kernel: a warpgroup issues
# products of 64 rows.
ROWS = 64
GRAD_CONSUMERS = 2
# Shared memory has groups of 8 rows. Blocks of 8 were not measured.
_SMALLEST_BLOCK = 16
# What three consumers may compute of what two compute: they gain less than this by themselves.
_MOST_PADDING = 1.06
# Barriers, the consumers' tile indices, and the places of gathered keys, for each loading warp.
_SLACK = 1024
# Keys per step, by width, if each consumer has slots of its own: with 64 of 128 columns, three
# slots fit. Two slots of 128 keys ran at 0.8 of their speed.
_SPLIT_KEYS = {64: 128, 128: 64, 256: 32}
_LARGEST_REST = 192  # columns that two memories hold, see `memories`
# Instructions of score_mod per score above which steps of 64 keys are faster than of 128: half as
# much text in a step. Measured with 14 and 10 instructions; a folded soft cap has 7.
_LONG_SCORE = 10
# Likewise, above which score_mod needs the registers that could hold queries.
_REGISTER_SCORE = 8
# Instructions of a mask_mod that is asked about every score. Dilations by head, a remainder by
# `dilations[h]`: a masked step had 2,965 instructions, 374 of them for spills; half a step has
# 1,166, 17 for spills. Not measured. With 16 there are no spills.
_LONG_MASK = 20


@dataclasses.dataclass(frozen=True, slots=True)
class HopperTile:
    """What one program holds.

    Args:
        block_n: keys per step.
        num_consumers: warpgroups, each with 64 queries.
        num_slots: tiles of keys and of values loaded ahead.
        is_split: whether each consumer has a tile, slots and a loading warp of its own.
        packed_heads: query heads in a consumer's 64 rows.
        spreads_heads: whether consumers that share keys have heads of their own.
    """

    block_n: int
    num_consumers: int
    num_slots: int
    is_split: bool = False
    packed_heads: int = 1
    spreads_heads: bool = False

    @property
    def num_tiles(self) -> int:
        """Tiles that a program holds at a time, and warps that load."""
        return self.num_consumers if self.is_split else 1

    @property
    def num_sharers(self) -> int:
        """Consumers of one tile."""
        return self.num_consumers // self.num_tiles

    @property
    def block_m(self) -> int:
        """Queries of one tile."""
        of_head = 1 if self.spreads_heads else self.num_sharers
        return ROWS // self.packed_heads * of_head

    @property
    def heads(self) -> int:
        """Query heads of one tile."""
        return self.packed_heads * (self.num_sharers if self.spreads_heads else 1)

    def words(self) -> str:
        """For reports."""
        queries = f"{self.block_m} queries"
        if self.heads > 1:
            queries += f" of {self.heads} heads"
        if self.num_tiles > 1:
            queries = f"{self.num_tiles} tiles of {queries}"
        warps = 4 * self.num_consumers + self.num_tiles
        return (
            f"{queries} x {self.block_n} keys, {warps} warps ({self.num_tiles} loads), "
            f"{self.num_slots} slots"
        )


@dataclasses.dataclass(frozen=True, slots=True)
class HopperGradTile:
    """What one program of the backward kernel holds; backward.py chooses it.

    Args:
        block_m: queries per step.
        num_slots: tiles of queries loaded ahead.
        shares_keys: whether the consumers share the keys and each has half of the columns.
        rest_width: columns of queries and keys beyond 128, held apart; scores are then computed
            by halves of the queries.
    """

    block_m: int
    num_slots: int
    shares_keys: bool = False
    rest_width: int = 0

    @property
    def block_n(self) -> int:
        """Keys per program."""
        return ROWS if self.shares_keys else ROWS * GRAD_CONSUMERS

    @property
    def num_do_slots(self) -> int:
        """Tiles of output gradients loaded ahead."""
        return 1 if self.shares_keys else self.num_slots

    @property
    def num_ds(self) -> int:
        """Tiles of weights and of gradients of scores in shared memory."""
        return 3 if self.shares_keys else 1 if self.rest_width else 2

    @property
    def score_columns(self) -> int:
        """Queries whose scores a consumer computes at a time."""
        return self.block_m // 2 if self.shares_keys or self.rest_width else self.block_m

    def words(self) -> str:
        """For reports."""
        return (
            f"{self.block_m} queries x {self.block_n} keys, "
            f"{4 * GRAD_CONSUMERS + 1} warps (1 loads), {self.num_slots} slots"
        )


def table_tile(problem: Problem) -> HopperTile:
    """The tile for the head sizes and the mask."""
    tile, blocks = _whole_tile(problem), problem.blocks
    if blocks is None or blocks.q_size % tile.block_m == 0:
        return tile
    return _small_tile(problem, blocks)


def _whole_tile(problem: Problem) -> HopperTile:
    """The tile if blocks hold as many queries: consumers share keys."""
    width = wider(problem)
    # Three consumers hold 192 queries; no usual block size is a multiple of that.
    is_dense = problem.blocks is None and not problem.mods.has_score_mod
    queries = problem.query_len
    pads_little = _padded(queries, 3 * ROWS) <= _MOST_PADDING * _padded(queries, 2 * ROWS)
    asks_long = problem.mods.score_cost > _LONG_SCORE or _asks_much(problem)
    num_slots = 6 if width == 64 and asks_long else 4
    # With 192 columns a third slot took a table by distance 1.16 times as long, `s * sigmoid(s)`
    # 1.12 times; without score_mod two slots took 1.03 to 1.09 times as long.
    if width > 128 and _needs_registers(problem):
        num_slots = 2
    tile = HopperTile(
        block_n=64 if asks_long or not _fits_long_steps(problem) else 128,
        num_consumers=3 if width == 64 and is_dense and pads_little else 2,
        num_slots=num_slots,
    )
    if copies_pairs(problem, tile) and not _fits(problem, dataclasses.replace(tile, num_slots=2)):
        tile = dataclasses.replace(tile, block_n=64)
    return _fit(problem, tile)


def copies_pairs(problem: Problem, tile: HopperTile) -> bool:
    """Whether tiles of a bias of pairs are loaded with those of keys, for a whole head.

    Beside 256 columns there is no room for pairs of four bytes.
    """
    size = problem.mods.copied_bytes
    is_whole = not (tile.is_split or tile.heads > 1 or gathers(problem, tile).is_gathered)
    least = dataclasses.replace(tile, block_n=min(tile.block_n, 64), num_slots=2)
    return is_whole and size > 0 and _memory(problem, least, size) <= problem.device.shared_memory


def _fits_long_steps(problem: Problem) -> bool:
    """Whether two slots of 128 keys fit, and their scores beside the sums."""
    return problem.value_head_dim <= 128 and problem.head_dim <= _LARGEST_REST


def is_long(problem: Problem) -> bool:
    """Whether a score_mod has many instructions."""
    return problem.mods.score_cost > _REGISTER_SCORE


def _needs_registers(problem: Problem) -> bool:
    """Whether score_mod needs the registers that could hold queries."""
    return problem.mods.reads_by_position or is_long(problem)


def keeps_queries(problem: Problem, tile: HopperTile) -> bool:
    """Whether queries stay in registers, which is faster: 192 columns beside scores of 64 keys."""
    largest = 128 if tile.block_n > 64 or problem.value_head_dim > _LARGEST_REST else _LARGEST_REST
    if _needs_registers(problem):
        largest = 64
    return tile.num_consumers == 2 and problem.head_dim <= largest


def _asks_much(problem: Problem) -> bool:
    """Whether a step evaluates a long mask_mod, because the mask does not become bits."""
    is_asked = bits.asks(problem, bits.of_queries(problem))
    return is_asked and problem.mods.mask_cost > _LONG_MASK


def _small_tile(problem: Problem, blocks: MaskBlocks) -> HopperTile:
    """The tile for blocks of fewer queries.

    If query heads share keys and mask, a tile holds the same queries of several heads, and each
    key is loaded once for them. Otherwise rows of blocks have keys of their own, and so do
    consumers; shared memory is for two of them, so steps are shorter.
    """
    width = wider(problem)
    is_shared = not (blocks.per_head or problem.mods.mask_uses_head)
    packed = ROWS // blocks.q_size if ROWS % blocks.q_size == 0 else 1
    if not is_shared or problem.group % packed:
        packed = 1
    spreads = is_shared and problem.group % (2 * packed) == 0
    # Heads that share keys read long steps once; otherwise each consumer has slots for short ones.
    longest = 128 if width <= 128 else 64
    block_n = longest if spreads else _SPLIT_KEYS[width]
    tile = HopperTile(
        block_n,
        num_consumers=2,
        num_slots=4,
        is_split=not spreads,
        packed_heads=packed,
        spreads_heads=spreads,
    )
    return _fit(problem, tile)


def _fit(problem: Problem, tile: HopperTile) -> HopperTile:
    """The tile with as many slots as fit."""
    while tile.num_slots > 2 and not _fits(problem, tile):
        tile = dataclasses.replace(tile, num_slots=tile.num_slots - 1)
    return tile


def _fits(problem: Problem, tile: HopperTile) -> bool:
    return shared_memory(problem, tile) <= problem.device.shared_memory


class Gathered(NamedTuple):
    """How many blocks of the mask a tile holds side by side: of keys, and of queries."""

    kv_blocks: int
    q_blocks: int

    @property
    def is_gathered(self) -> bool:
        """Whether a tile holds several blocks."""
        return self.kv_blocks > 1 or self.q_blocks > 1


def gathers(problem: Problem, tile: HopperTile) -> Gathered:
    """The blocks that a tile holds."""
    q_size, kv_size = block_sizes(problem, tile)
    return Gathered(max(1, tile.block_n // kv_size), max(1, tile.block_m // q_size))


def block_obstacles(problem: Problem, tile: HopperTile) -> Iterator[str]:
    """Why the mask's blocks rule out the forward kernel."""
    blocks = problem.blocks
    if blocks is None:
        return
    sizes = f"{blocks.q_size} x {blocks.kv_size}"
    if min(blocks.q_size, blocks.kv_size) < _SMALLEST_BLOCK:
        yield f"it supports mask blocks of at least {_SMALLEST_BLOCK} tokens a side, not {sizes}"
    sides = ((blocks.q_size, tile.block_m), (blocks.kv_size, tile.block_n))
    if any(size % side and side % size for size, side in sides):
        yield (
            f"its tiles of {tile.block_m} x {tile.block_n} and the mask's blocks of {sizes} do "
            "not divide each other"
        )
    elif blocks.has_ranges and gathers(problem, tile).is_gathered:
        yield f"its tiles hold several of the blocks of {sizes}, which are ranges, not lists"


def _padded(length: int, rows: int) -> int:
    """Queries that tiles of `rows` compute."""
    return -(-length // rows) * rows


def wider(problem: Problem) -> int:
    """Width of the wider tile: queries and keys, or values."""
    return max(round_width(problem.head_dim), round_width(problem.value_head_dim))


def round_width(size: int) -> int:
    """Width of a tile that holds `size` columns: 64, 128 or 256."""
    return max(64, 1 << (size - 1).bit_length())


def memories(size: int) -> tuple[int, int]:
    """Columns of the memory that holds a tile of `size` columns, and of a second one, or 0.

    Only tiles of 129 to 192 columns have two: in one of 256, queries of 192 leave room for two
    slots of 64 keys, in these for three.
    """
    return (128, 64) if 128 < size <= _LARGEST_REST else (round_width(size), 0)


def stages_out(problem: Problem, tile: HopperTile) -> bool:
    """Whether results are stored through shared memory, where they need as much as the queries."""
    return _stages_out(problem, tile, has_pairs=copies_pairs(problem, tile))


def _stages_out(problem: Problem, tile: HopperTile, *, has_pairs: bool) -> bool:
    width = max(problem.head_dim, problem.value_head_dim)
    return width <= (64 if has_pairs else 128) and not tile.is_split and tile.packed_heads == 1


def shared_memory(problem: Problem, tile: HopperTile) -> int:
    """Upper bound of the shared memory per program, in bytes."""
    copied = problem.mods.copied_bytes if copies_pairs(problem, tile) else 0
    return _memory(problem, tile, copied)


def _memory(problem: Problem, tile: HopperTile, copied: int) -> int:
    """The same if so many bytes per score of a bias of pairs are copied."""
    qk, v = sum(memories(problem.head_dim)), sum(memories(problem.value_head_dim))
    has_results = _stages_out(problem, tile, has_pairs=copied > 0)
    rows = ROWS * tile.num_sharers * (qk + (v if has_results else 0))
    keys = tile.block_n * (qk + v) * tile.num_slots
    pairs = copied * ROWS * tile.num_sharers * tile.block_n * tile.num_slots
    return ((rows + keys) * problem.itemsize + pairs + _SLACK) * tile.num_tiles
