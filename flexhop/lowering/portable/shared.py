"""Values behind the constants of several kernels: pure functions of Problem."""

from __future__ import annotations

import math
from typing import Any, Literal

from flexhop.lowering.portable.rules import Kernel, is_wgmma
from flexhop.lowering.problem import (
    COPIED,
    MaskBlocks,
    Problem,
    float32_precision,
    round_head_dim,
)
from flexhop.options import KernelOptions, Tile

Weighing = Literal["fused", "rows", "scores"]
LOG2_E = math.log2(math.e)
_NARROW = 64  # columns
_FEWEST_IN_SECTION = 8  # key heads
_KEY_GROUP = 8  # 16 bytes of 16-bit numbers, and what row_bytes_ahead needs


def exponent(problem: Problem) -> dict[str, Any]:
    """How scores become exponents of 2.

    exp2(score * EXP_SCALE) folds the scale into the exponent if nothing reads the score in
    between; the running maximum then needs a positive factor.
    """
    scale_scores = problem.mods.takes_scores or problem.scale <= 0 or is_float32(problem)
    return {
        "SCALE_SCORES": scale_scores,
        "EXP_SCALE": exp_scale(problem, scales=scale_scores),
        "WEIGHING": weighing(problem),
    }


def weighing(problem: Problem) -> Weighing:
    """How exponents are computed without the rounding of large scores (weights.py.jinja)."""
    if is_float32(problem) or problem.mods.large_scores == "growth":
        return "scores"
    return "rows" if problem.mods.large_scores == "offset" else "fused"


def exp_scale(problem: Problem, *, scales: bool) -> float:
    """Factor from modified scores to exponents of 2; scales: whether mods see scaled scores."""
    if problem.mods.takes_products:
        return 1.0
    return LOG2_E if scales else problem.scale * LOG2_E


def prescaled(problem: Problem, options: KernelOptions, values: dict[str, Any]) -> dict[str, Any]:
    """These constants, for a kernel that scales its queries first if the user requests it.

    Backward must round its queries as forward does, or its weights do not sum to 1. In float32 the
    option would only change how scores are rounded.
    """
    if not options.prescale_qk or is_float32(problem):
        return values | {"PRESCALE_QK": False}
    return values | {"PRESCALE_QK": True, "SCALE_SCORES": False, "EXP_SCALE": LOG2_E}


def shared(problem: Problem, options: KernelOptions, tile: Tile) -> dict[str, Any]:
    """Constants of every kernel."""
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
        "KEY_GROUP": _KEY_GROUP if row_bytes_ahead(problem) else 1,
        "QK_HEAD_DIM": problem.head_dim,
        "QK_HEAD_DIM_ROUNDED": round_head_dim(problem.head_dim),
        "V_HEAD_DIM": problem.value_head_dim,
        "V_HEAD_DIM_ROUNDED": round_head_dim(problem.value_head_dim),
        "Q_HEADS": problem.query_heads,
        "GQA_GROUP": problem.group,
        "KV_BATCH_SHARED": problem.kv_batch_shared,
        "BATCH_INNER": is_batch_inner(problem),
        "HAS_SCORE_MOD": problem.mods.has_score_mod,
        "ISOLATE_SCORE_MOD": isolates_score_mod(problem),
        **exponent(problem),
        "SM_SCALE": problem.scale,
        "FLOAT32_PRECISION": float32_precision(options.float32_precision),
        "OFFSET_DTYPE": "tl.int64" if problem.large_output else "tl.int32",
    }


def is_batch_inner(problem: Problem) -> bool:
    """Whether programs go through the batches of a head, not through the heads of a batch.

    Batches that share a bias of pairs then read it, and add to its gradient, while it is in the L2
    cache. Otherwise it comes from memory for every batch if it is larger than half of the cache.
    (The gradients of query and of 16 heads of 4096 x 4096 pairs, two batches, took 1.85 instead of
    1.23 ms.)
    """
    entry = problem.mods.head_row_bytes
    if problem.has_captured_grads and entry:
        entry = max(entry, 4)  # sums are fp32
    size = entry * problem.query_heads * problem.query_len * problem.key_len
    return problem.batch > 1 and size > problem.device.l2_bytes // 2


def isolates_score_mod(problem: Problem) -> bool:
    """Whether score_mod is evaluated in a branch, which keeps what it reads in registers."""
    # Triton fails on a branch whose result does not depend on the products: the scores then have
    # the layout of the weights as an operand, and it cannot reduce rows in that. Forward keeps its
    # products (see below) and compiles; a table by distance takes it 1060 instructions, not 744.
    # Beside exact fp32 products it gives them the layout of an operand, which spills: a step with
    # a table by distance at 64 columns had 10,645 instructions on sm_80, and has 2,726. Dropout,
    # which Triton 3.6 computed wrongly beside such products once, was not compared.
    mods = problem.mods
    reads_apart = mods.reads_per_element and not row_bytes_ahead(problem)
    would_spill = is_exact(problem) and problem.dropout_p == 0.0
    return mods.has_score_mod and reads_apart and mods.reads_score and not would_spill


def keeps_products(problem: Problem) -> bool:
    """Whether forward computes the products of queries and keys although score_mod ignores them.

    Without them the weights are made in the layout of an operand, in which a thread has parts of
    every row: a step of 32 columns took 2,436 instructions on sm_90 instead of 403. Products that
    are multiply-adds cost more than that.
    """
    return problem.mods.ignores_score and not is_exact(problem)


def begins_with_delta(problem: Problem, tile: Tile) -> bool:
    """Whether the product of values and grad_out begins with -delta, which saves registers.

    A thread has the delta of 16 queries. With wgmma, the product then waits for them, so only if
    there are spills, as at 128 columns if scores may be large: 703 instead of 755 us, and 850
    instead of 795 at 64 columns. Without wgmma, 80 spills of a step of 64 columns end, and the
    larger tiles of more columns get some.
    """
    if problem.itemsize != 2 or problem.dropout_p > 0.0:
        return False
    if not is_wgmma(problem):
        return tile.num_warps <= 4
    width = max(map(round_head_dim, (problem.head_dim, problem.value_head_dim)))
    return width == 128 and weighing(problem) != "fused"


def isolates_push(problem: Problem, options: KernelOptions) -> bool:
    """Whether the tangent of score_mod is evaluated in the same branch.

    Without tangents of products it may depend on none, which Triton cannot compile there. Nor can
    it compile two results of a branch beside exact fp32 products of more than 128 columns: it
    moves one in front of what it is computed from. The branch is there for loads ahead, and the
    tiles of such products have none.
    """
    has_products = not {"query", "key"}.isdisjoint(problem.tangents)
    return isolates_score_mod(problem) and has_products and not _is_ieee(problem, options)


def _is_ieee(problem: Problem, options: KernelOptions) -> bool:
    return is_float32(problem) and float32_precision(options.float32_precision) == "ieee"


def row_bytes_ahead(problem: Problem) -> int:
    """Bytes per score that loops load ahead, in rows of keys, for score_mod.

    Triton copies them to shared memory like the keys, if it knows that neighbours stay together.
    Sequences in pages have lengths of their own.
    """
    is_paged = problem.cache is not None and problem.cache.page_size > 0
    stays = not is_paged and problem.is_key_multiple(_KEY_GROUP)
    return problem.mods.row_bytes if stays else 0


def isolates_mask_mod(problem: Problem) -> bool:
    """Whether decode evaluates masks of keys in a branch, apart from the scores.

    Triton copies what it loads ahead in words of four bytes. It loads narrower numbers as they are
    used, in a layout that the scores then take, and computes their maxima and weights twice.
    """
    mods = problem.mods
    by_row = mods.mask_uses_head or (mods.mask_uses_query and problem.query_len > 1)
    is_narrow = max(mods.mask_key_bytes, default=4) < 4
    return is_narrow and not by_row and not is_float32(problem)


def branches_for_mask(problem: Problem, options: KernelOptions) -> bool:
    """Whether grad_query and second orders have the mask in a branch, for tiles of partial blocks.

    Triton computes fp32 products that are exact by multiply-adds. It then gives the branch the
    layout of an operand of the product that follows, and cannot compile reads per element in that.
    """
    return not (_is_ieee(problem, options) and problem.mods.mask_reads_per_element)


def has_mask_loop(kernel: Kernel, problem: Problem) -> bool:
    """Whether tiles of partial blocks have a loop of their own in forward and grad_query.

    It has no branch around the mask. Triton then copies what a mask reads at a pair ahead, to
    shared memory. In a branch it loads it as it is used, in a layout that the scores then take: a
    table of int64 at 32 columns took 2.8 times as long. For other masks two loops cost registers
    and the start of a second loop: up to a sixth.
    """
    mods, rows = problem.mods, problem.mods.mask_rows
    if not mods.has_mask_mod or problem.cache is not None or problem.is_wide:
        return False
    if is_float32(problem):
        # Products by multiply-adds give the branch the layout of an operand, which spills: a step
        # with a mask of words at 64 columns has 4,405 instructions on sm_90, 1,443 in a loop.
        return kernel == "forward" and is_exact(problem) and mods.mask_pair_bytes > 0
    is_copied = rows in ("keys", "short keys")
    if kernel == "forward":
        is_copied = rows in ("keys", "queries") or (is_copied and not _has_wide_heads(problem))
    return is_copied


def isolates_pairs(problem: Problem, options: KernelOptions) -> bool:
    """Whether grad_key_value has a branch around masks that read pairs, which is always taken.

    Without it, Triton copies what they read ahead. If neighbours do not read neighbours, each
    score copies a number of its own, and reads it again: 3.3 instead of 1.1 ms for a mask of 32
    keys in a word at 64 columns.
    """
    mods = problem.mods
    reads_apart = mods.mask_pair_bytes > 0 and mods.mask_rows is None
    if _has_wide_heads(problem):  # a branch costs registers: 1.60 and 1.75 ms for bits in bytes
        reads_apart = reads_apart and max(mods.mask_key_bytes, default=0) >= COPIED
    else:
        reads_apart = reads_apart or mods.mask_rows == "distances"
    return reads_apart and branches_for_mask(problem, options)


def _has_wide_heads(problem: Problem) -> bool:
    return max(problem.head_dim, problem.value_head_dim) > _NARROW


def is_float32(problem: Problem) -> bool:
    """Whether products are in fp32."""
    return problem.itemsize > 2


def is_exact(problem: Problem) -> bool:
    """Whether products are in fp32 and not rounded to TF32: multiply-adds."""
    return is_float32(problem) and not problem.is_tf32


def _cdiv(a: int, b: int) -> int:
    return -(-a // b)


def _is_aligned(block: int, tile: int, is_multiple: Any) -> bool:
    """Whether every row of every tile exists: tiles divide blocks, blocks divide the length."""
    return block % tile == 0 and is_multiple(block)


def heads_per_section(problem: Problem) -> int:
    """Query heads whose keys and values together fill an eighth of the L2 cache.

    Half of it is far from each multiprocessor, and queries and outputs pass through it, too. Keys
    of short sequences that filled half of it were read from memory again by each tile of queries.

    Some more if they fill less than half of it: tiles under a causal mask are unequal, and a small
    last section would leave programs idle. 16 for packed sequences, whose tiles differ more.
    """
    per_head = problem.key_len * (problem.head_dim + problem.value_head_dim) * problem.itemsize
    half = max(1, problem.device.l2_bytes // 2 // max(1, per_head))
    kv_heads = max(half // 4, min(half, _FEWEST_IN_SECTION))
    heads = max(kv_heads * problem.group, 16 if problem.is_packed else 0)
    return min(heads, max(1, problem.batch * problem.query_heads))
