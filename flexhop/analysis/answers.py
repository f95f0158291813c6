"""Answers about the nodes of a graph, each found once.

Nodes form a graph, not a tree: a value that is used twice at each of thirty steps is reached along
2^30 paths. A chain of a thousand steps is longer than Python's stack.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch import fx

from flexhop.analysis.graph import in_order, reached

Answer = TypeVar("Answer")
_SHORT = 50  # nodes; a recursion along them fits into Python's stack


class Answers:
    """Answers to questions about the nodes of a graph with `count` nodes."""

    def __init__(self, count: int) -> None:
        self._is_long = count > _SHORT
        self._known: dict[Any, dict[fx.Node, Any]] = {}

    def of(self, question: Any, node: fx.Node, find: Callable[[fx.Node], Answer]) -> Answer:
        """The answer for a node.

        Args:
            question: what `find` answers; the same for all nodes.
            node: a node.
            find: how to find it; may ask the same question about what the node is computed from.
        """
        known = self._known.setdefault(question, {})
        if node not in known:
            if self._is_long:
                self._start_below(known, node, find)
            known[node] = find(node)
        return known[node]  # type: ignore[no-any-return]

    def _start_below(
        self, known: dict[fx.Node, Any], node: fx.Node, find: Callable[[fx.Node], Any]
    ) -> None:
        """Ask about a node's sources, the first ones first: each finds its own sources known."""
        below = reached(node, lambda of: [one for one in of.all_input_nodes if one not in known])
        for source in in_order(below):
            if source is not node and source not in known:
                known[source] = find(source)
