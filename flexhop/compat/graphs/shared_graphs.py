"""Share traced graphs between the operators of one call.

AOTAutograd traces the forward and backward pass into one graph, splits it, and then lowers each
part. The metadata of both operators' nodes holds the graphs of the user's functions, so the
forward lowering sees what the backward pass will compute. Nodes keep their metadata in 2.11 to
2.15; without it, nothing is shared.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.fx import GraphModule, Node

__all__ = ["Graphs", "found", "hand_on", "move", "note", "origin", "share"]

_KEY = "flexhop_shared"


class Graphs(dict[str, GraphModule]):
    """Traced graphs of one call, by name. Pickles as empty."""

    def __reduce__(self) -> tuple[Callable[[], Graphs], tuple[()]]:
        """Pickle as an empty one."""
        return Graphs, ()


def share(function: Any) -> GraphModule:
    """The same GraphModule, so that the operators of one call that get it share graphs."""
    own = GraphModule(function, function.graph)  # other calls may have the same function
    setattr(own, _KEY, Graphs())
    return own


def hand_on(function: Any, wrapped: Any) -> Any:
    """`wrapped`, with the identity of the function that it wraps."""
    wrapped.flexhop_wrapped = function
    return wrapped


def origin(function: Any) -> Any:
    """The function behind one that was handed on."""
    while hasattr(function, "flexhop_wrapped"):
        function = function.flexhop_wrapped
    return function


def note(node: Node, function: Any, traced: dict[str, GraphModule]) -> None:
    """Add the graphs of an operator's node to those of the calls that share `function`."""
    if (graphs := getattr(origin(function), _KEY, None)) is not None:
        graphs.update(traced)
        node.meta[_KEY] = graphs


def found(node: Node) -> Graphs:
    """The graphs of a node's call; none if the node came from elsewhere."""
    return node.meta.get(_KEY, Graphs())


def move(node: Node, copied: Callable[[GraphModule], GraphModule]) -> None:
    """Give a node its own graphs, created by `copied`."""
    if _KEY in node.meta:
        node.meta[_KEY] = Graphs((n, copied(graph)) for n, graph in found(node).items())
