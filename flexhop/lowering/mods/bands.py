"""mask_mods that keep the keys near a query, such as sliding windows, and their ends.

A query then sees the keys between two numbers, q_idx + first and q_idx + end. Kernels turn these
into bits for a whole step, which takes fewer instructions than two comparisons per score. A
one-sided mask, such as a causal one, has one comparison and stays a function.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import fx

from flexhop.analysis import INDICES, All, AtLeast, Equals, Truth, truth_of
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
    truth = truth_of(found.forms, found.mod.result)
    if truth is False:
        return Band(1, 0)
    band = Band(-_FAR, _FAR)
    for part in truth.parts if isinstance(truth, All) else (truth,):
        side = _side(part, found.mod.inputs["q"], found.mod.inputs["k"])
        if side is None:
            return None
        band = Band(max(band.first, side.first), min(band.end, side.end))
    return band if -_FAR < band.first and band.end < _FAR else None


def _side(truth: Truth, q_idx: fx.Node, kv_idx: fx.Node) -> Band | None:
    """The side of a band that a condition on the distance gives; one side may be missing."""
    if not isinstance(truth, (AtLeast, Equals)) or abs(truth.form.offset) >= _FAR:
        return None
    form = truth.form
    if form.terms == {q_idx: 1, kv_idx: -1}:  # kv_idx <= q_idx + offset
        edge = form.offset
        band = Band(-_FAR, edge + 1)
    elif form.terms == {q_idx: -1, kv_idx: 1}:  # kv_idx >= q_idx - offset
        edge = -form.offset
        band = Band(edge, _FAR)
    else:
        return None
    if isinstance(truth, AtLeast):
        return band
    return Band(edge, edge + 1) if truth.is_equal else None
