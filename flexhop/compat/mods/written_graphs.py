"""Graphs of mods that Dynamo wrote, without writes: see writes.py. torch 2.11 to 2.15."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from flexhop.compat.mods.errors import unknown_write
from flexhop.compat.mods.location import line_of
from flexhop.compat.mods.writes import UnknownWriteError, Writes, written_by

__all__ = ["without_writes"]


def without_writes(tx: Any, graph: Graph, num_own: int, kind: str) -> Graph:
    """The same graph with operations that make new values in place of writes.

    Args:
        tx: Dynamo's translator.
        graph: of a mod.
        num_own: how many of its inputs belong to the mod; the others are captures. Writes to
            captures stay.
        kind: "score_mod", "mask_mod", ...

    Raises:
        ModLoweringError: it writes to a part of a tensor in a way that is not known.
    """
    if not any(_writes(node) for node in graph.nodes):
        return graph
    return _Rewriting(tx, graph, num_own, kind).run()


def _writes(node: Node) -> bool:
    function = _function_of(node)
    return function is not None and written_by(function, node.args, node.kwargs) is not None


def _function_of(node: Node) -> Callable[..., Any] | None:
    if node.op == "call_method":
        return getattr(torch.Tensor, str(node.target), None)
    return node.target if node.op == "call_function" and callable(node.target) else None


class _Rewriting:
    def __init__(self, tx: Any, graph: Graph, num_own: int, kind: str) -> None:
        self.tx = tx
        self.old = graph
        self.kind = kind
        self.graph = Graph()
        self.node: Node | None = None  # the old one at which the pass is
        captures = graph.find_nodes(op="placeholder")[num_own:]
        self.captures = [*captures, *graph.find_nodes(op="get_attr")]
        self.made: dict[Node, Node] = {}
        self.writes = Writes(self._call, _example, self._is_capture)

    def _is_capture(self, value: Any) -> bool:
        return any(self.made[node] is value for node in self.captures if node in self.made)

    def run(self) -> Graph:
        for node in self.old.nodes:
            self.node = node
            function = _function_of(node)
            if node.op == "output":
                self.graph.output(torch.fx.node.map_arg(node.args[0], self._latest), node.type)
            elif function is None:
                self.made[node] = self.graph.node_copy(node, self._latest)
            else:
                args, kwargs = torch.fx.node.map_arg(
                    (node.args, node.kwargs), self.made.__getitem__
                )
                try:
                    self.made[node] = self.writes.run(function, args, kwargs)
                except UnknownWriteError as error:
                    raise unknown_write(error, self.kind, line_of(self.node)) from None
        self.graph.lint()
        return self.graph

    def _latest(self, node: Node) -> Node:
        return self.writes.latest(self.made[node])

    def _call(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Record a call; the old node's own as it was."""
        assert self.node is not None
        is_method = isinstance(function, types.MethodDescriptorType)
        op, target = (
            ("call_method", function.__name__) if is_method else ("call_function", function)
        )
        if function is _function_of(self.node):
            op, target = self.node.op, self.node.target
        made = self.graph.create_node(op, target, args, kwargs)
        made.meta = dict(self.node.meta)
        given = torch.fx.node.map_arg((args, kwargs), lambda n: n.meta.get("example_value"))
        with self.tx.fake_mode, torch.enable_grad():
            made.meta["example_value"] = function(*given[0], **given[1])
        return made


def _example(value: Any) -> Tensor | None:
    found = value.meta.get("example_value") if isinstance(value, Node) else None
    return found if isinstance(found, Tensor) else None
