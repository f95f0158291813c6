"""mask_mods that keep the keys near a query, such as sliding windows, and their ends.

A query then sees the keys between two numbers, q_idx + first and q_idx + end. Kernels turn these
into bits for a whole step, which takes fewer instructions than two comparisons per score. A
one-sided mask, such as a causal one, has one comparison and stays a function.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import fx

from flexhop.analysis import INDICES, All, AtLeast, Equals, truth_of
from flexhop.lowering.mods.analysed import analysed

_FAR = 2**30  # a missing side; adding a position does not overflow 32 bits


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
    q_idx, kv_idx = found.mod.inputs["q"], found.mod.inputs["k"]
    truth = truth_of(found.forms, found.mod.result)
    if truth is False:
        return Band(1, 0)
    first, end = -_FAR, _FAR
    for part in truth.parts if isinstance(truth, All) else (truth,):
        if not isinstance(part, (AtLeast, Equals)) or abs(part.form.offset) >= _FAR:
            return None
        if isinstance(part, Equals) and not part.is_equal:
            return None
        terms, edge = part.form.terms, part.form.offset
        if terms == {q_idx: 1, kv_idx: -1}:  # kv_idx <= q_idx + offset
            side = Band(edge if isinstance(part, Equals) else -_FAR, edge + 1)
        elif terms == {q_idx: -1, kv_idx: 1}:  # kv_idx >= q_idx - offset
            side = Band(-edge, 1 - edge if isinstance(part, Equals) else _FAR)
        else:
            return None
        first, end = max(first, side.first), min(end, side.end)
    return Band(first, end) if -_FAR < first and end < _FAR else None
