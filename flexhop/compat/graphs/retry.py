"""Inductor: compile a graph again after it failed.

Names are the same in torch 2.11 to 2.15.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch._inductor.compile_fx as compile_fx
from torch._guards import TracingContext
from torch._inductor.async_compile import CompiledTritonKernels
from torch.fx import GraphModule

from flexhop.compat.graphs.repeated import merge_repeated
from flexhop.compat.operators.hop import Operator

__all__ = ["retry_graphs"]

Recover = Callable[[Exception, Callable[[], Any]], Any]


@functools.cache
def retry_graphs(recover: Recover) -> None:
    """If a graph with our operators fails to compile, use the result of `recover(error, again)`.

    Inductor's lowering modifies its graph, so a copy is kept. The copy shares tensors and
    subgraphs.
    """
    compile_graph = compile_fx.fx_codegen_and_compile

    @functools.wraps(compile_graph)
    def compile_or_recover(graph: GraphModule, *args: Any, **keywords: Any) -> Any:
        if not _has_ours(graph):
            return compile_graph(graph, *args, **keywords)
        merge_repeated(graph.graph)
        kept = copy.deepcopy(graph.graph)

        def again() -> Any:
            _forget_strides()
            # Among them are failed jobs: if a worker dies, all that the others do fails, too.
            CompiledTritonKernels.cache_clear()
            fresh = GraphModule(graph, copy.deepcopy(kept))
            fresh.meta.update(graph.meta)
            return compile_graph(fresh, *args, **keywords)

        try:
            return compile_graph(graph, *args, **keywords)
        except Exception as error:  # any error: `recover` raises it again if nothing helps
            return recover(error, again)

    compile_fx.fx_codegen_and_compile = compile_or_recover


def _has_ours(graph: GraphModule) -> bool:
    return any(isinstance(node.target, Operator) for node in graph.graph.nodes)


def _forget_strides() -> None:
    """Inductor records the strides of a graph's results only once."""
    context = TracingContext.try_get()
    if context is not None and context.output_strides:
        context.output_strides.clear()
