"""The portable kernels by name, which of them compute and add gradients, and rules about tiles."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

from flexhop.lowering.portable import splits
from flexhop.lowering.problem import Problem
from flexhop.options import Tile

Kernel = Literal[
    "forward", "decode", "jvp_forward", "grad_query", "grad_key_value", "grad_key", "grad_value",
    "jvp_grad_query", "jvp_grad_key", "jvp_grad_value",
]  # fmt: skip
Tiles = dict[Kernel, dict[int, Tile]]  # by kernel and width of the wider head
FEW_COLUMNS = 32


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


def adders(problem: Problem) -> tuple[Kernel, ...]:
    """The kernels that add to gradients of captured tensors; see portable/backward.py."""
    reads = set(problem.grad.captured_reads)
    of_keys = key_value_kernels(problem)[:1] if "key" in reads and not problem.is_wide else ()
    others = reads if problem.is_wide else reads - {"key"}
    return (*(("grad_query",) if others else ()), *of_keys)
