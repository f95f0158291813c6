"""Comparisons of quotients with one position alone on one side."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch
from torch import fx

from flexhop.compat.graphs.inline import decompose
from flexhop.lowering.mods.quotients import alone
from flexhop.ops.graphs.subgraphs import trace_mask
from tests.rewritten import check_values, operators_of

aten = torch.ops.aten
FAR = torch.tensor([3, -1, 2**31 - 1, -(2**31), 5, 64], dtype=torch.int32)
POSITIONS = [0, 1, 2, 5, 10, 11, 12, 63, 64, 65, 131, 132, 4095, 2**23 - 1]
DIVISIONS = ("floor_divide", "div", "bitwise_right_shift", "__rshift__", "remainder")


def traced(mask: Any) -> fx.GraphModule:
    query = torch.zeros(1, 1, 2, 64, dtype=torch.bfloat16)
    return decompose(trace_mask(mask, query, ()))


def check(mask: Any, position: Literal["q", "k"]) -> list[str]:
    """What divides by a position in a mask with the same values."""
    graph = traced(mask)
    new = alone(graph, position)
    check_values(new, graph, POSITIONS)
    return [name for name in operators_of(new, position) if name in DIVISIONS]


MASKS = {
    "chunks": lambda b, h, q, k: q // 11 >= k // 11,
    "other chunks": lambda b, h, q, k: q // 5 > k // 11,
    "differences": lambda b, h, q, k: q // 64 - k // 64 < 2,
    "ahead": lambda b, h, q, k: k // 64 >= q // 64 + 2 - h,
    "shifts": lambda b, h, q, k: (q >> 3) >= (k >> 3),
    "moved": lambda b, h, q, k: (q + 3) // 11 >= (k + 7) // 11,
    "moved back": lambda b, h, q, k: (q - 9) // 11 <= (k - 20) // 11,
    "of heads": lambda b, h, q, k: (q + h) // 11 <= (k + 5 * h) // 11,
    "whole": lambda b, h, q, k: torch.div(q, 11, rounding_mode="trunc") >= torch.div(
        k, 11, rounding_mode="trunc"
    ),
    "not": lambda b, h, q, k: ~(q // 11 < k // 11),
}  # fmt: skip
MAGNITUDES = {
    "near": lambda b, h, q, k: (q // 64 - k // 64).abs() <= 6,
    "far": lambda b, h, q, k: (q // 10 - k // 10).abs() > 1 + h,
}


@pytest.mark.parametrize("position", ["q", "k"])
@pytest.mark.parametrize("name", MASKS)
def test_nothing_divides_by_it(name, position):
    assert not check(MASKS[name], position)


@pytest.mark.parametrize("name", MAGNITUDES)
def test_magnitudes_are_two_comparisons_for_rows_of_queries(name):
    assert not check(MAGNITUDES[name], "k")
    graph = traced(MAGNITUDES[name])
    assert alone(graph, "q") is graph


KEPT = {
    "equal": lambda b, h, q, k: q // 11 == k // 11,
    "remainders": lambda b, h, q, k: q % 11 >= k % 11,
    "slope": lambda b, h, q, k: 2 * q // 11 >= 2 * k // 11,
    "captured": lambda b, h, q, k: q // 11 - FAR[h] >= k // 11 + FAR[h],
    "toward zero": lambda b, h, q, k: torch.div(q - 20, 11, rounding_mode="trunc") >= torch.div(
        k - 20, 11, rounding_mode="trunc"
    ),
    "large": lambda b, h, q, k: q // 3000 >= k // 3000 * q,
}  # fmt: skip


@pytest.mark.parametrize("position", ["q", "k"])
@pytest.mark.parametrize("name", KEPT)
def test_others_stay(name, position):
    check(KEPT[name], position)
    graph = traced(KEPT[name])
    assert alone(graph, position) is graph


def test_a_position_may_be_alone_where_the_other_cannot():
    def twice(b, h, q, k):
        return q // 11 >= 2 * (k // 11)

    def both(b, h, q, k):
        return q // 11 >= (q + k) // 11

    assert not check(twice, "q") and check(twice, "k")
    assert check(both, "q") and not check(both, "k")


def test_one_side_alone_stays():
    graph = traced(lambda b, h, q, k: (q // 3 >= 4) & (k // 3 >= 4) & (q >= k))
    assert alone(graph, "k") is graph
