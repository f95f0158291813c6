"""Inductor: merge what the layers of a model compute from the same mask, compile a graph again
after it failed, and hand errors of a lowering to the caller unchanged.

Inductor wraps every exception of a lowering, so the caller's `except` would not catch it: the
compiled graph raises it.

Each layer's call derives its block lists, and AOTAutograd leaves equal nodes apart in graphs
without a backward pass: a model of 32 layers would run 64 small kernels per decoded token. Names
are the same in torch 2.11 to 2.15.
"""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Callable, Hashable
from typing import Any

import torch
import torch._inductor.compile_fx as compile_fx
from torch._guards import TracingContext
from torch._inductor.async_compile import CompiledTritonKernels
from torch._inductor.lowering import fallback_handler
from torch._ops import OpOverload
from torch.fx import Graph, GraphModule, Node
from torch.utils import _pytree as pytree

from flexhop.compat.kernels import inductor
from flexhop.compat.operators.hop import Operator
from flexhop.errors import FlexhopError

__all__ = ["merge_repeated", "raised_by_graph", "retry_graphs"]

_FIELDS = ("blocks", "mask_captures")
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


def merge_repeated(graph: Graph) -> None:
    """Merge equal nodes among those from which masks of our operators are computed."""
    wanted = _sources(graph)
    known: dict[Hashable, Node] = {}
    for node in list(graph.nodes):
        target = node.target
        if not isinstance(target, OpOverload):
            continue
        if target._schema.is_mutable:
            known.clear()  # equal arguments may have other values from here on
        elif node in wanted and torch.Tag.nondeterministic_seeded not in target.tags:
            first = known.setdefault(_key(node), node)
            if first is not node:
                node.replace_all_uses_with(first)
                graph.erase_node(node)


def _sources(graph: Graph) -> set[Node]:
    """The nodes on which the masks of our operators depend."""
    waiting: list[Node] = []
    for node in graph.nodes:
        if isinstance(node.target, Operator):
            operands = zip(node.target.args_type._fields, node.args, strict=False)
            for field, operand in operands:
                if field in _FIELDS:
                    waiting += _nodes(operand)
    found: set[Node] = set()
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting += node.all_input_nodes
    return found


def _nodes(operand: Any) -> list[Node]:
    return [leaf for leaf in pytree.tree_leaves(operand) if isinstance(leaf, Node)]


def _key(node: Node) -> Hashable:
    """Equal for nodes that compute the same. Types count: 1, 1.0 and True are equal."""
    leaves, structure = pytree.tree_flatten((node.args, node.kwargs))
    return node.target, str(structure), tuple((type(leaf), leaf) for leaf in leaves)


@torch.library.custom_op("flexhop::refuse", mutates_args=())
def _refuse(like: torch.Tensor, error: str) -> torch.Tensor:
    raise pickle.loads(bytes.fromhex(error))


@_refuse.register_fake
def _(like: torch.Tensor, error: str) -> torch.Tensor:
    return torch.empty_like(like)


def raised_by_graph(lower: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator of a lowering: the compiled graph raises its deliberate errors instead.

    An ahead-of-time compiled graph has no Python to raise it from; there Inductor's wrapper stays,
    which names our class and its message.
    """

    @functools.wraps(lower)
    def wrapped(*operands: Any) -> Any:
        try:
            return lower(*operands)
        except FlexhopError as error:
            if inductor.V.graph.cpp_wrapper:
                raise
            return pytree.tree_map(functools.partial(_refusal, error), inductor.output_meta())

    return wrapped


def _refusal(error: FlexhopError, like: Any) -> Any:
    """A result like the operator's that raises `error` when it is used."""
    if not isinstance(like, torch.Tensor):
        return like
    size, stride = inductor.as_expressions(like.shape), inductor.as_expressions(like.stride())
    empty = inductor.empty(size, stride, like.dtype, like.device)
    text = pickle.dumps(error.with_traceback(None)).hex()
    return fallback_handler(torch.ops.flexhop.refuse.default, add_to_fallback_set=False)(
        empty, text
    )
