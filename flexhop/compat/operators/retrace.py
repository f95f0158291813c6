"""Traces of mods: into graphs of their own, and inside the graph that is being recorded.

The names are the same in torch 2.11 to 2.15.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._higher_order_ops.utils import _maybe_run_with_interpreter, reenter_make_fx
from torch._ops import OpOverload
from torch.fx.experimental import proxy_tensor
from torch.fx.experimental.proxy_tensor import make_fx

from flexhop.compat.compilation import copy_of, forms_of, once
from flexhop.compat.graphs import shared_graphs
from flexhop.compat.mods.constants import spell_constants
from flexhop.compat.operators.vmapped import copy

__all__ = ["has_writes", "retraced", "trace_callable"]


def _zeros(size: Sequence[Any], *, memory_format: Any = None, **options: Any) -> Any:
    return torch.ops.aten.zeros.default(size, **options)


# Rows that a kernel holds begin with numbers.
_ZEROS = {
    torch.ops.aten.empty.memory_format: _zeros,
    torch.ops.aten.new_empty.default: torch.ops.aten.new_zeros.default,
}
_NEW_VALUES = _ZEROS | {torch.ops.aten.copy.default: copy}  # which has no derivative


def has_writes(graph: torch.fx.GraphModule) -> bool:
    """Whether operators write: PyTorch's `pad(mode="circular")` does, and some derivatives do."""
    called = (node.target for node in graph.graph.nodes if node.op == "call_function")
    return any(isinstance(op, OpOverload) and op._schema.is_mutable for op in called)


def trace_callable(function: Callable[..., Any], inputs: Sequence[Any]) -> torch.fx.GraphModule:
    """FX graph of `function`, without writes; call inside `hop.isolated_trace`."""
    # An interpreter keeps the user's lines that Dynamo recorded on nodes. Without a table, make_fx
    # of 2.15 would replace `detach`, which later derivatives need, by an alias.
    run = _maybe_run_with_interpreter(function)
    graph = make_fx(run, tracing_mode="real", decomposition_table={})(*inputs)
    if has_writes(graph):
        run = torch.func.functionalize(_maybe_run_with_interpreter(graph))
        with torch._C._AutoDispatchBelowAutograd():
            graph = make_fx(run, tracing_mode="real", decomposition_table=_NEW_VALUES)(*inputs)
    return spell_constants(graph)


def retraced(
    function: Callable[..., Any],
    example: Sequence[Any],
    mode_of_mods: Callable[[], contextlib.AbstractContextManager[Any]],
) -> torch.fx.GraphModule:
    """The graph of a mod in the graph that is being recorded.

    It belongs to one operator, because Inductor changes it.

    Args:
        function: a mod.
        example: its inputs.
        mode_of_mods: under which it is traced.
    """
    tracer = proxy_tensor._CURRENT_MAKE_FX_TRACER

    def make() -> torch.fx.GraphModule:
        with mode_of_mods():
            return spell_constants(_retrace(function, tracer)(*example))

    known = shared_graphs.origin(function)
    if not isinstance(known, torch.fx.GraphModule):
        return make()
    key = (retraced, tracer, forms_of(example), mode_of_mods, known is function)
    return copy_of(once(key, known, make))


def _retrace(function: Callable[..., Any], tracer: Any) -> Callable[..., torch.fx.GraphModule]:
    """Inductor's decompositions drop `detach`, which is right once derivatives are taken. Those of
    mods are still to come."""
    table = {} if tracer is None else tracer.decomposition_table
    kept = {op: rule for op, rule in table.items() if op is not torch.ops.aten.detach.default}
    return reenter_make_fx(function, subgraph_decomp_table=kept | _ZEROS)
