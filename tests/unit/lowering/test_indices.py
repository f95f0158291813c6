"""Reads of captured tensors stay within them, and indices that are in range cost nothing."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._dynamo.source import ConstantSource
from torch._inductor.sizevars import SizeVarAllocator
from torch._inductor.virtualized import V
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from flexhop.lowering.mods.analysed import SCORE
from flexhop.lowering.mods.arithmetic import cheaper
from flexhop.lowering.mods.indices import wrap_reads
from flexhop.ops.graphs.subgraphs import trace_score

aten = torch.ops.aten
LENGTH = 64
ADDED = {aten.where.self: "wrap", aten.maximum.default: "raise", aten.minimum.default: "lower"}


def added(index: Any, length: Any, table: torch.Tensor) -> str:
    """What is added to an index of a table, if there are `length` queries and keys."""
    graph = trace_score(
        lambda score, b, h, q, k, table: score + table[index(q, k)],
        torch.zeros(1, 1, 2, 64),
        (torch.zeros(LENGTH),),
    )
    graph.graph.find_nodes(op="placeholder")[-1].meta["val"] = table
    return limits(graph, length)


def limits(graph: Any, length: Any) -> str:
    """What is added to the indices of a graph."""
    graph = cheaper(graph, SCORE)
    sizes = {"b": 1, "h": 1, "q": length, "k": length}
    before = [node.target for node in graph.graph.nodes]
    found = [node.target for node in wrap_reads(graph, SCORE, sizes).graph.nodes]
    return " ".join(n for t, n in ADDED.items() if found.count(t) > before.count(t))


INDICES = {
    "query": (lambda q, k: q, ""),
    "last": (lambda q, k: LENGTH - 1 - k, ""),
    "quotient": (lambda q, k: q // 4, ""),
    "remainder": (lambda q, k: (q - k) % 64, ""),
    "bits": (lambda q, k: (q ^ k) & ~7, ""),
    "next": (lambda q, k: k + 1, "lower"),
    "before": (lambda q, k: k - 1, "wrap"),
    "difference": (lambda q, k: q - k, "wrap"),
    "magnitude": (lambda q, k: (q - k).abs(), ""),
    "far before": (lambda q, k: q - 2 * k, "wrap raise"),
    "clamped": (lambda q, k: (q - k).clamp(0, LENGTH - 1), ""),
    "chosen": (lambda q, k: torch.where(q > k, q - k, 0), "wrap"),
    "back": (lambda q, k: 2 * q - q, ""),
    "far": (lambda q, k: q + 100, "lower"),
    "overflows": (lambda q, k: (q * 2000003 * 1999) // 2**26, "wrap"),
    "overflows far": (lambda q, k: q * 2000003 * 1999, "wrap raise lower"),
    "float": (lambda q, k: (q * 0.5).int(), ""),
}


@pytest.mark.parametrize("name", INDICES)
def test_indices_are_limited_if_they_may_be_out_of_range(name):
    index, expected = INDICES[name]
    assert added(index, LENGTH, torch.zeros(LENGTH)) == expected


OPEN = {
    "query": (lambda q, k: q, ""),
    "next": (lambda q, k: k + 1, "lower"),
    "before": (lambda q, k: k - 1, "wrap"),
    "difference": (lambda q, k: q - k, "wrap"),
    "magnitude": (lambda q, k: (q - k).abs(), ""),
    "clamped": (lambda q, k: (k - 1).clamp(min=0), ""),
    "smaller": (lambda q, k: torch.minimum(q, k), ""),
    "remainder": (lambda q, k: (q - k) % 2, ""),
    "table's": (lambda q, k: q * 2, "lower"),
}


def within(shapes: ShapeEnv, *, aot_mode: bool = False) -> Any:
    """A lowering."""
    sizevars = SizeVarAllocator(shapes)
    return V.set_graph_handler(SimpleNamespace(sizevars=sizevars, aot_mode=aot_mode))


def symbolic(shapes: ShapeEnv, name: str) -> torch.SymInt:
    """A length that is dynamic, of LENGTH now."""
    source = ConstantSource(name)
    symbol = shapes.create_symbol(LENGTH, source=source, dynamic_dim=DimDynamic.DYNAMIC)
    return shapes.create_symintnode(symbol, hint=LENGTH, source=source)  # type: ignore[return-value]


@pytest.mark.parametrize("name", OPEN)
def test_indices_of_symbolic_lengths(name):
    shapes = ShapeEnv()
    length = symbolic(shapes, "length")
    with FakeTensorMode(shape_env=shapes):
        table = torch.empty(length)
    index, expected = OPEN[name]
    with within(shapes):
        assert added(index, length, table) == expected


# Of the place in a table of all distances, which has 2 * length - 1 entries.
PLACES = {
    "distance": (lambda q, k, n: q - k + n - 1, ""),
    "back": (lambda q, k, n: n + (k - q) - 1, ""),
    "rows": (lambda q, k, n: q // 4 - k // 4 + (n - 1) // 4, ""),
    "fewer rows": (lambda q, k, n: q // 4 - k // 4 + (n - 1) // 5, "wrap raise lower"),
    "spread": (lambda q, k, n: 2 * q - k + n - 1, "wrap raise lower"),
    "below": (lambda q, k, n: q - k + n - 2, "wrap raise lower"),
    "above": (lambda q, k, n: q - k + n, "wrap raise lower"),
    "negative": (lambda q, k, n: q - k - n, "wrap raise lower"),
}


@pytest.mark.parametrize("name", PLACES)
def test_indices_with_symbolic_numbers(name):
    """A number that is captured is the length itself."""
    index, expected = PLACES[name]
    shapes = ShapeEnv()
    length = symbolic(shapes, "length")
    mod = lambda score, b, h, q, k, table, n: score + table[index(q, k, n)]  # noqa: E731
    with FakeTensorMode(shape_env=shapes):
        query, table = torch.zeros(1, 1, 2, 64), torch.empty(2 * length - 1)
        graph = trace_score(mod, query, (table, length))
    with within(shapes):
        assert limits(graph, length) == expected


@pytest.mark.parametrize("rows", [2 * LENGTH - 1, 2 * LENGTH - 2, None])
@pytest.mark.parametrize("aot_mode", [False, True])
def test_a_table_of_a_size_of_its_own_is_read_in_range_with_a_guard(rows, aot_mode):
    """Only if it is in range now, and if something checks the guard. None: of any size."""
    shapes = ShapeEnv()
    length = symbolic(shapes, "length")
    size = symbolic(shapes, "size") + LENGTH - 1 if rows is None else rows
    mod = lambda score, b, h, q, k, table: score + table[q - k + LENGTH - 1]  # noqa: E731
    with FakeTensorMode(shape_env=shapes):
        query, table = torch.zeros(1, 1, 2, 64), torch.empty(size)
        graph = trace_score(mod, query, (table,))
    guards = len(shapes.guards)
    with within(shapes, aot_mode=aot_mode):
        found = limits(graph, length)
    is_guarded = not aot_mode and rows != 2 * LENGTH - 2
    assert found == ("" if is_guarded else "wrap raise lower")
    assert (len(shapes.guards) > guards) == is_guarded
