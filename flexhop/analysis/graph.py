"""A mod as a graph of operators, normalised for the rest of the analysis.

Operators that return their argument are dropped, chained reads become one read, and equal nodes
are merged. Nodes form a graph, not a tree: a value that is used twice at each of thirty steps is
reached along 2^30 paths, so answers about nodes are found once. A chain of a thousand steps is
longer than Python's stack.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, fx

from flexhop.analysis.operators import TRANSPARENT, Trait, packet_of, traits_of
from flexhop.analysis.rows import Rows, dtype_of, is_number
from flexhop.compat.mods.stand_in import is_traced
from flexhop.compat.sizes import LONGEST_ROW

aten = torch.ops.aten
Answer = TypeVar("Answer")
_SHORT = 50  # nodes; a recursion along them fits into Python's stack
_ONES = {aten.ones, aten.ones_like, aten.new_ones}
_ZEROS = {aten.zeros, aten.zeros_like, aten.new_zeros}


class Mod(NamedTuple):
    """A function of a score, indices and captured tensors.

    Args:
        graph: its operators.
        inputs: the nodes of score, b, h, q, k and grad, as far as it takes them, by name.
        captures: the nodes of captured tensors, and the tensors if they are known.
        results: its results: nodes, or plain numbers.
    """

    graph: fx.Graph
    inputs: Mapping[str, fx.Node]
    captures: Mapping[fx.Node, Tensor | None]
    results: tuple[Any, ...]

    @property
    def result(self) -> Any:
        """The first result."""
        return self.results[0]

    @property
    def operators(self) -> list[fx.Node]:
        """Nodes that compute something, in order."""
        return [node for node in self.graph.nodes if node.op == "call_function"]


class Builder:
    """Builds the graph of a mod, operator by operator."""

    def __init__(
        self, names: Sequence[str], examples: Sequence[Tensor], longest_row: int = LONGEST_ROW
    ) -> None:
        self.graph = fx.Graph()
        self.inputs: dict[str, fx.Node] = {}
        self.captures: dict[fx.Node, Tensor | None] = {}
        self._seen: dict[Any, fx.Node] = {}
        self._kept: list[Tensor | None] = []
        self._rows = Rows(self.call, longest_row)
        for name, example in zip(names, examples, strict=True):
            self.inputs[name] = self._placeholder(name, example)

    def capture(
        self, example: Tensor, tensor: Tensor | None = None, device: torch.device | None = None
    ) -> fx.Node:
        """A captured tensor; the same node for the same tensor.

        device: device of the indices. A CPU number is moved there, without synchronising.
        """
        key = ("capture", id(tensor))
        if tensor is None or key not in self._seen:
            node = self._placeholder(f"capture_{len(self.captures)}", example)
            self.captures[node] = _beside(tensor, device)
            self._seen[key] = node
            self._kept.append(tensor)  # its identity is a key
        return self._seen[key]

    def _placeholder(self, name: str, example: Tensor) -> fx.Node:
        node = self.graph.placeholder(name)
        node.meta["val"] = example
        return node

    def call(
        self, target: Any, args: tuple[Any, ...], kwargs: Any, example: Any, *, stays: bool = False
    ) -> fx.Node:
        """The result of an operator; example: a tensor of its shape and dtype; stays: also if it
        returns its argument."""
        packet = packet_of(target)
        if not stays and _passes_on(packet, args, example):
            return args[0]
        if packet is aten.index:
            args = self._without_repeats(*_composed(args))
        number = self._rows.number(target, args, kwargs, example)
        if number is not None:
            return number
        key = (target, _frozen(args), _frozen(tuple(sorted(kwargs.items()))))
        if key not in self._seen:
            node = self.graph.call_function(target, args, kwargs)
            node.meta["val"] = example
            self._seen[key] = node
            self._rows.note(node, example)
        return self._seen[key]

    def _without_repeats(self, table: Any, indices: Sequence[Any]) -> tuple[Any, ...]:
        """A read of a table, with one place where `expand` repeats it; tables of floats may have a
        gradient for each."""
        tensor = self.captures.get(table)
        example = table.meta["val"] if tensor is None else tensor

        def place(index: Any, stride: Any) -> Any:
            if not (isinstance(stride, int) and stride == 0 and is_number(index)):
                return index
            number = index.meta["val"].new_zeros(())
            choices = {"dtype": number.dtype, "device": example.device}
            return self.call(aten.zeros.default, ([],), choices, number)

        if is_smooth(example):
            return table, indices
        places = [*map(place, indices, example.stride())]
        return table, [*places, *indices[len(places) :]]

    def mod(self, results: Sequence[Any]) -> Mod:
        """The function that returns `results`."""
        return Mod(self.graph, self.inputs, self.captures, tuple(results))


def read_graph(
    module: fx.GraphModule, names: Sequence[str], kept: Collection[fx.Node] = ()
) -> tuple[Mod, dict[fx.Node, Any]]:
    """Normalise the graph of a mod; also return, for each node of the graph, its node in the mod.

    Args:
        module: (*inputs, *captures) -> value or values.
        names: names of the inputs before the captures.
        kept: nodes that the mod has, too, although they return their argument.
    """
    nodes = module.graph.find_nodes(op="placeholder")
    examples = [node.meta.get("val") for node in nodes]
    builder = Builder(names, examples[: len(names)])
    known: dict[fx.Node, Any] = dict(
        zip(nodes[: len(names)], builder.inputs.values(), strict=True)
    )
    for node, example in zip(nodes[len(names) :], examples[len(names) :], strict=True):
        known[node] = builder.capture(example)
    for node in module.graph.nodes:
        if node.op == "get_attr":
            known[node] = builder.capture(node.meta.get("val"))
        if node.op == "call_function":
            args = fx.map_arg(node.args, known.__getitem__)
            kwargs = fx.map_arg(node.kwargs, known.__getitem__)
            example, stays = node.meta.get("val"), node in kept
            known[node] = builder.call(node.target, tuple(args), kwargs, example, stays=stays)
    results = module.graph.output_node().args[0]
    results = results if isinstance(results, (tuple, list)) else (results,)
    return builder.mod([known.get(r, r) if isinstance(r, fx.Node) else r for r in results]), known


def _beside(tensor: Tensor | None, device: torch.device | None) -> Tensor | None:
    """A captured number on the device of the indices, to combine with tensors of any rank."""
    if tensor is None or device is None or tensor.dim() or tensor.device.type != "cpu":
        return tensor
    if device.type == "cpu":
        return tensor
    if is_traced(tensor):
        return tensor.to(device)
    return torch.full((), tensor.item(), dtype=tensor.dtype, device=device)


def constant_of(value: Any) -> Any:
    """The number from the program that a node holds; None if it holds another value."""
    if not isinstance(value, fx.Node):
        return value if isinstance(value, (bool, int, float)) else None
    packet = packet_of(value.target)
    if packet in _ONES | _ZEROS:
        return int(packet in _ONES)
    is_filled = value.op == "call_function" and Trait.FACTORY in traits_of(packet)
    return constant_of(value.args[-1]) if is_filled and value.args else None


def is_float(node: Any) -> bool:
    """Whether a node is a tensor of floats."""
    dtype = dtype_of(node)
    return dtype is not None and dtype.is_floating_point


def is_smooth(value: object) -> bool:
    """Whether a value may have derivatives: a tensor of real or complex numbers."""
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


def carries_gradients(node: fx.Node) -> bool:
    """Whether gradients flow through a node: what has several results, such as a maximum and its
    place, carries them if one of these does."""
    value = node.meta.get("val")
    return any(map(is_smooth, value if isinstance(value, (tuple, list)) else (value,)))


def passes_gradients(node: fx.Node) -> bool:
    """Whether gradients of a node reach its operands."""
    return carries_gradients(node) and node.target is not aten.detach.default


def dependents(
    roots: Iterable[fx.Node], through: Callable[[fx.Node], bool] = lambda node: True
) -> set[fx.Node]:
    """Nodes that are computed from some nodes, by way of others that `through` holds for."""
    found, following = set[fx.Node](), list(roots)
    while following:
        new = {user for user in following.pop().users if through(user)} - found
        found |= new
        following += new
    return found


def reached(
    root: fx.Node, step: Callable[[fx.Node], Iterable[Any]] = lambda node: node.all_input_nodes
) -> list[fx.Node]:
    """An operator and those that it is computed from, each once; step: where to go from one."""
    found, following = dict[fx.Node, None](), [root]
    while following:
        node = following.pop()
        if node.op == "call_function" and node not in found:
            found[node] = None
            following += step(node)
    return list(found)


def in_order(nodes: Sequence[fx.Node]) -> list[fx.Node]:
    """Nodes of one graph, in its order."""
    if len(nodes) < 2:
        return list(nodes)
    wanted = set(nodes)
    return [node for node in nodes[0].graph.nodes if node in wanted]


def paths_below(root: fx.Node) -> int:
    """How many operators compute a node if none is shared by its users."""
    paths, below = {root: 1}, in_order(reached(root))
    for node in reversed(below):
        for source in node.all_input_nodes:
            paths[source] = paths.get(source, 0) + paths[node]
    return sum(paths[node] for node in below)


def is_conversion(node: fx.Node) -> bool:
    """Whether an operator returns the same number in another dtype."""
    return Trait.CONVERSION in traits_of(node.target)


def is_comparison(node: fx.Node) -> bool:
    """Whether an operator compares two numbers."""
    return Trait.COMPARISON in traits_of(node.target)


def operands(
    node: fx.Node, of: Callable[[fx.Node], Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments and keywords of a node, with nodes replaced by `of`."""
    return tuple(fx.map_arg(node.args, of)), dict(fx.map_arg(node.kwargs, of))


def value_of(node: Any) -> Any:
    """The node that computes the number that a node passes on."""
    while isinstance(node, fx.Node) and _passes_on(
        packet_of(node.target), node.args, node.meta.get("val")
    ):
        node = node.args[0]
    return node


def _passes_on(packet: Any, args: Sequence[Any], example: Any) -> bool:
    """Whether an operator returns its first argument, a number."""
    if packet not in TRANSPARENT or not is_number(args[0]):
        return False
    return isinstance(example, Tensor) and not example.dim() and dtype_of(args[0]) == example.dtype


def _composed(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Merge a read of a read of a table into one read."""
    inner, indices = args
    if isinstance(inner, fx.Node) and packet_of(inner.target) is aten.index:
        first: Any = inner.args[1]
        if all(map(is_number, (*first, *indices))):
            return inner.args[0], [*first, *indices]
    return args


def _frozen(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return (type(value).__name__, *map(_frozen, value))
    return (type(value).__name__, value) if isinstance(value, (bool, int, float)) else value


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
