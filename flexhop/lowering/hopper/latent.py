"""The Hopper kernel of latent attention: what it supports, its tile and its constants.

Pure functions of Problem. The kernel is in templates/hopper/latent/; docs/lab/latent.md gives the
reasons for the numbers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from flexhop.compat.kernels import gluon_versions
from flexhop.lowering.hopper.constants import ELEMENTS
from flexhop.lowering.portable import kernels, splits
from flexhop.lowering.problem import Problem
from flexhop.options import KernelOptions, Tile

# Queries and keys of a tile: what 227 KiB of shared memory hold of 576 columns.
_ROWS, _KEYS, _SLOTS = 64, 64, 2
# Columns of the pieces of a key. Values are the first one, or less of it.
_FIRST, _REST = 512, 64
# Below this many rows a program computes mostly padding, and the portable kernel has less of it.
_FEWEST_ROWS = 16
# Registers per thread of the second consumer. The first gets the most that there are, 255.
_REGISTERS = 224
# Barriers, factors of rows, and what the roles pass to each other.
_SLACK = 3072
# For the choice of splits: a program fills a multiprocessor, as one of eight warps does.
_TILE = Tile(_ROWS, _KEYS, 8, _SLOTS)


@dataclasses.dataclass(frozen=True, slots=True)
class LatentTile:
    """What one program holds."""

    block_m: int = _ROWS
    block_n: int = _KEYS
    num_slots: int = _SLOTS

    def words(self) -> str:
        """For reports."""
        return (
            f"{self.block_m} rows x {self.block_n} keys, 9 warps (1 loads), {self.num_slots} slots"
        )


@dataclasses.dataclass(frozen=True, slots=True)
class LatentConstants:
    """Constants of hopper/latent/kernel.py.jinja; names as in templates/README.md."""

    BLOCK_M: int
    BLOCK_N: int
    NUM_SLOTS: int
    REGISTERS: int
    ELEMENT: str
    HALF: int
    QK_REST: int
    VALUE_IS_KEY: bool
    WAITS_FOR_SCORES: bool
    SPARSE_Q_BLOCK_SIZE: int
    SPARSE_KV_BLOCK_SIZE: int
    TILES_PER_KV_BLOCK: int
    HAS_BLOCKS: bool
    HAS_RANGES: bool
    HAS_FULL_BLOCKS: bool
    HAS_PARTIAL_BLOCKS: bool
    CHECK_Q: bool
    CHECK_KV: bool
    QK_HEAD_DIM: int
    V_HEAD_DIM: int
    Q_HEADS: int
    GQA_GROUP: int
    PACKED_HEADS: int
    KV_BATCH_SHARED: bool
    HAS_SCORE_MOD: bool
    SCALE_SCORES: bool
    SM_SCALE: float
    EXP_SCALE: float
    WEIGHING: str
    SPLITS: int
    RETURN_MAX: bool
    PAGE_SIZE: int
    LN_2: float


def obstacles(problem: Problem, options: KernelOptions) -> Iterator[str]:
    """Why the kernel does not support a call with wide heads, most general reason first."""
    if problem.dtype not in ELEMENTS:
        yield f"it supports bfloat16 and float16, not {problem.dtype}"
    if (
        not _FIRST < problem.head_dim <= _FIRST + _REST
        or not _FIRST // 2 < problem.value_head_dim <= _FIRST
    ):
        yield (
            f"of heads above 256 columns it supports {_FIRST + 1} to {_FIRST + _REST} with values "
            f"of {_FIRST // 2 + 1} to {_FIRST}, not {problem.head_dim} and "
            f"{problem.value_head_dim}"
        )
    yield from _cache_obstacles(problem)
    if problem.bulk_obstacle:
        yield problem.bulk_obstacle
    if problem.dropout_p > 0.0:
        yield "it does not support dropout"
    blocks = problem.blocks
    if blocks is not None and blocks.kv_size % _KEYS:
        yield f"its tiles of {_KEYS} keys do not divide the mask's blocks of {blocks.kv_size} keys"
    if options.decode is not None:
        yield "kernel_options set a tile of the portable kernel"
    if options.prescale_qk:
        yield "it does not support prescale_qk"
    yield from filter(None, [gluon_versions.obstacle()])


def _cache_obstacles(problem: Problem) -> Iterator[str]:
    """Why the kernel cannot read keys from a cache; empty if there is none."""
    cache = problem.cache
    if cache is None:
        return
    if cache.changes or (cache.key_dtype, cache.value_dtype) != (problem.dtype, problem.dtype):
        yield f"it reads keys unchanged, but these are converted from {cache.key_dtype}"
    if cache.page_size % _KEYS:
        yield f"it reads pages of multiples of {_KEYS} keys, not of {cache.page_size}"


def slower(problem: Problem, options: KernelOptions) -> Iterator[str]:
    """Why the portable kernel is probably faster."""
    del options
    rows = splits.rows(problem)
    if rows < _FEWEST_ROWS:
        yield f"the portable kernel is faster for {rows} rows per key head"


def shared_memory(problem: Problem) -> int:
    """Upper bound of the shared memory per program, in bytes."""
    elements = (_ROWS + _SLOTS * _KEYS) * (_FIRST + _REST) + _ROWS * _KEYS
    return elements * problem.itemsize + _SLACK


def num_splits(problem: Problem, options: KernelOptions) -> int:
    """Number of splits of the keys."""
    if options.short_queries == "forward":
        return 1
    return splits.choose_splits(problem, options, _TILE)


def programs(problem: Problem, options: KernelOptions) -> int:
    """Programs of the grid."""
    heads = problem.batch * problem.query_heads // splits.packed_heads(problem)
    return splits.row_tiles(problem, _ROWS) * heads * num_splits(problem, options)


def constants(problem: Problem, options: KernelOptions) -> LatentConstants:
    """Constants of the kernel: those of decode that it shares, and its own."""
    decode = dataclasses.asdict(kernels.decode_constants(problem, options, _TILE))
    own: dict[str, Any] = {
        "NUM_SLOTS": _SLOTS,
        "REGISTERS": _REGISTERS,
        "ELEMENT": ELEMENTS[problem.dtype],
        "CHECK_Q": True,  # rows of a tile may be none
        "HALF": _FIRST // 2,
        "QK_REST": _REST,
        "VALUE_IS_KEY": problem.value_is_key,
        "WAITS_FOR_SCORES": splits.row_tiles(problem, _ROWS) > 1,
        "SPLITS": num_splits(problem, options),
        "WEIGHING": repr(decode["WEIGHING"]),
        "PAGE_SIZE": problem.cache.page_size if problem.cache is not None else 0,
    }
    names = [field.name for field in dataclasses.fields(LatentConstants)]
    return LatentConstants(**{name: {**decode, **own}[name] for name in names})
