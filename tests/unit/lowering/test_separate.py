"""Comparisons with the query on one side and the key on the other."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flexhop.lowering.mods.separate import separated
from flexhop.ops.graphs.subgraphs import trace_mask
from tests.rewritten import check_values, operators_of

aten = torch.ops.aten
WIDTHS = torch.tensor([3, -1, 2**31 - 1, -(2**31), 0, 64], dtype=torch.int32)
LONG = torch.tensor([3, -1, 2**62, -(2**63), 0, 64])
POSITIONS = [0, 1, 2, 5, 6, 7, 63, 64, 65, 4095, 2**23 - 1]


def check(mask: Any) -> list[str]:
    """The operators that depend on both positions, of a mask with the same values."""
    graph = trace_mask(mask, torch.zeros(1, 1, 2, 64, dtype=torch.bfloat16), ())
    new = separated(graph)
    check_values(new, graph, POSITIONS)
    return operators_of(new, "q", "k")


MASKS = {
    "window": lambda b, h, q, k: q - k < 64,
    "of a head": lambda b, h, q, k: q - k < 64 * (h + 1),
    "captured": lambda b, h, q, k: q - k < WIDTHS[h],
    "captured, long": lambda b, h, q, k: k - q + 7 >= LONG[h],
    "equal": lambda b, h, q, k: q - k == 1 + h,
    "not": lambda b, h, q, k: ~(2 * q - 2 * k != 2 * h),
    "long": lambda b, h, q, k: q.long() - k.long() >= h.long(),
    "clamped": lambda b, h, q, k: (q - k).clamp(min=3) < 64,
}


@pytest.mark.parametrize("name", MASKS)
def test_nothing_but_comparisons_sees_both_positions(name):
    found = check(MASKS[name])
    assert not {"sub", "add", "mul", "abs", "clamp", "neg", "rsub"} & set(found)
    assert {"lt", "le", "gt", "ge", "eq", "ne"} & set(found)


KEPT = {
    "remainder": lambda b, h, q, k: (q - k) % 3 == 0,
    "product": lambda b, h, q, k: q * k > 100,
    "circle": lambda b, h, q, k: (q - k) * (q - k) < 100,
    "magnitude": lambda b, h, q, k: (q - k).abs() <= WIDTHS[h],
    "rows": lambda b, h, q, k: q // 8 - k // 8 == 1,
    "by key": lambda b, h, q, k: q - k < WIDTHS[k % 6],
    "two captured": lambda b, h, q, k: q - k - WIDTHS[h] < LONG[h],
    "factor": lambda b, h, q, k: q - k < 3 * LONG[h],
    "wraps": lambda b, h, q, k: q * 300 - k < 5,
}


@pytest.mark.parametrize("name", KEPT)
def test_what_is_no_distance_and_small_numbers_stays(name):
    assert {"sub", "mul", "remainder"} & set(check(KEPT[name]))


def test_comparisons_that_are_separate_stay():
    def mask(b, h, q, k):
        return (q >= k) & (q // 3 == k // 3)

    graph = trace_mask(mask, torch.zeros(1, 1, 2, 64), ())
    assert [n.target for n in separated(graph).graph.nodes] == [
        n.target for n in graph.graph.nodes
    ]
