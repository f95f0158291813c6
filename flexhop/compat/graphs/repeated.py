"""Inductor: compute once what the layers of a model compute from the same mask.

Each layer's call derives its block lists, and AOTAutograd leaves equal nodes apart in graphs
without a backward pass: a model of 32 layers would run 64 small kernels per decoded token. Names
are the same in torch 2.11 to 2.15.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import Graph, Node
from torch.utils import _pytree as pytree

from flexhop.compat.operators.hop import Operator

__all__ = ["merge_repeated"]

_FIELDS = ("blocks", "mask_captures")


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
