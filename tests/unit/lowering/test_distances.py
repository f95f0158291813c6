"""Functions of the distance of positions take it as an input."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import fx

from flexhop.analysis import analyse
from flexhop.lowering.mods.analysed import SCORE
from flexhop.lowering.mods.arithmetic import cheaper
from flexhop.lowering.mods.distances import by_distance, has_distances
from flexhop.lowering.mods.indices import wrap_reads
from flexhop.ops.graphs.subgraphs import trace_score

aten = torch.ops.aten
TABLE = torch.randn(255)
GRID = torch.randn(255, 128)
POSITIONS = [*range(9), 31, 32, 63, 64, 70, 126, 127]
SIZES = {"b": 1, "h": 2, "q": 128, "k": 128}


def lowered(mod: Any, *captures: torch.Tensor) -> fx.GraphModule:
    """The graph that a kernel without distances prints."""
    graph = trace_score(mod, torch.zeros(1, 1, 2, 64, dtype=torch.bfloat16), captures)
    return wrap_reads(cheaper(graph, SCORE), SCORE, SIZES)


def number(value: int) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.int32)


MODS = {
    "table": lambda s, b, h, q, k, t: s + t[q - k + 127],
    "reversed table": lambda s, b, h, q, k, t: s + t[-k + 127 + q],
    "opposite": lambda s, b, h, q, k, t: s + t[(k - q + 127).clamp(0, 200)],
    "function": lambda s, b, h, q, k, t: s * torch.exp(-0.01 * (q - k).abs()),
    "floats": lambda s, b, h, q, k, t: s * torch.cos(q.float() - k.float()),
    "shifted": lambda s, b, h, q, k, t: s * torch.cos(((q + 5) - (k - 3)) * 0.1),
    "wide": lambda s, b, h, q, k, t: s + t[q.long() - k.long() + 127],
    "buckets": lambda s, b, h, q, k, t: s + t[torch.where(q >= k, q - k, 0) // 3],
    "two reads": lambda s, b, h, q, k, t: s + t[q - k + 127] * t[k],
}


@pytest.mark.parametrize("name", MODS)
@pytest.mark.parametrize("has_others", [False, True])
def test_values_stay_and_positions_are_subtracted_no_more(name, has_others):
    graph = lowered(MODS[name], TABLE)
    new = by_distance(graph, has_others=has_others)
    zero, score = number(0), torch.tensor(0.5)
    for q, k in itertools.product(map(number, POSITIONS), repeat=2):
        expected = graph(score, zero, zero, q, k, TABLE)
        assert new(score, zero, zero, q, k, q - k, TABLE).equal(expected)
    query, key = new.graph.find_nodes(op="placeholder")[3:5]
    assert not any({query, key} <= set(node.all_input_nodes) for node in new.graph.nodes
                   if node.target in (aten.sub.Tensor, aten.add.Tensor))  # fmt: skip
    assert has_distances(graph)


def test_reads_of_positions_past_the_last_ones_stay_in_range():
    graph = lowered(lambda s, b, h, q, k, t: s + t[q - k + 127], TABLE)
    zero, score, last = number(0), torch.tensor(0.5), number(127)
    inside = by_distance(graph, has_others=True)
    for distance in (-200, 190):
        found = inside(score, zero, zero, last, last, number(distance), TABLE)
        assert found == score + TABLE[0 if distance < 0 else -1]


def test_other_reads_are_left_as_they_are():
    graph = lowered(lambda s, b, h, q, k, t: s + t[k], TABLE)
    clamped = by_distance(graph, has_others=True)
    assert not clamped.graph.find_nodes(op="call_function", target=aten.clamp_max.default)


@pytest.mark.parametrize(
    "mod",
    [
        lambda s, b, h, q, k: s + q + k,
        lambda s, b, h, q, k: s - 0.5 * (q // 8 - k // 8),
        lambda s, b, h, q, k: s + GRID[q, k],
        lambda s, b, h, q, k: s + (2 * q - k),
        lambda s, b, h, q, k: torch.where(q >= k, s, -4.0),
    ],
    ids=["sum", "patches", "pairs", "factors", "order"],
)
def test_what_is_no_distance(mod):
    graph = trace_score(mod, torch.zeros(1, 1, 2, 64, dtype=torch.bfloat16), ())
    assert not has_distances(graph)
    assert analyse(by_distance(graph, has_others=False), (*SCORE,)).mod.result is not None
