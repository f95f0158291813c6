"""Upper bounds of a kernel's shared memory."""

from __future__ import annotations

import torch

from flexhop.lowering.portable import caches
from flexhop.lowering.portable.rules import Kernel
from flexhop.lowering.portable.shared import (
    has_mask_loop,
    is_exact,
    isolates_score_mod,
    row_bytes_ahead,
)
from flexhop.lowering.problem import Problem, head_pieces, round_head_dim
from flexhop.options import Tile


def shared_memory(kernel: Kernel, problem: Problem, tile: Tile) -> int:
    """Upper bound of the shared memory, in bytes, of a kernel with this tile.

    Loop operands are stored once per stage, other operands once. A result that feeds the next
    product passes through shared memory if its layout changes.
    """
    qk, v = _width(problem, problem.head_dim), _width(problem, problem.value_head_dim)
    item, both = problem.itemsize, qk + v
    slack = _SLACK
    if problem.device.capability[0] == 10:
        # Operands of unequal width do not share a staging buffer there (seen in cubins).
        slack = _SLACK_BLACKWELL * (1 if qk == v else 3)
    scores = tile.block_m * tile.block_n * item
    slack += tile.block_m * tile.block_n * row_bytes_ahead(problem) * tile.num_stages
    slack += _reads_ahead(problem, tile)
    rows, columns = tile.block_m, tile.block_n
    if problem.dtype == torch.float32 and not problem.is_tf32 and _DIVIDED in (qk, v):
        # multiply_rows holds one operand apart from the products that follow.
        slack += (rows if kernel.startswith("grad_key") or kernel == "grad_value" else columns) * (
            _DIVIDED * item
        )
    if kernel in ("forward", "decode"):
        loop = columns * both * item * tile.num_stages
        # decode has a loop for partial blocks with every mask.
        if kernel == "decode" or has_mask_loop(kernel, problem):
            slack += _pairs(problem, tile)
        if problem.cache is not None:
            loop = caches.loop_memory(problem.cache, (columns * qk, columns * v), item, tile)
        # Either the loop, or the output on its way to memory in fp32.
        return max(rows * qk * item + loop + scores, rows * v * 4) + slack
    if kernel == "jvp_forward":
        # Tangents of all operands, and of the weights.
        loop = 2 * columns * both * item * tile.num_stages
        staged = 0 if _weights_stay(problem, tile) else 2 * scores
        return max(2 * rows * qk * item + loop + staged, 2 * rows * v * 4) + slack
    if kernel in ("jvp_grad_query", "jvp_grad_key", "jvp_grad_value"):
        # Tangents of all operands; two score gradients on their way to a product.
        if kernel == "jvp_grad_query" and problem.sums_exactly:
            slack += tile.block_m * tile.block_n * 8
        own, other = (rows, columns) if kernel == "jvp_grad_query" else (columns, rows)
        ahead = 0 if kernel == "jvp_grad_query" else _pairs(problem, tile)
        return 2 * both * item * (own + other * tile.num_stages) + 2 * scores + slack + ahead
    if kernel == "grad_query":
        # Exact sums move 64-bit numbers through it on their way to memory.
        scores += tile.block_m * tile.block_n * 8 if problem.sums_exactly else 0
        slack += _pairs(problem, tile) if has_mask_loop(kernel, problem) else 0
        return rows * both * item + columns * both * item * tile.num_stages + scores + slack
    staying = columns * (qk if kernel == "grad_value" else both) * item
    exchanged = scores * {"gradients": 3, "grad_key_value": 2}.get(kernel, 1)
    operands = staying + rows * both * item * tile.num_stages
    # What the mask reads stays while results pass through registers (seen in cubins).
    ahead = _pairs(problem, tile)
    return operands + max(exchanged + slack, ahead + _SLACK_AHEAD if ahead else 0)


def _weights_stay(problem: Problem, tile: Tile) -> bool:
    """Whether products take 16-bit weights from the registers in which they were made.

    So they do on sm_90 (seen in cubins). What is read or drawn per score may pass through shared
    memory.
    """
    is_sm90 = problem.device.capability[0] == 9
    mods = problem.mods
    others = mods.reads_per_element or mods.mask_reads_per_element or problem.dropout_p > 0
    return is_sm90 and problem.itemsize == 2 and tile.block_m >= 64 and not others


def _reads_ahead(problem: Problem, tile: Tile) -> int:
    """What a score_mod reads per score and loops load ahead, other than in aligned rows.

    Beside exact fp32 products room for 64 bits is kept.
    """
    size = problem.mods.pair_bytes
    if not size or row_bytes_ahead(problem) or isolates_score_mod(problem):
        return 0
    size = max(size, 8) if is_exact(problem) else size
    return tile.block_m * tile.block_n * size * (tile.num_stages - 1)


def _pairs(problem: Problem, tile: Tile) -> int:
    """What a mask_mod reads per score and the kernel's loop loads ahead, and its mask in bytes.

    Triton loads ahead what a loop reads outside of branches. These kernels have a loop for partial
    blocks alone, without a branch. A single stage, or a branch, loads nothing ahead, but may move
    one such tile of 64-bit numbers between layouts.
    """
    size = tile.block_m * tile.block_n
    if not problem.mods.mask_pair_bytes:
        return 0
    ahead = size * (problem.mods.mask_pair_bytes * (tile.num_stages - 1) + 1)
    if tile.num_stages == 1:
        return size * 8
    is_copied = problem.mods.mask_rows not in (None, "distances")
    return ahead if is_copied else max(ahead, size * 8)


def _width(problem: Problem, size: int) -> int:
    """Columns of the tiles that hold a head."""
    return sum(head_pieces(size)) if problem.is_wide else round_head_dim(size)


# Columns of the rows that multiply_rows adds in several chains.
_DIVIDED = 256
# Barriers, cross-warp reductions and row statistics.
_SLACK = 8192
# Statistics and what a mask reads per row, next to what it reads per score.
_SLACK_AHEAD = 2048
# Blackwell's fifth-generation products stage their accumulators through shared memory as well.
_SLACK_BLACKWELL = 12288
