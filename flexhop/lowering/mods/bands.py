"""mask_mods that keep the keys near a query, such as sliding windows, and their ends.

A query then sees the keys between two numbers, q_idx + first and q_idx + end. Kernels turn these
into bits for a whole step, which takes fewer instructions than two comparisons per score. A
one-sided mask, such as a causal one, has one comparison and stays a function.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import fx

from flexhop.analysis import INDICES, number_set, truth_of
from flexhop.lowering.mods.analysed import analysed

_FAR = 2**30  # adding a position does not overflow 32 bits


class Band(NamedTuple):
    """Keys from q_idx + first to q_idx + end, exclusive."""

    first: int
    end: int


def key_band(mask: fx.GraphModule) -> Band | None:
    """The band that a mask_mod keeps; None if it keeps anything else, or is one-sided.

    Args:
        mask: (b, h, q_idx, kv_idx, *captures) -> bool.
    """
    found = analysed(mask, INDICES)
    truth = truth_of(found.forms, found.mod.result)
    if truth is False:
        return Band(1, 0)
    kept = number_set(truth)
    distance = kept and found.forms.distance(kept.form)
    if kept is None or distance is None or len(kept.numbers) != 1:
        return None
    ((low, high),) = kept.numbers  # of the query's distance from the key, or of the key's
    first, last = (low, high) if distance[0] < 0 else (-high, -low)
    return Band(int(first), int(last) + 1) if -_FAR < first and last < _FAR else None
