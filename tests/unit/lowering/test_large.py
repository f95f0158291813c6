"""Which score_mods may return large scores."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from flexhop.compat.graphs.inline import decompose
from flexhop.lowering.mods.analysed import SCORE, kernel_graph
from flexhop.lowering.mods.large import adds_large, large_scores
from flexhop.lowering.mods.lines import key_line
from flexhop.ops.graphs.subgraphs import trace_score

QUERY = torch.zeros(1, 1, 8, 8)
LOWEST = torch.finfo(torch.float32).min


def graph_of(mod: Callable[..., Any]) -> torch.fx.GraphModule:
    return kernel_graph(decompose(trace_score(mod, QUERY, (torch.zeros(8),))), SCORE)


@pytest.mark.parametrize(
    ("kind", "mod"),
    [
        ("no", lambda s, b, h, q, k, t: s * 0.5 + 1),
        ("no", lambda s, b, h, q, k, t: 20 * torch.tanh(s / 20)),
        ("no", lambda s, b, h, q, k, t: s * s),
        ("no", lambda s, b, h, q, k, t: F.silu(s)),
        ("no", lambda s, b, h, q, k, t: F.gelu(s)),
        ("no", lambda s, b, h, q, k, t: F.softplus(s)),
        ("no", lambda s, b, h, q, k, t: torch.tanh(torch.exp(s))),
        ("no", lambda s, b, h, q, k, t: torch.where(q >= k, s, -math.inf)),
        ("no", lambda s, b, h, q, k, t: torch.where(q >= k, s, -1e4)),
        ("no", lambda s, b, h, q, k, t: s - (q - k).abs() * 0.1 * (h + 1)),
        ("no", lambda s, b, h, q, k, t: torch.where(k < 9000, s, -math.inf)),
        ("no", lambda s, b, h, q, k, t: s + (k - q) * torch.exp2(-8.0 * (h + 1) / 16)),
        ("offset", lambda s, b, h, q, k, t: torch.where(q >= k, s, -1e9)),
        ("offset", lambda s, b, h, q, k, t: s.masked_fill(q < k, LOWEST)),
        ("offset", lambda s, b, h, q, k, t: s + (q < k) * -1e9),
        ("offset", lambda s, b, h, q, k, t: torch.where(q >= k, s, -65504.0)),
        ("offset", lambda s, b, h, q, k, t: torch.where(k < 100_000, s, -1e9)),
        ("offset", lambda s, b, h, q, k, t: s + (k >= 2**20) * -1e9),
        ("offset", lambda s, b, h, q, k, t: s + t[k]),
        ("growth", lambda s, b, h, q, k, t: torch.sinh(s)),
        ("growth", lambda s, b, h, q, k, t: torch.exp(s)),
        ("growth", lambda s, b, h, q, k, t: s**3),
        ("growth", lambda s, b, h, q, k, t: 1 / s + t[k]),
    ],
)
def test_kind(kind: str, mod: Callable[..., Any]):
    assert large_scores(graph_of(mod)) == kind


def test_a_number_of_the_query_may_swallow_scores():
    """A line of slope 0 was no line at all: it cancels, but not if scores are lost beside it."""
    assert key_line(graph_of(lambda s, b, h, q, k, t: s + t[q])) is None
    steps = graph_of(lambda s, b, h, q, k, t: s + torch.where(q // 16 == k // 16, t[h], 0.0))
    assert key_line(steps) is None
    assert key_line(graph_of(lambda s, b, h, q, k, t: s + q * 0.1)) is not None


LINES = {
    "slopes": lambda s, b, h, q, k, t: s + t[h] * (k - q),
    "functions of slopes": lambda s, b, h, q, k, t: s - torch.exp2(-t[h]) * (k - q).abs(),
    "two slopes": lambda s, b, h, q, k, t: s + t[h] * (k - q) + t[b + 1] * (k - q).float(),
    "in parts": lambda s, b, h, q, k, t: s + t[0] * q - t[0] * k,
    "at once": lambda s, b, h, q, k, t: torch.addcmul(s, t[h], (k - q).float()),
    "some keys": lambda s, b, h, q, k, t: s + (k > 20).float() * t[h] * k,
    "a number of the head": lambda s, b, h, q, k, t: s + t[h] * (k - q) - t[h],
    "sides": lambda s, b, h, q, k, t: torch.where(q >= k, s + t[h] * (k - q), s - t[h] * (k - q)),
}
SWALLOWED = {
    "a step": lambda s, b, h, q, k, t: torch.where(q >= k, 0.0, -1e9),
    "a captured step": lambda s, b, h, q, k, t: torch.where(q >= k, 0.0, t[1]),
    "a flag": lambda s, b, h, q, k, t: (q < k) * -1e9,
    "a flag as a number": lambda s, b, h, q, k, t: (q < k).float() * LOWEST,
    "a captured number times a flag": lambda s, b, h, q, k, t: (q < k) * t[1],
    "a captured number in steps": lambda s, b, h, q, k, t: torch.where(q < k, 1.0, 0.0) * t[1],
    "a number of the query": lambda s, b, h, q, k, t: t[q],
}


@pytest.mark.parametrize("line", LINES)
def test_slopes_are_small(line: str):
    graph = graph_of(LINES[line])
    assert not adds_large(graph)
    assert key_line(graph) is not None


@pytest.mark.parametrize("more", SWALLOWED)
def test_a_line_beside_a_number_that_swallows_scores_is_none(more: str):
    """Hopper's line kernel gave NaN for a row of -1e30."""

    def mod(*inputs: Any) -> Any:
        return LINES["slopes"](*inputs) + SWALLOWED[more](*inputs)

    graph = graph_of(mod)
    assert adds_large(graph)
    assert key_line(graph) is None
