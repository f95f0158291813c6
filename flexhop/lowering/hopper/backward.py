"""The Hopper backward kernel: what it supports, its tile and its constants.

Pure functions of Problem. The kernel is in templates/hopper/backward/; docs/lab/hopper.md gives
the reasons for the numbers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from flexhop.compat.kernels import gluon_versions
from flexhop.lowering.hopper import bits, forward
from flexhop.lowering.hopper.constants import SharedConstants, block_sizes, shared
from flexhop.lowering.hopper.loops import gradients_share_loop, is_table
from flexhop.lowering.hopper.schedule import LARGEST_OWN, heads_per_section, owns_heads
from flexhop.lowering.hopper.tiles import GRAD_CONSUMERS, ROWS, HopperGradTile
from flexhop.lowering.portable.rules import has_few_columns, has_few_keys
from flexhop.lowering.problem import MaskBlocks, Problem
from flexhop.options import KernelOptions

_LARGEST_WIDTH = 256
_REST_WIDTH = 64
# Rows of 8 elements are 16 bytes, the alignment that the gradients' own memory needs too.
_COLUMNS = 8
# Queries from which on the kernel is faster, at 64 columns and at 128. It gains in masked tiles,
# and adds to the gradients of learned tables once for each diagonal of a tile.
_FEWEST = {
    "": (1025, 384),
    "a block mask": (960, 256),
    "a mask that reads tables": (512, 256),
    "tables read by score_mod": (384, 256),
    "learned tables by distance": (128, 128),
}
# At 64 columns fewer are enough, without and with a mask, if each multiprocessor has many tiles.
_FEWEST_MANY_TILES, _MANY_TILES = (768, 512), 16
# If programs own heads. Portable tiles have 64 queries, so three of these hold 192.
_FEWEST_OWNED = (193, 128)
# At more columns, and in a fixed order; measured before sections had fewer heads.
_FEWEST_OTHERS = {
    "": (1025, 960),
    "a block mask": (960, 768),
    "a mask that reads tables": (512, 512),
    "tables read by score_mod": (384, 512),
    "learned tables by distance": (128, 128),
}
_COSTLY_GRAD = 60  # instructions per score
_COSTLY_MASK = 20  # likewise, of a mask_mod that does not become bits, at 64 columns
# Kernels with up to 344 bytes were faster than the portable ones, those with 392 and more slower.
_LOCAL_BYTES = 368
# With up to 140 they were as fast as one whose consumers share 64 keys, or faster (1.1 to 1.6
# times); those with 177, 312 and more took 1.09 to 1.44 times as long, one with 307 0.95 times.
_LOCAL_BYTES_OWN = 160
# Barriers, the consumers' tile indices, and what all warps are given.
_SLACK = 2048


_SHARED_TILE = HopperGradTile(block_m=64, num_slots=2, shares_keys=True)


@dataclasses.dataclass(frozen=True, slots=True)
class HopperBackwardConstants(SharedConstants):
    """Constants of hopper/backward/kernel.py.jinja; names as in templates/README.md."""

    NUM_DO_SLOTS: int
    NUM_DS: int
    SHARES_KEYS: bool
    SCORE_COLUMNS: int
    REST_WIDTH: int
    WIDTH: int
    DQ_COLUMNS: int
    SPARSE_Q_BLOCK_SIZE: int
    KV_HEADS: int
    HEADS_PER_SECTION: int
    IS_DETERMINISTIC: bool
    ONE_LOOP: bool
    HAS_ADDERS: bool
    OWNS_HEADS: bool
    STAGES_PIECES: bool
    HAS_SCORE_GRAD: bool
    STASH_SCORES: bool
    REMATERIALIZE_POSITIONS: bool
    KEEPS_READS: bool
    HAS_LARGE_SCORES: bool


def obstacles(problem: Problem, options: KernelOptions) -> Iterator[str]:
    """Why the kernel does not support a call, most general reason first; empty if it does."""
    yield from forward.operand_obstacles(problem, _LARGEST_WIDTH)
    if problem.head_dim % _COLUMNS or problem.value_head_dim % _COLUMNS:
        yield f"it supports only head sizes that are multiples of {_COLUMNS}"
    if problem.is_deterministic and problem.has_captured_grads:
        yield (
            "it sums gradients of captured tensors in no fixed order, but deterministic mode is on"
        )
    if "score" in problem.grad.captured_reads:
        yield "score_mod reads a captured tensor that needs a gradient at one entry per score"
    tile = table_tile(problem)
    yield from _block_obstacles(problem.blocks, tile.block_m, tile.block_n)
    if options.prescale_qk:
        yield "it does not support prescale_qk"
    if options.grad_query is not None or options.grad_key_value is not None:
        yield "kernel_options set a tile of the portable kernels"
    yield from filter(None, [gluon_versions.obstacle()])


def _block_obstacles(blocks: MaskBlocks | None, block_m: int, block_n: int) -> Iterator[str]:
    """Why the mask's blocks rule out a Hopper kernel with its tiles."""
    if blocks is not None and (blocks.q_size % block_m or blocks.kv_size % block_n):
        yield (
            f"its tiles of {block_m} x {block_n} do not divide the mask's blocks of "
            f"{blocks.q_size} x {blocks.kv_size}"
        )


def slower(problem: Problem, options: KernelOptions) -> Iterator[str]:
    """Why the portable kernels are probably faster, from measurements; backend overrides it."""
    if has_few_keys(problem, options):
        yield "one portable kernel computes all gradients of so few keys"
    if _is_one_tile(problem):
        yield f"for {problem.key_len} keys, sums for the gradient of query are not worth it"
    if has_few_columns(problem) and problem.blocks is None and not problem.mods.has_score_mod:
        yield "with so few columns the portable kernels are faster if all scores count as they are"
    tiles, processors = num_tiles(problem), problem.device.multiprocessors
    # Twice the keys per tile, at more than the speed: half as many tiles are enough.
    if tiles < (processors // 2 if table_tile(problem).rest_width else processors):
        yield f"its {tiles} tiles of keys do not keep {processors} multiprocessors busy"
    if problem.grad.grad_cost > _COSTLY_GRAD:
        yield (
            f"the gradient of score_mod takes about {problem.grad.grad_cost:.0f} instructions per "
            f"score: above {_COSTLY_GRAD} the portable kernels are faster"
        )
    question = bits.long_question(problem, bits.of_keys(problem), _COSTLY_MASK)
    if question and width(problem) == 64:
        yield f"{question} the portable kernels are faster"
    if _needs_value_alone(problem):
        yield "score_mod ignores the score: a portable kernel computes value's gradient alone"
    if _adds_rows(problem):
        yield "the portable kernels sum in registers what a query adds to captured tensors"
    fewest = _fewest_queries(problem, tiles)
    if problem.query_len < fewest:
        yield f"below {fewest} queries its setup and post-processing dominate"


def _is_one_tile(problem: Problem) -> bool:
    """Whether so few keys share each query that its gradient needs no fp32 sums in memory.

    With 64, 77 and 128 keys the kernel took 1.7, 1.15 and 1.15 times as long as portable ones;
    if programs own heads, 96 keys 1.08 and causal 0.97, and 128 keys 0.83 (docs/lab/unusual.md).
    """
    if problem.key_len <= ROWS:
        return width(problem) <= LARGEST_OWN
    is_one = problem.key_len <= table_tile(problem).block_n and width(problem) <= LARGEST_OWN
    return is_one and not (owns_heads(problem) or problem.has_captured_grads)


def _needs_value_alone(problem: Problem) -> bool:
    """Whether no gradient depends on products of queries and keys.

    The portable kernel took 0.44 to 0.97 of the time; with a table by distance, which it reads for
    each score, 0.77 to 1.5. With learned tables Hopper's is 1.05 to 5 times as fast. Wider heads
    were not compared.
    """
    is_compared = width(problem) <= LARGEST_OWN and not problem.has_captured_grads
    return problem.mods.ignores_score and is_compared and not is_table(problem.mods)


def _adds_rows(problem: Problem) -> bool:
    """Whether sums over keys cost more than what the kernel saves.

    It owns keys, so each warp adds them to memory in each step. At 128 columns this pays for one
    number of a query, at 64 if there are functions: 2.9 instead of 3.1 ms for `tanh(s + t[q])`.
    Not if queries meet, because their sums are compared first. Nor if the number is not the
    gradient of the score: 5.0 instead of 4.2 ms for `s * sigmoid(t[h, q])` at 128 columns, 2.8
    instead of 2.4 at 64. The portable kernels have no sums by distance.
    """
    reads = problem.grad.captured_reads
    if "query" not in reads or "distance" in reads or width(problem) > LARGEST_OWN:
        return problem.grad.queries_meet
    is_one = reads.count("query") == 1 and "key" not in reads and not problem.grad.queries_meet
    pays = width(problem) > 64 or problem.grad.grad_has_functions
    return not (is_one and pays and problem.grad.captured_follow_score)


def _fewest_queries(problem: Problem, tiles: int) -> int:
    columns, mods, is_masked = width(problem), problem.mods, problem.blocks is not None
    if "distance" in problem.grad.captured_reads:
        kind = "learned tables by distance"
    elif mods.reads_per_element:
        kind = "tables read by score_mod"
    elif is_masked and mods.mask_reads:
        kind = "a mask that reads tables"
    else:
        kind = "a block mask" if is_masked else ""
    if problem.is_deterministic or columns > LARGEST_OWN:
        return _FEWEST_OTHERS[kind][columns > 64]
    if owns_heads(problem):
        return _FEWEST_OWNED[bool(kind) or columns > 64]
    has_many = columns == 64 and tiles >= _MANY_TILES * problem.device.multiprocessors
    fewest = _FEWEST[kind][columns > 64]
    return min(fewest, _FEWEST_MANY_TILES[bool(kind)]) if has_many else fewest


def attempts(
    problem: Problem, options: KernelOptions
) -> Iterator[tuple[HopperGradTile, int | None]]:
    """Tiles in the order in which they are tried.

    Each with the most local memory in bytes per thread for which it pays off; None: not checked.
    Wider heads are not checked: there the portable kernels compute two more products. Sums in a
    fixed order know one tile.
    """
    tile = table_tile(problem)
    has_derivative = problem.mods.has_score_mod and problem.grad.has_score_grad
    needs_registers = has_derivative or problem.has_captured_grads
    is_measured = needs_registers and width(problem) <= LARGEST_OWN
    if is_measured and width(problem) == LARGEST_OWN and not problem.is_deterministic:
        if not tile.shares_keys:
            yield tile, _LOCAL_BYTES_OWN
        tile = _SHARED_TILE
    yield tile, _LOCAL_BYTES if is_measured and options.backend == "auto" else None


def num_tiles(problem: Problem) -> int:
    """Tiles of keys over batches and key heads."""
    batch = 1 if problem.kv_batch_shared else problem.batch
    return -(-problem.key_len // table_tile(problem).block_n) * batch * problem.kv_heads


def table_tile(problem: Problem) -> HopperGradTile:
    """The tile for the head sizes and the user's functions."""
    columns = width(problem)
    # Twice as many queries mean twice as many scores in registers, which functions need too.
    reads = problem.mods.mask_reads and not bits.of_keys(problem).holds_all
    is_plain = not problem.mods.has_score_mod and not reads
    if _fits_halves(problem):
        return HopperGradTile(block_m=64, num_slots=2, rest_width=_REST_WIDTH)
    if columns > LARGEST_OWN or _lacks_registers(problem):
        return _SHARED_TILE
    if columns == 64:
        return HopperGradTile(block_m=128, num_slots=2) if is_plain else HopperGradTile(64, 4)
    return HopperGradTile(block_m=64, num_slots=2)


def _fits_halves(problem: Problem) -> bool:
    """Whether queries and keys have up to 192 columns, values up to 128, as in latent attention.

    Scores are then computed by halves of the queries, and 128 keys are a program's instead of 64.
    """
    blocks = problem.blocks
    is_narrow = problem.head_dim <= LARGEST_OWN + _REST_WIDTH
    is_uneven = problem.head_dim > LARGEST_OWN >= problem.value_head_dim
    fits = blocks is None or blocks.kv_size % (ROWS * GRAD_CONSUMERS) == 0
    return is_narrow and is_uneven and fits and not problem.mods.has_score_mod


def _stashes_scores(problem: Problem, tile: HopperGradTile) -> bool:
    """Whether scores are stashed in shared memory until their gradients are computed.

    At 128 columns, threads have no registers left for them. They go to the buffer where a consumer
    stages its part of the gradient of query, which has the same size.
    """
    return (
        problem.mods.has_score_mod
        and problem.grad.grad_reads_score
        and not _keeps_functions(problem)
        and width(problem) == LARGEST_OWN
        and not tile.shares_keys
    )


def _keeps_functions(problem: Problem) -> bool:
    """Whether functions of a score stay in registers until gradients need them.

    Computed again, they cost more than a shortage of registers. Gradients of captured tensors that
    need other numbers than that of the score make the shortage far larger.
    """
    needs_more = problem.has_captured_grads and not problem.grad.captured_follow_score
    return problem.grad.grad_has_functions and not needs_more


def _rematerializes_positions(problem: Problem, tile: HopperGradTile) -> bool:
    """Whether what score_mod made of positions is recomputed for the gradients of scores.

    With 128 columns of all operands, threads have no registers to keep it, unless consumers share
    keys.
    """
    is_short = problem.has_captured_grads and width(problem) == LARGEST_OWN
    is_short = is_short and not tile.shares_keys
    return _stashes_scores(problem, tile) or (is_short and not _keeps_functions(problem))


def _lacks_registers(problem: Problem) -> bool:
    """Whether sums over pairs at one distance need registers in addition to scores.

    At 128 columns the consumers then share the keys, and each has half of the columns.
    """
    keeps = problem.grad.has_score_grad and "distance" in problem.grad.captured_reads
    return keeps and width(problem) == LARGEST_OWN


def width(problem: Problem) -> int:
    """Width of the tiles of all operands: 64, 128 or 256 columns."""
    return forward.wider(problem)


def shared_memory(problem: Problem, tile: HopperGradTile) -> int:
    """Upper bound of the shared memory per program, in bytes."""
    columns = LARGEST_OWN if tile.rest_width else width(problem)
    queries = tile.block_m * (tile.num_slots + tile.num_do_slots)
    rows = columns * (queries + 2 * tile.block_n)
    rows += tile.rest_width * (tile.block_m * tile.num_slots + tile.block_n)
    scores = tile.num_ds * tile.block_m * tile.block_n
    sums = GRAD_CONSUMERS * ROWS * (_sum_columns(columns, tile) + tile.rest_width // 2) * 4
    statistics = tile.block_m * (tile.num_slots + tile.num_do_slots) * 4
    statistics += tile.block_m * tile.num_slots * 4 * problem.has_large_lse
    return (rows + scores) * problem.itemsize + sums + statistics + _SLACK


def _sum_columns(columns: int, tile: HopperGradTile) -> int:
    """Columns of the gradient of query that one consumer adds at a time, for 64 rows."""
    if tile.shares_keys:
        return columns // (2 * GRAD_CONSUMERS)  # two stripes, one after the other
    return columns * tile.block_m // (ROWS * GRAD_CONSUMERS)


def constants(problem: Problem, tile: HopperGradTile) -> HopperBackwardConstants:
    """Constants of the kernel."""
    columns = LARGEST_OWN if tile.rest_width else width(problem)
    # As in the portable kernels: without a mod in between, the scale is folded into the exponent.
    scales = problem.mods.has_score_mod or problem.scale <= 0
    q_size = block_sizes(problem, tile)[0]
    return HopperBackwardConstants(
        **shared(
            problem, tile, bits.of_keys(problem), multiples=(q_size, tile.block_n),
            scales=scales,
        ),
        NUM_DO_SLOTS=tile.num_do_slots,
        NUM_DS=tile.num_ds,
        SHARES_KEYS=tile.shares_keys,
        SCORE_COLUMNS=tile.score_columns,
        REST_WIDTH=tile.rest_width,
        WIDTH=columns,
        DQ_COLUMNS=_sum_columns(columns, tile),
        SPARSE_Q_BLOCK_SIZE=q_size,
        KV_HEADS=problem.kv_heads,
        HEADS_PER_SECTION=heads_per_section(problem),
        IS_DETERMINISTIC=problem.is_deterministic,
        ONE_LOOP=gradients_share_loop(problem, bits.of_keys(problem)),
        HAS_ADDERS=_has_adders(problem, tile),
        OWNS_HEADS=owns_heads(problem),
        STAGES_PIECES=_stages_pieces(problem, tile),
        HAS_SCORE_GRAD=problem.mods.has_score_mod and problem.grad.has_score_grad,
        STASH_SCORES=_stashes_scores(problem, tile),
        REMATERIALIZE_POSITIONS=_rematerializes_positions(problem, tile),
        KEEPS_READS=not _stashes_scores(problem, tile),
        HAS_LARGE_SCORES=problem.has_large_lse,
    )  # fmt: skip


def _stages_pieces(problem: Problem, tile: HopperGradTile) -> bool:
    """Whether gradients of keys and values leave through other memory than theirs.

    Sums for captured tensors leave no registers for it: it took two more spills in a step.
    """
    return not (tile.shares_keys or tile.rest_width or problem.has_captured_grads)


def _has_adders(problem: Problem, tile: HopperGradTile) -> bool:
    """Whether separate adder warps add to the gradient of query.

    Consumers that share keys add one stripe after the other, so an adder would make them wait
    longer. Consumers short of registers have none to give to adders.
    """
    has_registers = not problem.has_captured_grads and not _stashes_scores(problem, tile)
    return problem.is_deterministic or (has_registers and not tile.shares_keys)
