"""The portable kernels by name, which of them compute and add gradients, and rules about tiles."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

from flexhop.lowering.portable import splits
from flexhop.lowering.problem import Problem
from flexhop.options import KernelOptions, Tile

Kernel = Literal[
    "forward", "decode", "jvp_forward",
    "gradients", "grad_query", "grad_key_value", "grad_key", "grad_value",
    "jvp_grad_query", "jvp_grad_key", "jvp_grad_value",
]  # fmt: skip
# Kernels whose programs own keys: their tiles are keys by queries.
OVER_KEYS: tuple[Kernel, ...] = (
    "gradients", "grad_key_value", "grad_key", "grad_value", "jvp_grad_key", "jvp_grad_value",
)  # fmt: skip
Tiles = dict[Kernel, dict[int, Tile]]  # by kernel and width of the wider head
FEW_COLUMNS = 32
SHORT_ROW = 16  # numbers of a row; tiles of mods with such rows are measured
_FEW_QUERIES = 256  # of all heads that share keys
_MANY_PROGRAMS = (1.5, 3.0)  # for a multiprocessor that runs one or two, or four, at a time


class Rule(NamedTuple):
    """Tiles for some calls.

    reason: what is special about the calls, for reports; empty for the usual ones. when: whether
    the rule applies to a call. tiles: by kernel and width; others are not covered. measured: on a
    GPU; otherwise chosen from machine code, to avoid spills.
    """

    reason: str
    when: Callable[[Problem], bool]
    tiles: Tiles
    measured: bool = True


def is_wgmma(problem: Problem) -> bool:
    """Whether matrix products are per warpgroup: sm_90 and sm_100."""
    return problem.device.capability[0] in (9, 10)


def is_sm90(problem: Problem) -> bool:
    """Whether the GPU is an sm_90."""
    return problem.device.capability[0] == 9


def is_sm100(problem: Problem) -> bool:
    """Whether the GPU is an sm_100."""
    return problem.device.capability[0] == 10


def is_mma_sync(problem: Problem) -> bool:
    """Whether matrix products are per warp: all other GPUs."""
    return not is_wgmma(problem)


def is_triton_3_9(problem: Problem) -> bool:
    """Whether the compiler is Triton 3.9 or newer."""
    return problem.device.triton >= (3, 9)


def has_few_rows(problem: Problem) -> bool:
    """Whether all rows of a key head fit the smallest tile."""
    return splits.rows(problem) <= 16


def has_few_columns(problem: Problem) -> bool:
    """Whether heads fill at most half of the columns that all tiles are made for."""
    return max(problem.head_dim, problem.value_head_dim) <= FEW_COLUMNS


def fits_blocks(problem: Problem, size: int) -> bool:
    """Whether no side of the mask's blocks is longer than `size`."""
    blocks = problem.blocks
    return blocks is not None and max(blocks.q_size, blocks.kv_size) <= size


def is_dense(problem: Problem) -> bool:
    """Whether only the products need registers; a cache's addresses would too."""
    return problem.blocks is None and not problem.mods.has_score_mod and problem.cache is None


def key_value_kernels(problem: Problem) -> tuple[Kernel, ...]:
    """One kernel for the gradients of key and value, or one for each.

    At 256 columns, two fp32 accumulators of 128 keys take all of a multiprocessor's registers. Two
    kernels compute five products instead of four, but on tiles of 128 keys.
    """
    is_large = max(problem.head_dim, problem.value_head_dim) > 128 and problem.itemsize == 2
    if is_large or problem.is_wide:
        return ("grad_key", "grad_value")
    return ("grad_key_value",)


def has_at_most(problem: Problem, keys: int) -> bool:
    """Whether a call is known to have at most so many keys."""
    return problem.key_len <= keys and not problem.key_len_varies


def has_few_keys(problem: Problem, options: KernelOptions) -> bool:
    """Whether one kernel computes all gradients, because a tile holds all keys of a head.

    It reads the operands once, and computes five products instead of seven. Its programs must be
    many, or each have few queries. What all keys of a query add to a captured tensor, the kernel
    for query sums in registers, and this one would not. With tiles of 128 keys it gains from what
    a mask or a score_mod computes once, and from nothing else (docs/lab/unusual.md).
    """
    blocks, columns = problem.blocks, max(problem.head_dim, problem.value_head_dim)
    tile = 64 if problem.key_len <= 64 or columns > 64 else 128
    is_one = has_at_most(problem, tile) and (blocks is None or blocks.kv_size % tile == 0)
    computes = blocks is not None or problem.mods.has_score_mod or problem.query_len > tile
    is_one = is_one and (tile == 64 or computes)
    is_usual = problem.itemsize == 2 and columns <= 128 and problem.cache is None
    is_usual = is_usual and problem.mods.longest_row <= SHORT_ROW
    programs = problem.kv_heads if problem.kv_batch_shared else problem.batch * problem.kv_heads
    many = _MANY_PROGRAMS[columns <= 64 and tile == 64]
    is_spread = programs >= many * problem.device.multiprocessors
    is_short = problem.query_len * problem.group <= _FEW_QUERIES and not problem.kv_batch_shared
    is_summed = problem.sums_exactly or "query" in problem.grad.captured_reads
    is_free = options.grad_query is None and options.grad_key_value is None
    fits = is_one and is_usual and (is_spread or is_short)
    return fits and is_sm90(problem) and is_free and not is_summed


def backward_kernels(problem: Problem, options: KernelOptions) -> tuple[Kernel, ...]:
    """The kernels of a backward pass."""
    if has_few_keys(problem, options):
        return ("gradients",)
    return ("grad_query", *key_value_kernels(problem))


def adders(problem: Problem, options: KernelOptions) -> tuple[Kernel, ...]:
    """The kernels that add to gradients of captured tensors; see portable/backward.py."""
    reads = set(problem.grad.captured_reads)
    if has_few_keys(problem, options):
        return ("gradients",) if reads else ()
    of_keys = key_value_kernels(problem)[:1] if "key" in reads and not problem.is_wide else ()
    others = reads if problem.is_wide else reads - {"key"}
    return (*(("grad_query",) if others else ()), *of_keys)
