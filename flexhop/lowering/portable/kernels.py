"""Which tile a problem gets, and the constants of each kernel: pure functions of Problem."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import torch

from flexhop.errors import OptionConflictError, TileError, TileResourceError
from flexhop.lowering.portable import caches, splits
from flexhop.lowering.portable.constants import (
    DecodeCombineConstants,
    DecodeConstants,
    ForwardConstants,
    GradKeyValueConstants,
    GradQueryConstants,
    JvpForwardConstants,
    KeyConstants,
)
from flexhop.lowering.portable.memory import shared_memory
from flexhop.lowering.portable.tiles import Kernel, search_tiles, smaller_tiles, table_tile
from flexhop.lowering.problem import MaskBlocks, Problem, round_head_dim
from flexhop.options import KernelOptions, Tile

LOG2_E = math.log2(math.e)


def forward_constants(problem: Problem, options: KernelOptions, tile: Tile) -> ForwardConstants:
    """Constants of the forward kernel."""
    shared = _prescaled(_shared(problem, options, tile), options)
    return ForwardConstants(
        **shared,
        HEADS_PER_SECTION=heads_per_section(problem),
        PRESCALE_QK=options.prescale_qk,
        ROWS_GUARANTEED_SAFE=options.rows_guaranteed_safe,
        RETURN_MAX=problem.returns_max,
        LN_2=_ln_2(problem, options, shared),
    )


def jvp_forward_constants(
    problem: Problem, options: KernelOptions, tile: Tile
) -> JvpForwardConstants:
    """Constants of the kernel for the output and its tangent."""
    shared = _shared(problem, options, tile)
    return JvpForwardConstants(
        **shared,
        HEADS_PER_SECTION=heads_per_section(problem),
        HAS_Q_DOT="query" in problem.tangents,
        HAS_K_DOT="key" in problem.tangents,
        HAS_V_DOT="value" in problem.tangents,
        LN_2=_ln_2(problem, dataclasses.replace(options, prescale_qk=False), shared),
    )


def decode_constants(problem: Problem, options: KernelOptions, tile: Tile) -> DecodeConstants:
    """Constants of the kernel for short queries."""
    shared = _prescaled(_shared(problem, options, tile), options)
    del shared["TILES_PER_Q_BLOCK"], shared["CHECK_Q"]
    if problem.blocks is None:
        shared["SPARSE_Q_BLOCK_SIZE"] = splits.MAX_ROWS
    return DecodeConstants(
        **shared,
        SPLITS=num_splits(problem, options),
        PACKED_HEADS=splits.packed_heads(problem),
        PRESCALE_QK=options.prescale_qk,
        # A query that sees a key need not see one in every share.
        ROWS_GUARANTEED_SAFE=False,
        RETURN_MAX=problem.returns_max,
        LN_2=_ln_2(problem, options, shared),
    )


def num_splits(problem: Problem, options: KernelOptions) -> int:
    """Shares of the keys in the decode kernel."""
    default = _fit("decode", problem, table_tile("decode", problem))
    return splits.choose_splits(problem, options, default)


def combine_constants(problem: Problem, options: KernelOptions) -> DecodeCombineConstants:
    """Constants of the kernel that combines the shares."""
    count = num_splits(problem, options)
    rounded, width = 1 << (count - 1).bit_length(), round_head_dim(problem.value_head_dim)
    return DecodeCombineConstants(
        SPLITS=count,
        SPLITS_ROUNDED=rounded,
        SPLITS_PER_STEP=min(rounded, max(1, _COMBINED_ELEMENTS // width)),
        Q_HEADS=problem.query_heads,
        V_HEAD_DIM=problem.value_head_dim,
        V_HEAD_DIM_ROUNDED=width,
        RETURN_MAX=problem.returns_max,
        OFFSET_DTYPE="tl.int64" if problem.large_output else "tl.int32",
        LN_2=_ln_2(problem, options, _prescaled(_exponent(problem), options)),
    )


# Elements that a program of decode_combine loads at a time: 32 registers of each of its threads.
_COMBINED_ELEMENTS = 4096


def _ln_2(problem: Problem, options: KernelOptions, shared: dict[str, Any]) -> float:
    """Nats per unit of the exponent: log 2, as EXP_SCALE implies it, which is fp32 in a kernel."""
    # Is the scale part of the score?
    inside = shared["SCALE_SCORES"] or options.prescale_qk
    return (1.0 if inside else problem.scale) / ctypes.c_float(shared["EXP_SCALE"]).value


def _prescaled(shared: dict[str, Any], options: KernelOptions) -> dict[str, Any]:
    """The constants of a kernel that scales its queries first, if the user wants that."""
    if options.prescale_qk:
        shared |= {"SCALE_SCORES": False, "EXP_SCALE": LOG2_E}
    return shared


def grad_query_constants(
    problem: Problem, options: KernelOptions, tile: Tile
) -> GradQueryConstants:
    """Constants of the kernel for the gradient of query."""
    shared = _shared(problem, options, tile)
    # Rows that do not exist have weight 0 by their lse, unless a mod makes a NaN of their score.
    check = shared["CHECK_KV"] or (shared["CHECK_Q"] and problem.mods.has_score_mod)
    return GradQueryConstants(
        **shared,
        HEADS_PER_SECTION=heads_per_section(problem),
        HAS_SCORE_GRAD=problem.mods.has_score_mod and problem.grad.has_score_grad,
        CHECK_RANGE=check,
        HAS_CAPTURED_GRADS=problem.has_captured_grads,
        SUBTRACT_FIRST=_is_float32(problem),
        LSE_SCALE=1.0 if _is_float32(problem) else LOG2_E,
    )


def grad_key_value_constants(
    kernel: Kernel, problem: Problem, options: KernelOptions, tile: Tile
) -> GradKeyValueConstants:
    """Constants of the kernel for the gradients of key, of value, or of both."""
    shared = _shared(problem, options, tile)
    width = problem.value_head_dim if kernel == "grad_value" else problem.head_dim
    return GradKeyValueConstants(
        **shared,
        HAS_SCORE_GRAD=problem.mods.has_score_mod and problem.grad.has_score_grad,
        KV_HEADS=problem.kv_heads,
        WRITES_KEY=kernel != "grad_value",
        WRITES_VALUE=kernel != "grad_key",
        OUT_HEAD_DIM=width,
        OUT_HEAD_DIM_ROUNDED=round_head_dim(width),
        CHECK_RANGE=shared["CHECK_Q"] and problem.mods.has_score_mod,
        SUBTRACT_FIRST=_is_float32(problem),
        LSE_SCALE=1.0 if _is_float32(problem) else LOG2_E,
    )


_CONSTANTS: dict[str, Callable[..., KeyConstants]] = {
    "forward": forward_constants,
    "decode": decode_constants,
    "jvp_forward": jvp_forward_constants,
    "grad_query": grad_query_constants,
    "grad_key_value": functools.partial(grad_key_value_constants, "grad_key_value"),
    "grad_key": functools.partial(grad_key_value_constants, "grad_key"),
    "grad_value": functools.partial(grad_key_value_constants, "grad_value"),
}


def forward_kernel(problem: Problem, options: KernelOptions) -> Kernel:
    """Which kernel computes the output: "forward", or "decode" for short queries.

    Raises:
        OptionConflictError: decode is asked for where there are too many rows.
    """
    if options.short_queries == "decode" and not splits.is_short(problem.query_len, problem.group):
        raise OptionConflictError(
            first="short_queries='decode'",
            second=f"{problem.query_len} queries of {problem.group} heads per key head",
            reason=f"the decode kernel supports at most {splits.MAX_ROWS} of their product",
        )
    if options.short_queries != "auto":
        return options.short_queries
    return "decode" if splits.suits(problem) and has_tile("decode", problem) else "forward"


def key_value_kernels(problem: Problem) -> tuple[Kernel, ...]:
    """One kernel for the gradients of key and value, or one for each.

    At 256 columns two fp32 accumulators of 128 keys are all of a multiprocessor's registers. Two
    kernels compute five products instead of four, but on tiles of 128 keys.
    """
    if max(problem.head_dim, problem.value_head_dim) > 128 and problem.itemsize == 2:
        return ("grad_key", "grad_value")
    return ("grad_key_value",)


def constants(
    kernel: Kernel, problem: Problem, options: KernelOptions, tile: Tile
) -> dict[str, Any]:
    """Constants of a kernel as the template wants them: Triton source text by name."""
    values = dataclasses.asdict(_CONSTANTS[kernel](problem, options, tile))
    if problem.cache is not None:
        decodes = kernel == "decode"
        values |= dataclasses.asdict(
            caches.constants(problem, problem.cache, tile, decodes=decodes)
        )
    return {name: _as_source(name, value) for name, value in values.items()}


def _as_source(name: str, value: Any) -> Any:
    # Template constants are pasted as source: a string must bring its quotes, a dtype must not.
    return repr(value) if name == "FLOAT32_PRECISION" else value


def _exponent(problem: Problem) -> dict[str, Any]:
    """How scores become exponents of 2.

    exp2(score * EXP_SCALE) folds the scale into the exponent where nothing looks at the score
    between; the running maximum then needs a positive factor.
    """
    scale_scores = problem.mods.has_score_mod or problem.scale <= 0 or _is_float32(problem)
    return {
        "SCALE_SCORES": scale_scores,
        "EXP_SCALE": LOG2_E if scale_scores else problem.scale * LOG2_E,
    }


def _shared(problem: Problem, options: KernelOptions, tile: Tile) -> dict[str, Any]:
    blocks = problem.blocks or MaskBlocks(tile.block_m, tile.block_n, has_full=False)
    return {
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "SPARSE_Q_BLOCK_SIZE": blocks.q_size,
        "SPARSE_KV_BLOCK_SIZE": blocks.kv_size,
        "TILES_PER_Q_BLOCK": _cdiv(blocks.q_size, tile.block_m),
        "TILES_PER_KV_BLOCK": _cdiv(blocks.kv_size, tile.block_n),
        "HAS_BLOCKS": problem.blocks is not None,
        "HAS_RANGES": blocks.has_ranges,
        "HAS_FULL_BLOCKS": blocks.has_full,
        "HAS_PARTIAL_BLOCKS": problem.blocks is not None and problem.mods.has_mask_mod,
        "CHECK_Q": not _is_aligned(blocks.q_size, tile.block_m, problem.is_query_multiple),
        "CHECK_KV": not _is_aligned(blocks.kv_size, tile.block_n, problem.is_key_multiple),
        "QK_HEAD_DIM": problem.head_dim,
        "QK_HEAD_DIM_ROUNDED": round_head_dim(problem.head_dim),
        "V_HEAD_DIM": problem.value_head_dim,
        "V_HEAD_DIM_ROUNDED": round_head_dim(problem.value_head_dim),
        "Q_HEADS": problem.query_heads,
        "GQA_GROUP": problem.group,
        "KV_BATCH_SHARED": problem.kv_batch_shared,
        "HAS_SCORE_MOD": problem.mods.has_score_mod,
        "ISOLATE_SCORE_MOD": problem.mods.has_score_mod and problem.mods.reads_per_element,
        **_exponent(problem),
        "SM_SCALE": problem.scale,
        "FLOAT32_PRECISION": _float32_precision(options),
        "OFFSET_DTYPE": "tl.int64" if problem.large_output else "tl.int32",
    }


def _is_float32(problem: Problem) -> bool:
    return problem.itemsize > 2


def _cdiv(a: int, b: int) -> int:
    return -(-a // b)


def _is_aligned(block: int, tile: int, is_multiple: Any) -> bool:
    """Whether every row of every tile exists: tiles divide blocks, blocks divide the length."""
    return block % tile == 0 and is_multiple(block)


def _float32_precision(options: KernelOptions) -> str:
    if options.float32_precision is not None:
        return options.float32_precision
    return "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32"


def heads_per_section(problem: Problem) -> int:
    """Query heads whose keys and values fill half of the L2 cache together.

    16 of packed sequences: their tiles are unequal, and few last heads leave programs idle.
    """
    per_head = problem.key_len * (problem.head_dim + problem.value_head_dim) * problem.itemsize
    kv_heads = max(1, problem.device.l2_bytes // 2 // max(1, per_head))
    heads = max(kv_heads * problem.group, 16 if problem.is_packed else 0)
    return min(heads, max(1, problem.batch * problem.query_heads))


_KEY_VALUE = ("grad_key_value", "grad_key", "grad_value")


def choose_tiles(
    kernel: Kernel, problem: Problem, options: KernelOptions, *, search: bool
) -> list[Tile]:
    """Tiles that fit the device and the mask, best guess first; never empty.

    Raises:
        TileError: the user's tile does not divide the blocks of the mask.
        TileResourceError: the user's tile does not fit the device.
    """
    default = _fit(kernel, problem, table_tile(kernel, problem))
    wanted = getattr(options, "grad_key_value" if kernel in _KEY_VALUE else kernel)
    if wanted is not None:
        tile = wanted.fill(default)
        _check_user_tile(kernel, problem, tile)
        return [tile]
    found = [default]
    for tile in search_tiles(kernel) if search else ():
        fitted = _fit(kernel, problem, tile)
        if fitted not in found:
            found.append(fitted)
    return found


def all_tiles(kernel: Kernel, problem: Problem, options: KernelOptions) -> list[Tile]:
    """As choose_tiles, then all smaller ones: for calls whose kernel does not compile."""
    found = choose_tiles(kernel, problem, options, search=False)
    for tile in smaller_tiles(table_tile(kernel, problem)):
        fitted = _fit(kernel, problem, tile)
        if fitted not in found:
            found.append(fitted)
    return found


def has_tile(kernel: Kernel, problem: Problem) -> bool:
    """Whether the smallest tile fits the device; otherwise the call is computed in chunks."""
    tile = _fit(kernel, problem, table_tile(kernel, problem))
    return shared_memory(kernel, problem, tile) <= problem.device.shared_memory


def _fit(kernel: Kernel, problem: Problem, tile: Tile) -> Tile:
    """The largest step of the ladder down from `tile` that fits."""
    tile = _within_blocks(kernel, problem, tile)
    smaller = tile
    for smaller in smaller_tiles(tile):
        if shared_memory(kernel, problem, smaller) <= problem.device.shared_memory:
            return smaller
    return smaller


def _within_blocks(kernel: Kernel, problem: Problem, tile: Tile) -> Tile:
    """Shrink a tile to divide the blocks of the mask and not to exceed the lengths."""
    rows, columns = tile.block_m, tile.block_n
    if kernel == "decode":
        rows = min(rows, round_head_dim(splits.rows(problem)))
    elif problem.blocks is not None:
        rows = _divisor(rows, problem.blocks.q_size)
    if problem.blocks is not None:
        columns = _divisor(columns, problem.blocks.kv_size)
    if problem.cache is not None and caches.wants_one_page(problem.cache):
        columns = _divisor(columns, problem.cache.page_size)
    if kernel != "decode":
        rows = min(rows, round_head_dim(problem.query_len))
    if not (kernel == "decode" and problem.key_len_varies):
        columns = min(columns, round_head_dim(problem.key_len))
    if (rows, columns) == (tile.block_m, tile.block_n):
        return tile
    warps = min(tile.num_warps, 4) if rows * columns <= 64 * 64 else tile.num_warps
    return Tile(rows, columns, warps, tile.num_stages)


def tiles_keep_groups(problem: Problem) -> bool:
    """Whether all tiles begin at multiples of 16 queries and keys: groups of ops/dropout.py."""
    blocks = problem.blocks
    return blocks is None or (blocks.q_size % 16 == 0 and blocks.kv_size % 16 == 0)


def divides(kernel: Kernel, blocks: MaskBlocks, tile: Tile) -> bool:
    """Whether tiles divide the mask's blocks; the rows of decode are of several heads."""
    return blocks.kv_size % tile.block_n == 0 and (
        kernel == "decode" or blocks.q_size % tile.block_m == 0
    )


def _divisor(tile: int, block: int) -> int:
    """Largest power of two from 16 to `tile` that divides the block; 16 if none does."""
    while tile > 16 and block % tile != 0:
        tile //= 2
    return tile


def _check_user_tile(kernel: Kernel, problem: Problem, tile: Tile) -> None:
    blocks = problem.blocks
    if blocks is not None and not divides(kernel, blocks, tile):
        raise TileError(
            kernel=kernel, block_m=tile.block_m, block_n=tile.block_n,
            q_block=blocks.q_size, kv_block=blocks.kv_size,
        )  # fmt: skip
    needed = shared_memory(kernel, problem, tile)
    if needed > problem.device.shared_memory:
        raise TileResourceError(
            kernel=kernel, tile=tile, needed=needed,
            available=problem.device.shared_memory, device=problem.device.name,
        )  # fmt: skip
