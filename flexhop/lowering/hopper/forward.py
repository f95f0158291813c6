"""The Hopper forward kernel: what it supports, its tile and its constants.

Pure functions of Problem. The kernel is in templates/hopper/forward/; docs/lab/hopper.md gives the
reasons for the numbers.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

from flexhop.lowering.hopper import bits, versions
from flexhop.lowering.hopper.constants import ELEMENTS, SharedConstants, block_sizes, shared
from flexhop.lowering.portable import kernels
from flexhop.lowering.problem import MaskBlocks, Problem
from flexhop.options import KernelOptions

_ROWS = 64  # queries per consumer: a warpgroup issues products of 64 rows
_LARGEST_WIDTH = 256
# Instructions of score_mod per score above which the portable kernel is faster, at 128 columns and
# at other widths; and above which score_mod needs the registers that could hold queries.
_COSTLY_SCORE_128, _COSTLY_SCORE, _REGISTER_SCORE = 10, 20, 8
# Kernels with 296 bytes and more ran at 0.3 to 0.6 times the portable kernel's speed.
_LOCAL_BYTES = 256
# What three consumers may compute of what two compute: they gain less than this by themselves.
_MOST_PADDING = 1.06
# Barriers, and the consumers' tile indices.
_SLACK = 1024
# A slope is divided by the scale and must not become infinite.
_SMALLEST_SCALE = 2.0**-20


@dataclasses.dataclass(frozen=True, slots=True)
class HopperTile:
    """What one program holds.

    Args:
        block_n: keys per step.
        num_consumers: warpgroups, each with 64 queries.
        num_slots: tiles of keys and of values loaded ahead.
    """

    block_n: int
    num_consumers: int
    num_slots: int

    @property
    def block_m(self) -> int:
        """Queries per program."""
        return _ROWS * self.num_consumers

    def words(self) -> str:
        """For reports."""
        warps = 4 * self.num_consumers + 1
        return (
            f"{self.block_m} queries x {self.block_n} keys, "
            f"{warps} warps (1 loads), {self.num_slots} slots"
        )


@dataclasses.dataclass(frozen=True, slots=True)
class HopperForwardConstants(SharedConstants):
    """Constants of hopper/forward/kernel.py.jinja; names as in templates/README.md."""

    NUM_CONSUMERS: int
    Q_IN_REGISTERS: bool
    STAGE_OUT: bool
    SPARSE_KV_BLOCK_SIZE: int
    QK_HEAD_DIM_ROUNDED: int
    V_HEAD_DIM_ROUNDED: int
    HEADS_PER_SECTION: int
    HAS_SLOPE: bool
    HAS_BEND: bool
    ROWS_GUARANTEED_SAFE: bool
    RETURN_MAX: bool
    LN_2: float = math.log(2)


def obstacles(problem: Problem, options: KernelOptions) -> Iterator[str]:
    """Why the kernel does not support a call, most general reason first; empty if it does."""
    yield from operand_obstacles(problem, _LARGEST_WIDTH)
    tile = table_tile(problem)
    yield from block_obstacles(problem.blocks, tile.block_m, tile.block_n)
    if options.forward is not None:
        yield "kernel_options set a tile of the portable kernel"
    if options.short_queries == "decode":
        yield "kernel_options select the decode kernel"
    if options.prescale_qk:
        yield "it does not support prescale_qk"
    yield from filter(None, [versions.obstacle()])


def slower(problem: Problem, options: KernelOptions) -> Iterator[str]:
    """Why the portable kernel is probably faster, from measurements; backend overrides it."""
    if kernels.forward_kernel(problem, options) == "decode":
        yield "the decode kernel is faster for so few queries"
    most = _COSTLY_SCORE_128 if wider(problem) == 128 else _COSTLY_SCORE
    if problem.mods.score_cost > most:
        yield (
            f"score_mod takes about {problem.mods.score_cost:.0f} instructions per score: above "
            f"{most} the portable kernel is faster"
        )


def local_memory_limit(problem: Problem, options: KernelOptions) -> int | None:
    """Most local memory in bytes per thread for which the kernel pays off; None: not checked.

    Wait for the compilation only if a score_mod is long enough to need registers.
    """
    is_long = problem.mods.score_cost > _REGISTER_SCORE
    return _LOCAL_BYTES if is_long and options.backend == "auto" else None


def operand_obstacles(problem: Problem, largest_width: int) -> Iterator[str]:
    """Why the operands rule out a Hopper kernel."""
    if problem.dtype not in ELEMENTS:
        yield f"it supports bfloat16 and float16, not {problem.dtype}"
    for name, width in (("head", problem.head_dim), ("value head", problem.value_head_dim)):
        if not _ROWS // 2 < width <= largest_width:
            yield f"it supports {name} sizes 33 to {largest_width}, not {width}"
    if problem.cache is not None:
        how = "paged" if problem.cache.page_size else "converted by a mod"
        yield f"it copies contiguous keys unchanged, but these keys are {how}"
    if problem.bulk_obstacle:
        yield problem.bulk_obstacle
    if problem.dropout_p > 0.0:
        yield "it does not support dropout"


def block_obstacles(blocks: MaskBlocks | None, block_m: int, block_n: int) -> Iterator[str]:
    """Why the mask's blocks rule out a Hopper kernel with such tiles."""
    if blocks is not None and (blocks.q_size % block_m or blocks.kv_size % block_n):
        yield (
            f"its tiles of {block_m} x {block_n} do not divide the mask's blocks of "
            f"{blocks.q_size} x {blocks.kv_size}"
        )


def table_tile(problem: Problem) -> HopperTile:
    """The tile for the head sizes and the mask."""
    width = wider(problem)
    # Three consumers hold 192 queries; no usual block size is a multiple of that.
    is_dense = problem.blocks is None and not problem.mods.has_score_mod
    queries = problem.query_len
    pads_little = _padded(queries, 3 * _ROWS) <= _MOST_PADDING * _padded(queries, 2 * _ROWS)
    tile = HopperTile(
        block_n=128 if width <= 128 else 64,
        num_consumers=3 if width == 64 and is_dense and pads_little else 2,
        num_slots=4,
    )
    while tile.num_slots > 2 and shared_memory(problem, tile) > problem.device.shared_memory:
        tile = dataclasses.replace(tile, num_slots=tile.num_slots - 1)
    return tile


def _padded(length: int, rows: int) -> int:
    """Queries that tiles of `rows` compute."""
    return -(-length // rows) * rows


def wider(problem: Problem) -> int:
    """Width of the wider tile: queries and keys, or values."""
    return max(round_width(problem.head_dim), round_width(problem.value_head_dim))


def round_width(size: int) -> int:
    """Width of a tile that holds `size` columns: 64, 128 or 256."""
    return max(64, 1 << (size - 1).bit_length())


def stages_out(problem: Problem) -> bool:
    """Whether results are stored through shared memory, where they need as much as the queries."""
    return max(problem.head_dim, problem.value_head_dim) <= 128


def shared_memory(problem: Problem, tile: HopperTile) -> int:
    """Upper bound of the shared memory per program, in bytes."""
    qk, v = round_width(problem.head_dim), round_width(problem.value_head_dim)
    rows = tile.block_m * (qk + (v if stages_out(problem) else 0))
    keys = tile.block_n * (qk + v) * tile.num_slots
    return (rows + keys) * problem.itemsize + _SLACK


def constants(
    problem: Problem, options: KernelOptions, tile: HopperTile
) -> HopperForwardConstants:
    """Constants of the kernel."""
    # As in the portable kernel: without a mod in between, the scale is folded into the exponent.
    has_slope = problem.mods.has_key_slope and problem.scale > _SMALLEST_SCALE
    scales = (problem.mods.has_score_mod and not has_slope) or problem.scale <= 0
    kv_size = block_sizes(problem, tile)[1]
    return HopperForwardConstants(
        **shared(
            problem, tile, bits.of_queries(problem), multiples=(tile.block_m, kv_size),
            scales=scales,
        ),
        NUM_CONSUMERS=tile.num_consumers,
        Q_IN_REGISTERS=_keeps_queries(problem, tile),
        STAGE_OUT=stages_out(problem),
        SPARSE_KV_BLOCK_SIZE=kv_size,
        QK_HEAD_DIM_ROUNDED=round_width(problem.head_dim),
        V_HEAD_DIM_ROUNDED=round_width(problem.value_head_dim),
        HEADS_PER_SECTION=kernels.heads_per_section(problem),
        HAS_SLOPE=has_slope,
        HAS_BEND=has_slope and problem.mods.has_key_bend,
        ROWS_GUARANTEED_SAFE=options.rows_guaranteed_safe,
        RETURN_MAX=problem.returns_max,
    )  # fmt: skip


def _keeps_queries(problem: Problem, tile: HopperTile) -> bool:
    """Whether queries stay in registers: faster, unless score_mod itself needs the registers."""
    needs_many = problem.mods.reads_by_position or problem.mods.score_cost > _REGISTER_SCORE
    return tile.num_consumers == 2 and problem.head_dim <= (64 if needs_many else 128)
