"""Which tiles a program of the Hopper backward kernel computes, and in which order.

Pure functions of Problem. docs/lab/hopper.md gives the reasons for the numbers.
"""

from __future__ import annotations

from flexhop.lowering.hopper.tiles import wider
from flexhop.lowering.problem import Problem

# Two accumulators of 64 keys with more columns exceed a consumer's registers. Beyond this width,
# the consumers share their keys, and each has half of the columns.
LARGEST_OWN = 128
# A program owns heads if the sums of all programs take this share of the L2 cache (0.29 gained
# 18 %, 0.41 gained 5 %, 0.55 lost 8 %), and if heads keep this share of multiprocessors busy.
_SHARE_OF_CACHE = 0.42
_BUSY_SHARE = 0.85
_FEWEST_HEADS = 16
_FEWEST_WIDE_HEADS = 8


def owns_heads(problem: Problem) -> bool:
    """Whether a program computes all tiles of a key head, one after the other.

    The gradients of its queries then add up in memory of the program's own, which is small enough
    for the L2 cache, and the program itself converts them. Otherwise they add up in fp32 in
    memory for all heads, which is cleared before and converted after.
    """
    if problem.is_deterministic or problem.kv_batch_shared or wider(problem) > LARGEST_OWN:
        return False
    processors = problem.device.multiprocessors
    heads = problem.batch * problem.kv_heads
    rounds = -(-heads // processors)
    sums = processors * _sum_bytes(problem)
    fits = sums <= _SHARE_OF_CACHE * problem.device.l2_bytes
    return fits and heads >= _BUSY_SHARE * rounds * processors


def _sum_bytes(problem: Problem) -> int:
    """Memory for the gradients of the queries of one key head, in fp32."""
    return problem.group * problem.query_len * problem.head_dim * 4


def heads_per_section(problem: Problem) -> int:
    """Key heads per section, whose tiles are scheduled together, those with the most work first.

    One if programs own heads. Otherwise as many as fit in an eighth of the L2 cache with queries,
    gradients and accumulators: keys and their gradients pass through it, too. When sections filled
    all of it, each tile of keys read most of 512 queries from memory again (1.22 ms instead of
    0.89). And at least a few, so that the last long tiles do not run while most multiprocessors
    idle: fewer for wide heads, where 32 took half as long again, but as many for packed sequences,
    of which only the active ones must fit.

    If lists need not be those of neighbours, as with blocks chosen at random or by a router, keys
    that run at a time read queries all over their heads: as many heads as fit in half of the L2
    cache, because half of it is far from each multiprocessor.
    """
    if owns_heads(problem):
        return 1
    both = problem.head_dim + problem.value_head_dim
    row = both * problem.itemsize + problem.head_dim * 4
    per_head = problem.group * problem.query_len * row
    is_wide = wider(problem) > LARGEST_OWN and not problem.is_packed
    fewest = _FEWEST_WIDE_HEADS if is_wide else _FEWEST_HEADS
    fitting = problem.device.l2_bytes // max(1, per_head)
    heads = max(fewest, fitting // 8)
    if _is_scattered(problem):
        heads = max(1, min(heads, fitting // 2))
    return min(heads, max(1, problem.batch * problem.kv_heads))


def _is_scattered(problem: Problem) -> bool:
    """Whether blocks may be anywhere: lists without a mask_mod, or one that looks pairs up."""
    blocks, mods = problem.blocks, problem.mods
    if blocks is None or blocks.has_ranges or problem.has_band or problem.is_deterministic:
        return False
    return not mods.has_mask_mod or mods.mask_reads_per_element
