"""Numbers of fp64 beside scores of fp32."""

from __future__ import annotations

import pytest
import torch

from flexhop.analysis import is_conversion
from flexhop.compat.graphs.inline import decompose
from flexhop.lowering.mods.analysed import JOINT, SCORE
from flexhop.lowering.mods.lower import read_joint, read_mods
from flexhop.lowering.mods.single import in_single
from flexhop.mods.functions import noop_mask
from flexhop.ops.graphs.subgraphs import trace_joint, trace_mask, trace_score

QUERY = torch.zeros(1, 4, 64, 64, dtype=torch.bfloat16)
PLACES = [torch.tensor(n, dtype=torch.int32) for n in (0, 1, 9, 4)]


def doubles(graph):
    """How many operators have a result in fp64."""
    calls = [node for node in graph.graph.nodes if node.op == "call_function"]
    return sum(node.meta["val"].dtype == torch.float64 for node in calls)


def single(mod, *captures):
    """The graph of a mod; in fp32, it has nearly the same value."""
    graph = decompose(trace_score(mod, QUERY, captures))
    found = in_single(graph, SCORE)
    score = torch.tensor(0.7)
    before, after = (g(score, *PLACES, *captures) for g in (graph, found))
    torch.testing.assert_close(after.double(), before.double(), rtol=1e-6, atol=1e-6)
    return graph, found


@pytest.mark.parametrize(
    ("mod", "left"),
    [
        (lambda s, b, h, q, k, t: s + t[h, q], 1),
        (lambda s, b, h, q, k, t: t[h, q - k] * s, 1),
        (lambda s, b, h, q, k, t: torch.tanh(s + t[h, q]) * t[h, 0], 2),
        (lambda s, b, h, q, k, t: s - t[h, 0] * (q - k).abs(), 1),
        (lambda s, b, h, q, k, t: torch.where(q >= k, s * t[h, 0], -1e30), 2),
        (lambda s, b, h, q, k, t: s + (s > 0).double(), 0),
    ],
    ids=["table", "factor", "twice", "slope", "choice", "flag"],
)
def test_what_depends_on_the_score_is_fp32(mod, left):
    table = torch.randn(4, 64, dtype=torch.float64)
    before, after = single(mod, table)
    assert doubles(after) == left < doubles(before)
    (result,) = after.graph.output_node().all_input_nodes
    assert result.meta["val"].dtype == torch.float32


def test_differences_of_what_is_read_stay_in_fp64():
    times = 1.7e9 + torch.rand(64, dtype=torch.float64)
    _, found = single(lambda s, b, h, q, k, t: s - (t[q] - t[k]).abs(), times)
    assert doubles(found) == 3
    graph, found = single(lambda s, b, h, q, k, t: s - t[q] + t[k], times)
    assert found is graph


@pytest.mark.parametrize(
    "mod",
    [
        lambda s, b, h, q, k, t: 2 * torch.tanh(s.double() / 2),
        lambda s, b, h, q, k, t: torch.log1p(torch.exp(s * t[h, q] * 1000)),
    ],
    ids=["asked", "large"],
)
def test_what_asks_for_fp64_or_needs_its_range_stays(mod):
    graph, found = single(mod, torch.rand(4, 64, dtype=torch.float64))
    assert found is graph


def test_gradients_are_fp32_from_the_start():
    table = torch.randn(4, 64, dtype=torch.float64, requires_grad=True)
    joint = trace_joint(lambda s, b, h, q, k, t: s + t[h, k], QUERY, (table,))
    found = in_single(decompose(joint.joint), JOINT)
    assert doubles(found) == 0
    assert not any(
        node.op == "call_function" and is_conversion(node) for node in found.graph.nodes
    )


def test_graphs_without_fp64_stay_as_they_are():
    graph = trace_score(lambda s, b, h, q, k, t: s + t[h, q], QUERY, (torch.randn(4, 64),))
    assert in_single(graph, SCORE) is graph


@pytest.mark.parametrize(
    "mod",
    [
        lambda s, b, h, q, k, t: s + t[h, (q - k).abs()],
        lambda s, b, h, q, k, t: s + t[h, k],
        lambda s, b, h, q, k, t: s - t[h, 0] * (q - k),
        lambda s, b, h, q, k, t: s * t[h, 0],
    ],
    ids=["distance", "key", "line", "factor"],
)
def test_a_table_of_fp64_has_the_kernel_of_one_of_fp32(mod):
    found = []
    for dtype in (torch.float32, torch.float64):
        captures = (torch.randn(4, 64, dtype=dtype, requires_grad=True),)
        score = decompose(trace_score(mod, QUERY, captures))
        mask = decompose(trace_mask(noop_mask, QUERY, ()))
        joint = decompose(trace_joint(mod, QUERY, captures).joint)
        facts = read_mods(score, mask)
        facts = facts._replace(score_cost=0.0, key_bytes=frozenset(), pair_bytes=0)
        found.append((facts, read_joint(joint)._replace(grad_cost=0.0)))
    assert found[0] == found[1]
