"""What tests spare PyTorch changes no graph."""

from __future__ import annotations

from unittest import mock

import torch
import torch._inductor.codegen.common
import torch.fx._symbolic_trace as symbolic_trace
from torch.fx.experimental.proxy_tensor import make_fx

from tests.spared_work import _filled_once

MODULE = torch.nn.Linear(3, 3)
CALL = torch.nn.Module.__call__


def _operations(graph: torch.fx.GraphModule) -> list[tuple[str, str]]:
    return [(node.op, str(node.target)) for node in graph.graph.nodes]


def test_make_fx_replaces_no_method_of_module():
    seen = []

    def function(x):
        seen.append(torch.nn.Module.__call__)
        return MODULE(x)

    found = make_fx(function)(torch.ones(2, 3))
    original = symbolic_trace._Patcher.patch_method.__closure__[0].cell_contents
    with mock.patch.object(symbolic_trace._Patcher, "patch_method", original):
        expected = make_fx(function)(torch.ones(2, 3))
    assert seen[0] is CALL and seen[1] is not CALL
    assert _operations(found) == _operations(expected)


def test_other_tracers_replace_them():
    inner = []

    class Outer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = MODULE

        def forward(self, x):
            # Inside of a trace that replaced them, the original is put back for a while.
            inner.append(make_fx(lambda y: self.inner(y))(torch.ones(2, 3)))
            return self.inner(x)

    graph = torch.fx.symbolic_trace(Outer())
    assert ("call_module", "inner") in _operations(graph)
    assert _operations(inner[0]) == _operations(make_fx(lambda y: MODULE(y))(torch.ones(2, 3)))
    assert torch.nn.Module.__call__ is CALL


def test_who_asks_for_the_text_of_a_graph_gets_it():
    graph = make_fx(lambda x: x + 1)(torch.ones(2))
    assert "torch.ops.aten.add" in graph.print_readable(print_output=False)


def test_the_table_of_types_is_filled_again_if_a_rule_comes(monkeypatch):
    from torch._inductor import utils

    class Table:
        filled = 0

        @_filled_once
        def __init__(self):
            self.filled += 1

    table = Table()
    table.__init__()
    assert table.filled == 1
    monkeypatch.setitem(utils.op_dtype_propagation_rules, "another", None)
    table.__init__()
    assert table.filled == 2
