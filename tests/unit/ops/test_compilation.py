"""One compilation asks each question about a mod once, and confuses no two mods."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch._guards import TracingContext, tracing
from torch.fx import symbolic_trace

from flexhop import flex_attention
from flexhop.compat import compilation
from flexhop.compat.operators import overloads, retrace
from flexhop.lowering.mods.analysed import SCORE, analysed, kernel_graph
from flexhop.ops.graphs import subgraphs, tables
from tests.unit.ops.support import HEADS, LENGTH, assert_same, causal_mask, operands, quiet

pytestmark = quiet


def _count(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often a model of two equal layers traces and analyses mods below Dynamo."""
    found = Counter[str]()
    slopes, mask = torch.randn(HEADS, requires_grad=True), causal_mask()
    asked = {
        "trace_callable": subgraphs,
        "analyse": tables,
        "_has_potential_branch_input_mutation": overloads,
        "_retrace": retrace,
    }

    def model(q: Any, k: Any, v: Any) -> Any:
        for _ in range(2):
            q = flex_attention(q, k, v, lambda s, b, h, m, n: s + slopes[h] * (n - m), mask)
        return q

    with monkeypatch.context() as patch:
        for name, room in asked.items():
            plain = getattr(room, name)

            def count(*x: Any, plain: Any = plain, name: str = name, **more: Any) -> Any:
                found.update([name])
                return plain(*x, **more)

            patch.setattr(room, name, count)
        torch._dynamo.reset()
        torch.compile(model, backend="aot_eager", fullgraph=True)(*operands(grad=True))
    return found


def test_mods_are_traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    found = _count(monkeypatch)
    # Of score_mod and its gradient: one each in Dynamo, whose fake tensors end there, and one each
    # in AOTAutograd. There, `analyse` meets the mod of the user, and that without its hoisted
    # parts; the mask is looked at for writes; the mods and the joint graph enter the graph.
    writes = "_has_potential_branch_input_mutation"
    assert found == {"trace_callable": 4, "analyse": 2, writes: 1, "_retrace": 3}
    assert not compilation._found


def test_equal_mods_of_other_captures_are_others() -> None:
    table = torch.randn(LENGTH, LENGTH)
    learned = torch.randn(LENGTH, LENGTH, requires_grad=True)
    turned = torch.randn(LENGTH, LENGTH).T.requires_grad_()
    numbers = torch.arange(LENGTH * LENGTH).view(LENGTH, LENGTH)
    captured = (table, table.T, table.half(), numbers, learned, turned, table[:9])
    mask = causal_mask()

    def reading(table: Any) -> Any:
        def score_mod(s: Any, b: Any, h: Any, m: Any, n: Any) -> Any:
            return s + table[m % table.shape[0], n % table.shape[1]] / 3

        return score_mod

    def times(factor: Any) -> Any:
        return lambda s, b, h, m, n: s + (m * factor) / 7

    mods = [*map(reading, captured), *map(times, (1, 1.0))]

    def model(q: Any, k: Any, v: Any) -> Any:
        found = [flex_attention(q, k, v, mod, mask) for mod in mods]
        with torch.no_grad():
            found += [flex_attention(q, k, v, mod, mask) for mod in (mods[0], mods[4])]
            with torch.autocast("cpu", torch.bfloat16):
                found.append(flex_attention(q, k, v, mods[4], mask).float())
        return torch.stack([*found, flex_attention(q, k, v, mods[4], mask)])

    inputs = operands(grad=True)
    assert_same(model, inputs, [*inputs, learned, turned])


def test_symbolic_captures_are_told_apart() -> None:
    def model(q: Any, k: Any, v: Any, one: Any, other: Any) -> Any:
        mods = [lambda s, b, h, m, n, t=t: s + t[m % t.shape[0]] for t in (one, other, one)]
        return torch.stack([flex_attention(q, k, v, mod) for mod in mods])

    compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=True)
    for sizes in ((5, 7), (7, 5), (6, 6)):
        inputs = (*operands(), *map(torch.randn, sizes))
        torch.testing.assert_close(compiled(*inputs), model(*inputs))


def _questions(*contexts: TracingContext) -> list[bool]:
    """Whether `once` asks: first, again, of a changed graph, of another form, with autocast."""
    asked: list[bool] = []

    def ask(graph: Any, value: Any) -> None:
        made = object()
        answer = compilation.once(compilation.forms_of([value]), graph, lambda: made)
        asked.append(answer is made)

    for context in contexts:
        with tracing(context):
            graph, twin = (symbolic_trace(lambda x: torch.sin(x)) for _ in range(2))
            ask(graph, torch.ones(2))
            ask(twin, torch.zeros(2))
            ask(graph, torch.ones(2).half())
            ask(graph, torch.ones(4)[::2])
            ask(graph, 1)
            ask(graph, True)
            with torch.autocast("cpu"):
                ask(graph, 1)
            with torch.no_grad():
                ask(graph, 1)
            twin.graph.find_nodes(op="call_function", target=torch.sin)[0].target = torch.cos
            ask(twin, torch.zeros(2))
            ask(torch.sin, 1)
            ask(torch.sin, 1)
    return asked


def test_once_knows_what_differs() -> None:
    one = [True, False, *[True] * 9]
    assert _questions(TracingContext(None), TracingContext(None)) == one + one
    compilation.forget()


def test_lowerings_share_equal_graphs() -> None:
    def traced(table: torch.Tensor) -> Any:
        def mod(s: Any, b: Any, h: Any, m: Any, n: Any, table: Any) -> Any:
            return s + table[(m - n).abs()]

        return subgraphs.trace_score(mod, torch.zeros(1, 1, 4, 8), (table,))

    with tracing(TracingContext(None)):
        one, other, third = map(traced, (torch.ones(4), torch.zeros(4), torch.ones(5)))
        known = kernel_graph(one, SCORE)
        assert kernel_graph(other, SCORE) is known is kernel_graph(known, SCORE)
        assert kernel_graph(third, SCORE) is not known
        assert analysed(other, SCORE) is analysed(one, SCORE)
        compilation.forget()
        assert kernel_graph(traced(torch.ones(4)), SCORE) is not known
