"""Arithmetic on positions in floats, where floats are wanted."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flexhop.lowering.mods.strength import float_positions
from flexhop.ops.subgraphs import trace_score

TABLE = torch.tensor([0.5, -0.25])


def has_integers(mod: Any) -> bool:
    """Whether anything is still computed in integers; the value stays the same, too."""
    graph = trace_score(mod, torch.zeros(1, 1, 2, 64, dtype=torch.bfloat16), ())
    fast = float_positions(graph)
    at = [torch.tensor(n, dtype=torch.int32) for n in (0, 1, 70, 19)]
    score = torch.tensor(0.5)
    assert fast(score, *at).equal(graph(score, *at))
    calls = [node for node in fast.graph.nodes if node.op == "call_function"]
    return any(node.meta["val"].dtype == torch.int32 for node in calls)


@pytest.mark.parametrize(
    "mod",
    [
        lambda s, b, h, q, k: s + TABLE[h] * (k - q),
        lambda s, b, h, q, k: s - TABLE[h] * (q - k).abs(),
        lambda s, b, h, q, k: s + TABLE[h] * -(q - k),
        lambda s, b, h, q, k: s - 0.5 * (q + 100 - k).abs(),
        lambda s, b, h, q, k: s - 0.5 * (q - k - 1).abs() + (q + k),
    ],
    ids=["difference", "magnitude", "opposite", "shifted", "two"],
)
def test_distances_between_positions_are_floats(mod):
    assert not has_integers(mod)


@pytest.mark.parametrize(
    "mod",
    [
        lambda s, b, h, q, k: s + 0.5 * (q - k + 2**24),
        lambda s, b, h, q, k: s + 0.5 * ((q - k) % 4),
        lambda s, b, h, q, k: s + 0.5 * (q * k),
    ],
    ids=["far", "remainder", "product"],
)
def test_what_floats_might_not_hold_stays_an_integer(mod):
    assert has_integers(mod)
