"""What a rule about tiles is, and the kinds of calls that rules are about."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from flexhop.lowering.portable import splits
from flexhop.lowering.portable.names import Kernel
from flexhop.lowering.problem import Problem
from flexhop.options import Tile

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
