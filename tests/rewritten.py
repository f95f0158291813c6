"""Masks whose graph was written anew: the same values, other operators."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import fx

from flexhop.analysis import INDICES, analyse, name_of

__all__ = ["check_values", "operators_of"]


def check_values(new: fx.GraphModule, old: fx.GraphModule, positions: Sequence[int]) -> None:
    """Two masks of six heads agree on all pairs of positions."""
    zero, at = torch.tensor(0, dtype=torch.int32), torch.tensor(positions, dtype=torch.int32)
    for h, (q, k) in itertools.product(range(6), itertools.product(at, at)):
        head = zero + h
        assert bool(new(zero, head, q, k)) == bool(old(zero, head, q, k)), (h, q, k)


def operators_of(mask: fx.GraphModule, *positions: str) -> list[str]:
    """Names of the operators that depend on all of these positions."""
    found = analyse(mask, INDICES)
    calls = [node for node in mask.graph.nodes if node.op == "call_function"]
    return [name_of(node) for node in calls if found[node].depends >= set(positions)]
