"""Calls that read a cache on a GPU: the cases of the other tiers, larger, and CUDA graphs."""

import dataclasses

import pytest
import torch

from tests.cache_cases import (
    BF16,
    CASES,
    E4M3,
    E5M2,
    INT8,
    CacheCase,
    assert_cache_case,
    assert_every_byte,
    cache_call,
    make_cache_inputs,
    operands,
)
from tests.cuda_graphs import capture

pytestmark = pytest.mark.gpu

LARGE = tuple(
    CacheCase(
        f"large_{stored}_{page}_{queries}".replace("torch.", ""), page=page, stored=stored,
        dtype=BF16, queries=queries, lengths=(1500, 1, 0, 777), heads=(8, 2), dims=(128, 128),
        scale="none" if stored == BF16 else "key", blocks=(128, 128) if queries > 1 else None,
    )
    for stored in (BF16, INT8, E4M3)
    for page in (0, 16, 64, 128)
    for queries in (1, 300)
    if page or stored != BF16
)  # fmt: skip


@pytest.mark.parametrize("case", (*CASES, *LARGE), ids=lambda case: case.name)
def test_case(case):
    if not case.page:
        case = dataclasses.replace(case, lengths=(max(case.lengths),) * len(case.lengths))
    results = []
    for seed in (0, 1):
        inputs = make_cache_inputs(case, "cuda", seed)
        call = torch.compile(cache_call(inputs), fullgraph=True)
        results.append(call(*operands(inputs)))
    assert_cache_case(case, inputs, results[1])
    assert torch.equal(results[0][0], results[1][0])


@pytest.mark.parametrize("stored", [INT8, E4M3, E5M2])
def test_every_byte(stored):
    def run(function, *arguments):
        return torch.compile(function, fullgraph=True)(*arguments)

    assert_every_byte(stored, run, "cuda")


def test_a_graph_sees_lengths_and_pages_change():
    """Captured once; the table and the lengths are tensors, so a replay reads their new values."""
    case = CacheCase(
        "graph", page=16, stored=BF16, dtype=BF16, lengths=(300, 40), heads=(8, 2), dims=(64, 64)
    )
    inputs = make_cache_inputs(case, "cuda")
    call = torch.compile(cache_call(inputs), fullgraph=True)
    arguments = operands(inputs)
    with torch.no_grad():
        graph, captured = capture(call, *arguments)
    shorter = dataclasses.replace(case, lengths=(300, 17))
    assert inputs.table is not None
    inputs.table.lengths.copy_(torch.tensor(shorter.lengths))
    inputs.table.pages[1, 2:] = -1
    graph.replay()
    torch.cuda.synchronize()
    assert_cache_case(shorter, inputs, captured)
