"""Whether all steps of a tile of a Hopper kernel share one loop.

In the forward kernel, the first step, steps with a mask and steps without are three loops; or one
loop, in which the mask and the product with the weights before stand in branches. One loop has two
copies of a step instead of six, which compile in 60 to 80 % of the time. Which form runs faster
depends on the call: docs/lab/first_call.md has the measurements, and docs/lab/hopper.md those of
the backward kernel.
"""

from __future__ import annotations

from collections.abc import Iterator

from flexhop.lowering.hopper.bits import StoredBits, asks, reads_ids
from flexhop.lowering.hopper.constants import block_sizes
from flexhop.lowering.hopper.tiles import HopperTile, gathers, wider
from flexhop.lowering.problem import ModFacts, Problem

_KEYS = 128  # per step
_FEW_KEYS = 1024  # of a call without a mask
# Most instructions of a score_mod per score: one that reads no tensors, and one that adds an entry
# of a table by distance. A soft cap has 5 and ran 3 % slower in one loop; a table has 7 and ran as
# fast. A product with a number of the head ran 8 % slower, a bias of keys 3 %.
_MOST, _MOST_OF_TABLES = 3.0, 7.0
# Most instructions of a mask_mod that is asked, if score_mod adds a line: causal has 2.8. A window
# that depends on the head has 6.8 and spills.
_MOST_OF_MASK = 3.0
# Three loops with a long score_mod and a long mask_mod run slowly if some tiles have masks and
# some do not: 1.66 ms for `gelu` and every third key of odd heads, 0.94 in one loop. The same mask
# for all heads had 0.91, none 0.83. Masks by head of 3.8 and 5.3 instructions gained nothing;
# windows by head have 6.8, and were not compared.
_FEWEST_OF_LONG_MASK = 7.0
_LONG_SCORE = 8.0  # at 256 columns, shorter ones ran 2 % slower in one loop
# Least instructions per score of a score_mod and its derivative together whose gradients gain from
# one loop. A soft cap has 35 and gained up to a fifth; `silu` has 18 and gained nothing.
_FEWEST_OF_GRADIENTS = 20.0
_LARGEST_WIDTH_WITH_BITS = 128  # documents with `gelu` lost 5 % at 192 columns


def separate_loops(problem: Problem, tile: HopperTile, stored: StoredBits) -> Iterator[str]:
    """Why steps with a mask and steps without have loops of their own; empty if they share one.

    Args:
        problem: the call's problem.
        tile: tile of the kernel.
        stored: the bits that it reads.
    """
    mods, width = problem.mods, wider(problem)
    is_dense = problem.blocks is None and not mods.has_score_mod
    mixes = _mixes(problem, stored)
    is_measured = {64: is_dense or (mixes and is_table(mods)), 128: True}
    if not is_measured.get(width, mixes and mods.score_cost > _LONG_SCORE):
        yield f"heads of {width} columns" + (" with a mod or a mask" if width == 64 else "")
    if tile.block_n != _KEYS and not mixes:
        yield f"{tile.block_n} keys per step"
    if tile.is_split or tile.heads > 1 or gathers(problem, tile).is_gathered:
        yield "blocks of the mask that are smaller than a tile"
    if problem.has_spans:
        # A window ran 1 to 3 % slower: it has few steps, and their bits come from two numbers.
        yield "each query sees the keys between two numbers"
    if mods.has_key_bend:
        yield "score_mod adds a line with bends"
    elif not (mods.has_key_slope or mixes):
        yield from _long_score(mods)
    if problem.blocks is not None and mods.has_mask_mod and not problem.has_spans:
        yield from _long_mask(problem, tile, stored)


def _mixes(problem: Problem, stored: StoredBits) -> bool:
    """Whether the mask hides scores in many tiles, and not in many others.

    Documents do, and so may a mask that is asked.
    """
    if problem.blocks is None or not asks(problem, stored):
        return reads_ids(problem, stored)
    return problem.mods.mask_cost > _FEWEST_OF_LONG_MASK


def awaits_values_first(problem: Problem, tile: HopperTile, stored: StoredBits) -> bool:
    """Whether a step waits for the values of its weights before the next one multiplies keys.

    Otherwise it waits when that product has been started. At 64 columns, where products and
    exponentials take as long, it depends on the call which is faster; at others it makes no
    difference. Measured: tables by distance, soft caps, windows and 1024 keys without a mask took
    0.96 to 0.97 of the time, masks of bits 0.97 to 1.0, but lines 1.06, causal masks 1.0 to 1.02,
    and 4096 keys without a mask 1.07, with three consumers.

    Args:
        problem: the call's problem.
        tile: tile of the kernel.
        stored: the bits that it reads.
    """
    mods = problem.mods
    if wider(problem) != 64 or tile.is_split or tile.heads > 1 or mods.has_key_slope:
        return False
    if mods.has_score_mod or stored.blocks or problem.has_spans:
        return True
    is_short = tile.num_consumers == 2 and problem.key_len <= _FEW_KEYS
    return problem.blocks is None and is_short


def gradients_share_loop(problem: Problem, stored: StoredBits) -> bool:
    """Whether steps with a mask and steps without share a loop of the backward kernel.

    Multiprocessors share a cache of instructions. If they work on different loops at a time, as
    under masks that differ by head, batch or document, long loops do not fit: `gelu` and every
    third key of odd heads took 4.1 ms in two loops and 2.9 in one, without a mask 2.7.

    Args:
        problem: the call's problem.
        stored: the bits that the kernel reads.
    """
    blocks, mods = problem.blocks, problem.mods
    if blocks is None or not blocks.has_full or problem.has_spans or not mods.has_mask_mod:
        return False
    if mods.score_cost + problem.grad.grad_cost < _FEWEST_OF_GRADIENTS:
        return False
    if stored.blocks:
        is_narrow = wider(problem) <= _LARGEST_WIDTH_WITH_BITS
        return stored.holds_all and is_narrow and reads_ids(problem, stored)
    # What a mask computes once per key, or reads, a branch computes and reads in each step.
    return (blocks.per_head or blocks.per_batch) and not mods.mask_reads_per_element


def is_table(mods: ModFacts) -> bool:
    """Whether score_mod reads a table by distance."""
    return mods.has_distances and mods.reads_per_element


def _long_score(mods: ModFacts) -> Iterator[str]:
    """Reasons of a score_mod that adds no line."""
    if mods.reads_captured and not is_table(mods):
        yield "score_mod reads captured tensors"
    elif mods.score_cost > (_MOST_OF_TABLES if is_table(mods) else _MOST):
        yield f"score_mod takes about {mods.score_cost:.0f} instructions per score"


def _long_mask(problem: Problem, tile: HopperTile, stored: StoredBits) -> Iterator[str]:
    """Reasons of a mask_mod, which steps ask unless its mask is bits: what would spill."""
    mods = problem.mods
    if stored.blocks:
        if not stored.holds_all:
            # Steps without a mask took 26 to 60 instructions more, and spilled 9 to 14 times.
            yield "some blocks of the mask have bits, and mask_mod is asked about the others"
        return
    overhangs = not problem.is_key_multiple(block_sizes(problem, tile)[1])
    if mods.has_key_slope and mods.mask_cost > _MOST_OF_MASK:
        yield f"score_mod adds a line, and mask_mod takes about {mods.mask_cost:.0f} instructions"
    if mods.mask_reads_keys and mods.has_score_mod:
        yield "mask_mod reads tensors at keys, and there is a score_mod"
    if mods.mask_reads_keys and overhangs:
        yield "mask_mod reads tensors at keys, and keys may end within a tile"
    if mods.reads_by_position and overhangs:
        yield "score_mod reads tensors by position, and keys may end within a tile"
