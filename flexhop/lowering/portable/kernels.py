"""Which tile a problem gets, and the constants of each kernel: pure functions of Problem."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import math
from collections.abc import Callable, Iterable
from typing import Any

from flexhop.errors import OptionConflictError, TileError, TileResourceError
from flexhop.lowering.portable import caches, splits
from flexhop.lowering.portable.constants import (
    DecodeCombineConstants,
    DecodeConstants,
    ForwardConstants,
    GradKeyValueConstants,
    GradQueryConstants,
    JvpForwardConstants,
    JvpGradKeyValueConstants,
    JvpGradQueryConstants,
    KeyConstants,
    WideGradKeyValueConstants,
)
from flexhop.lowering.portable.memory import shared_memory
from flexhop.lowering.portable.rules import Kernel, adders
from flexhop.lowering.portable.shared import (
    LOG2_E,
    begins_with_delta,
    branches_for_mask,
    exponent,
    has_mask_loop,
    heads_per_section,
    is_float32,
    isolates_mask_mod,
    isolates_pairs,
    isolates_push,
    keeps_products,
    prescaled,
    weighing,
)
from flexhop.lowering.portable.shared import shared as shared_constants
from flexhop.lowering.portable.special_tiles import search_tiles
from flexhop.lowering.portable.tiles import smaller_tiles, table_tile
from flexhop.lowering.problem import MaskBlocks, Problem, round_head_dim
from flexhop.options import KernelOptions, Tile


def forward_constants(problem: Problem, options: KernelOptions, tile: Tile) -> ForwardConstants:
    """Constants of the forward kernel."""
    shared = prescaled(problem, options, shared_constants(problem, options, tile))
    return ForwardConstants(
        **shared,
        HEADS_PER_SECTION=heads_per_section(problem),
        KEEP_PRODUCTS=keeps_products(problem),
        MASK_LOOP=has_mask_loop("forward", problem),
        ROWS_GUARANTEED_SAFE=options.rows_guaranteed_safe,
        RETURN_MAX=problem.returns_max,
        LN_2=_ln_2(problem, shared),
    )


def jvp_forward_constants(
    problem: Problem, options: KernelOptions, tile: Tile
) -> JvpForwardConstants:
    """Constants of the kernel for the output and its tangent."""
    shared = shared_constants(problem, options, tile)
    return JvpForwardConstants(
        **shared,
        HEADS_PER_SECTION=heads_per_section(problem),
        ISOLATE_PUSH=isolates_push(problem, options),
        **_tangents(problem),
        # In fp32, 256 columns take every register, and little is rounded.
        HAS_CENTER=not (is_float32(problem) and shared["V_HEAD_DIM_ROUNDED"] == 256),
        LN_2=_ln_2(problem, shared),
    )


def decode_constants(problem: Problem, options: KernelOptions, tile: Tile) -> DecodeConstants:
    """Constants of the kernel for short queries."""
    shared = prescaled(problem, options, shared_constants(problem, options, tile))
    del shared["TILES_PER_Q_BLOCK"], shared["CHECK_Q"], shared["BATCH_INNER"]
    if problem.blocks is None:
        shared["SPARSE_Q_BLOCK_SIZE"] = splits.MAX_ROWS
    # Even without a mask_mod, a block is visible to some heads only.
    shared["HAS_PARTIAL_BLOCKS"] |= splits.merges_lists(problem)
    return DecodeConstants(
        **shared,
        SPLITS=num_splits(problem, options),
        PACKED_HEADS=splits.packed_heads(problem),
        KEEP_PRODUCTS=False,  # a few queries wait for memory
        ISOLATE_MASK_MOD=isolates_mask_mod(problem),
        HAS_MERGED_LISTS=splits.merges_lists(problem),
        # A query that sees a key need not see one in every split.
        ROWS_GUARANTEED_SAFE=False,
        RETURN_MAX=problem.returns_max,
        LN_2=_ln_2(problem, shared),
    )


def num_splits(problem: Problem, options: KernelOptions) -> int:
    """Number of splits of the keys in the decode kernel."""
    if problem.is_wide and options.short_queries == "forward":
        return 1
    # Not the user's tile or a search's: the number of splits must not depend on them.
    default = _fit("decode", problem, table_tile("decode", problem))
    return splits.choose_splits(problem, options, default)


def combine_constants(
    problem: Problem, options: KernelOptions, count: int
) -> DecodeCombineConstants:
    """Constants of the kernel that combines `count` splits."""
    rounded, width = 1 << (count - 1).bit_length(), round_head_dim(problem.value_head_dim)
    exponents = prescaled(problem, options, exponent(problem))
    return DecodeCombineConstants(
        SPLITS=count,
        SPLITS_ROUNDED=rounded,
        SPLITS_PER_STEP=min(rounded, max(1, _COMBINED_ELEMENTS // width)),
        Q_HEADS=problem.query_heads,
        V_HEAD_DIM=problem.value_head_dim,
        V_HEAD_DIM_ROUNDED=width,
        RETURN_MAX=problem.returns_max,
        OFFSET_DTYPE="tl.int64" if problem.large_output else "tl.int32",
        LN_2=_ln_2(problem, exponents),
        EXP_SCALE=exponents["EXP_SCALE"],
        WEIGHING=repr(exponents["WEIGHING"]),
    )


# Elements that a decode_combine program loads at a time: 32 registers per thread.
_COMBINED_ELEMENTS = 4096


def _ln_2(problem: Problem, shared: dict[str, Any]) -> float:
    """Nats per unit of the exponent: log 2, as implied by EXP_SCALE, which is fp32 in a kernel."""
    if problem.mods.takes_products:
        return math.log(2)
    # Is the scale part of the score?
    inside = shared["SCALE_SCORES"] or shared.get("PRESCALE_QK", False)
    return (1.0 if inside else problem.scale) / ctypes.c_float(shared["EXP_SCALE"]).value


def grad_query_constants(
    problem: Problem, options: KernelOptions, tile: Tile
) -> GradQueryConstants:
    """Constants of the kernel for the gradient of query."""
    shared = prescaled(problem, options, shared_constants(problem, options, tile))
    # The lse of rows that do not exist makes weights 0, unless a mod turns their score into NaN.
    check = shared["CHECK_KV"] or (shared["CHECK_Q"] and problem.mods.has_score_mod)
    return GradQueryConstants(
        **shared,
        HEADS_PER_SECTION=heads_per_section(problem),
        HAS_SCORE_GRAD=problem.mods.has_score_mod and problem.grad.has_score_grad,
        CHECK_RANGE=check,
        HAS_CAPTURED_GRADS="grad_query" in adders(problem, options),
        BRANCH_FOR_MASK=branches_for_mask(problem, options),
        MASK_LOOP=has_mask_loop("grad_query", problem),
        LSE_SCALE=LOG2_E if weighing(problem) == "fused" else 1.0,
    )


def grad_key_value_constants(
    kernel: Kernel, problem: Problem, options: KernelOptions, tile: Tile
) -> WideGradKeyValueConstants:
    """Constants of the kernel for the gradients of key, of value, or of both."""
    shared = prescaled(problem, options, shared_constants(problem, options, tile))
    width = problem.value_head_dim if kernel == "grad_value" else problem.head_dim
    kind = WideGradKeyValueConstants
    if not problem.is_wide:
        kind = GradKeyValueConstants
        shared["BEGIN_WITH_DELTA"] = begins_with_delta(problem, tile)
        shared["WRITES_QUERY"] = kernel == "gradients"
    # Keys that do not exist have rows of their own, which are not stored; but queries sum them.
    check = shared["CHECK_KV"] and kernel == "gradients"
    return kind(
        **shared,
        HAS_SCORE_GRAD=problem.mods.has_score_mod and problem.grad.has_score_grad,
        KV_HEADS=problem.kv_heads,
        WRITES_KEY=kernel != "grad_value",
        WRITES_VALUE=kernel != "grad_key",
        OUT_HEAD_DIM=width,
        OUT_HEAD_DIM_ROUNDED=round_head_dim(width),
        CHECK_RANGE=check or (shared["CHECK_Q"] and problem.mods.has_score_mod),
        HAS_CAPTURED_GRADS=kernel in adders(problem, options),
        BRANCH_FOR_MASK=True,
        ISOLATE_MASK_MOD=isolates_pairs(problem, options),
        LSE_SCALE=LOG2_E if weighing(problem) == "fused" else 1.0,
    )


def _tangents(problem: Problem) -> dict[str, Any]:
    names = {"HAS_Q_DOT": "query", "HAS_K_DOT": "key", "HAS_V_DOT": "value"}
    return {constant: operand in problem.tangents for constant, operand in names.items()}


def _gradient_tangents(problem: Problem) -> dict[str, Any]:
    slopes = problem.grad.has_score_grad or "captures" in problem.tangents
    return {
        **_tangents(problem),
        "HAS_DO_DOT": "out" in problem.tangents,
        "MOVES_SCORES": problem.mods.has_score_mod and slopes,
    }


def jvp_grad_query_constants(
    problem: Problem, options: KernelOptions, tile: Tile
) -> JvpGradQueryConstants:
    """Constants of the kernel for the tangent of the gradient of query."""
    values = dataclasses.asdict(grad_query_constants(problem, _not_prescaled(options), tile))
    del values["PRESCALE_QK"], values["MASK_LOOP"]
    values["HAS_CAPTURED_GRADS"] = problem.has_captured_grads
    return JvpGradQueryConstants(**values, **_gradient_tangents(problem))


def jvp_grad_key_value_constants(
    kernel: Kernel, problem: Problem, options: KernelOptions, tile: Tile
) -> JvpGradKeyValueConstants:
    """Constants of the kernel for the tangent of the gradient of key, or of value."""
    options = _not_prescaled(options)
    values = dataclasses.asdict(grad_key_value_constants(kernel, problem, options, tile))
    read = {field.name for field in dataclasses.fields(JvpGradKeyValueConstants)}
    values = {name: value for name, value in values.items() if name in read}
    values["BRANCH_FOR_MASK"] = branches_for_mask(problem, options)
    return JvpGradKeyValueConstants(**values, **_gradient_tangents(problem))


def _not_prescaled(options: KernelOptions) -> KernelOptions:
    """Second orders find the scores that forward mode found, whose products are not prescaled."""
    return dataclasses.replace(options, prescale_qk=False)


_CONSTANTS: dict[str, Callable[..., KeyConstants]] = {
    "forward": forward_constants,
    "decode": decode_constants,
    "jvp_forward": jvp_forward_constants,
    "grad_query": grad_query_constants,
    "gradients": functools.partial(grad_key_value_constants, "gradients"),
    "grad_key_value": functools.partial(grad_key_value_constants, "grad_key_value"),
    "grad_key": functools.partial(grad_key_value_constants, "grad_key"),
    "grad_value": functools.partial(grad_key_value_constants, "grad_value"),
    "jvp_grad_query": jvp_grad_query_constants,
    "jvp_grad_key": functools.partial(jvp_grad_key_value_constants, "grad_key"),
    "jvp_grad_value": functools.partial(jvp_grad_key_value_constants, "grad_value"),
}


def forward_kernel(problem: Problem, options: KernelOptions) -> Kernel:
    """Which kernel computes the output: "forward", or "decode" for short queries.

    The kernel for heads in pieces is always "decode", which takes any number of rows then.

    Raises:
        OptionConflictError: decode is requested with too many rows.
    """
    if problem.is_wide:
        return "decode"
    if options.short_queries == "decode" and not splits.is_short(problem.query_len, problem.group):
        raise OptionConflictError(
            first="short_queries='decode'",
            second=f"{problem.query_len} queries and {problem.group} heads per key head",
            reason=f"their product must be at most {splits.MAX_ROWS} in the decode kernel",
        )
    if options.short_queries != "auto":
        return options.short_queries
    return "decode" if splits.suits(problem) and has_tile("decode", problem) else "forward"


def constants(
    kernel: Kernel, problem: Problem, options: KernelOptions, tile: Tile
) -> dict[str, Any]:
    """Constants of a kernel in the template's form: Triton source text by name."""
    values = dataclasses.asdict(_CONSTANTS[kernel](problem, options, tile))
    if problem.is_wide:
        values = caches.in_pieces(kernel, problem, tile, values)
    if problem.cache is not None:
        decodes = kernel == "decode"
        values |= dataclasses.asdict(
            caches.constants(problem, problem.cache, tile, decodes=decodes)
        )
    # Constants are pasted as source: a string needs its quotes, a dtype must not have any.
    for name in {"FLOAT32_PRECISION", "WEIGHING"} & values.keys():
        values[name] = repr(values[name])
    return values


# Kernels that share one tile option.
_OPTIONS: dict[str, str] = {
    **dict.fromkeys(("gradients", "grad_key_value", "grad_key", "grad_value"), "grad_key_value"),
    **dict.fromkeys(("jvp_grad_query", "jvp_grad_key", "jvp_grad_value"), "jvp_gradients"),
}


def option_of(kernel: Kernel) -> str:
    """The field of KernelOptions with a kernel's tile."""
    return _OPTIONS.get(kernel, kernel)


def choose_tiles(
    kernel: Kernel, problem: Problem, options: KernelOptions, *, search: bool
) -> list[Tile]:
    """Tiles that fit the device and the mask, best guess first; never empty.

    Raises:
        TileError: the user's tile does not divide the blocks of the mask.
        TileResourceError: the user's tile does not fit the device.
    """
    default = _fit(kernel, problem, table_tile(kernel, problem))
    wanted = getattr(options, option_of(kernel))
    if wanted is not None:
        tile = wanted.fill(default)
        _check_user_tile(kernel, problem, tile)
        return [tile]
    found = [default]
    return found + _others(kernel, problem, search_tiles(kernel) if search else (), found)


def all_tiles(kernel: Kernel, problem: Problem, options: KernelOptions) -> list[Tile]:
    """Like choose_tiles, then all smaller ones, for calls whose kernel does not compile."""
    found = choose_tiles(kernel, problem, options, search=False)
    return found + _others(kernel, problem, smaller_tiles(table_tile(kernel, problem)), found)


def _others(
    kernel: Kernel, problem: Problem, tiles: Iterable[Tile], found: list[Tile]
) -> list[Tile]:
    """Those that fit, once each, without those in `found`."""
    fitted = dict.fromkeys(_fit(kernel, problem, tile) for tile in tiles)
    # Only the table's tile surely has all keys of a head.
    return [tile for tile in fitted if tile not in found and kernel != "gradients"]


def has_tile(kernel: Kernel, problem: Problem) -> bool:
    """Whether the smallest tile fits the device; otherwise the call is computed in chunks."""
    if problem.is_wide and kernel.startswith("jvp_"):
        return False
    tile = _fit(kernel, problem, table_tile(kernel, problem))
    return shared_memory(kernel, problem, tile) <= problem.device.shared_memory


def _fit(kernel: Kernel, problem: Problem, tile: Tile) -> Tile:
    """The largest tile, from `tile` downwards, that fits."""
    tile = _within_blocks(kernel, problem, tile)
    smaller = tile
    for smaller in smaller_tiles(tile):
        if shared_memory(kernel, problem, smaller) <= problem.device.shared_memory:
            return smaller
    return smaller


def _within_blocks(kernel: Kernel, problem: Problem, tile: Tile) -> Tile:
    """Shrink a tile until it divides the mask's blocks and does not exceed the lengths."""
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


def divides(kernel: Kernel, blocks: MaskBlocks, tile: Tile) -> bool:
    """Whether tiles divide the mask's blocks; decode's rows span several heads."""
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
