"""Reads of captured tensors in a score_mod: the places that get the tensors' gradients."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, fx

from flexhop.compat.operators import hop
from flexhop.compat.sizes import hint_of
from flexhop.errors import UnsupportedFeatureError
from flexhop.ops.args import NUM_INDICES

aten = torch.ops.aten
NUM_SCORE_INPUTS = 1 + NUM_INDICES
_SHAPES = (aten.expand.default, aten.view.default, aten.reshape.default, aten.unsqueeze.default)
MAX_ROW = 256  # elements of a row read at once, such as weights of a layer: each becomes a site


def compose_reads(graph: fx.GraphModule) -> None:
    """table[b][q] -> table[b, q]: merge a chain of reads of leading dimensions into one.

    Also if one of them is `table.gather(1, places)[h, 0]` or `table.index_select(0, place)[0, k]`.
    """
    _name_reads_alike(graph)
    for node in graph.graph.find_nodes(op="call_function", target=aten.index.Tensor):
        while (merged := _merged(node)) is not None:
            node.args = merged
            if not merged[1]:
                node.replace_all_uses_with(merged[0])
                break
    graph.graph.eliminate_dead_code()
    graph.recompile()


def _name_reads_alike(graph: fx.GraphModule) -> None:
    """row.gather(0, places) and table.index_select(1, places) -> row[places], table[:, places]."""
    for node in graph.graph.find_nodes(op="call_function", target=aten.gather.default):
        if node.meta["val"].dim() == 1:
            node.target, node.args = aten.index.Tensor, (node.args[0], [node.args[2]])
    for node in graph.graph.find_nodes(op="call_function", target=aten.index_select.default):
        source, dim, places = cast("tuple[fx.Node, int, fx.Node]", node.args)
        before: list[Any] = [None] * (dim % max(1, source.meta["val"].dim()))
        if places.meta["val"].dim() == 1:
            node.target, node.args = aten.index.Tensor, (source, [*before, places])


def _merged(node: fx.Node) -> tuple[fx.Node, list[fx.Node]] | None:
    """Tensor and indices of a read that equals a read of another operator's result; or None."""
    inner = cast("fx.Node", node.args[0])
    indices = cast("list[fx.Node]", node.args[1])
    if not isinstance(inner, fx.Node) or inner.op != "call_function":  # pyright: ignore[reportUnnecessaryIsInstance]
        return None
    source, *more = cast("tuple[Any, ...]", inner.args)
    if inner.target is aten.select.int and list(more[:1]) == [0] and isinstance(more[1], int):
        return source, [number_before(node, more[1]), *indices]
    if inner.target is aten.index.Tensor and _is_scalar_read(inner):
        return source, [*more[0], *indices]
    if not _is_scalar_read(node):
        return None
    count = len(indices)
    if inner.target is aten.index.Tensor and list(more[0][:count]) == [None] * count:
        return source, [*indices, *more[0][count:]]
    if inner.target is aten.unsqueeze.default and more[0] % inner.meta["val"].dim() < count:
        place = more[0] % inner.meta["val"].dim()
        return source, [*indices[:place], *indices[place + 1 :]]
    if inner.target is aten.gather.default and count == inner.meta["val"].dim():
        return _gathered(node, source, *more[:2])
    return None


def _gathered(
    node: fx.Node, source: fx.Node, dim: int, places: fx.Node
) -> tuple[fx.Node, list[fx.Node]] | None:
    """The same for a read of `source.gather(dim, places)`, if all places are one number."""
    indices = list(cast("list[fx.Node]", node.args[1]))
    sizes, others = list(source.meta["val"].shape), list(places.meta["val"].shape)
    dim %= len(sizes)
    sizes[dim] = others[dim] = 1
    while places.target in _SHAPES:
        places = cast("fx.Node", places.args[0])
    # Negative indices would count from elsewhere if other sizes differed.
    if sizes != others or places.meta["val"].dim() > 0:
        return None
    indices[dim] = places
    return source, indices


def number_before(node: fx.Node, number: int) -> fx.Node:
    """A number as an index, before `node`."""
    value = node.meta["val"]
    options = {"dtype": torch.int32, "device": value.device}
    with node.graph.inserting_before(node):
        made = node.graph.call_function(aten.full.default, ([], number), options)
    with hop.without_modes():  # a surrounding trace would keep it as a constant
        made.meta["val"] = value.new_empty((), dtype=torch.int32)
    return made


def _is_scalar_read(node: fx.Node) -> bool:
    indices = cast("Sequence[fx.Node | None]", node.args[1])
    return all(index is not None and index.meta["val"].dim() == 0 for index in indices)


def part_of(
    graph: fx.GraphModule,
    inputs: Sequence[fx.Node],
    outputs: Sequence[Any],
    *,
    single: bool = False,
) -> fx.GraphModule:
    """The part of `graph` that computes `outputs` from `inputs`."""
    part = fx.Graph()
    known: dict[fx.Node, fx.Node] = {}
    for position, node in enumerate(inputs):
        known[node] = part.placeholder(
            f"{node.name}" if node.op == "placeholder" else f"hoisted_{position}"
        )
        known[node].meta = dict(node.meta)
    for node in graph.graph.nodes:
        if node not in known and node.op not in ("placeholder", "output") and _ready(node, known):
            known[node] = part.node_copy(node, known.__getitem__)
    results = [known[o] if isinstance(o, fx.Node) else o for o in outputs]
    part.output(results[0] if single else tuple(results))
    module = fx.GraphModule(graph, part)
    module.graph.eliminate_dead_code()
    module.recompile()
    return module


def _ready(node: fx.Node, known: dict[fx.Node, fx.Node]) -> bool:
    return all(source in known for source in node.all_input_nodes)


class Read(NamedTuple):
    """One read of a captured tensor."""

    capture: int
    node: fx.Node  # its value is the element, or the short row, that is read; or the whole tensor
    indices: tuple[fx.Node, ...]
    elements: tuple[tuple[int, ...], ...] = ((),)  # positions in the row; a scalar has one: ()


class SplitReads(NamedTuple):
    """A score_mod, split at the reads of captures that need gradients.

    reader: the mod's inputs -> values that are read, then their indices. body: the mod's inputs,
    then values that are read -> score.
    """

    reads: list[Read]
    reader: fx.GraphModule | None
    body: fx.GraphModule

    @property
    def sites(self) -> tuple[int, ...]:
        """The `sites` of BackwardArgs: one for each element that is read."""
        return tuple(
            number
            for read in self.reads
            for element in read.elements
            for number in (read.capture, len(read.indices) + len(element))
        )

    def read(self, *inputs: Any) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Values that are read, and indices, for the mod's inputs."""
        found = () if self.reader is None else self.reader(*inputs)
        return found[: len(self.reads)], found[len(self.reads) :]

    def element_grads(self, grads: Sequence[Tensor]) -> list[Tensor]:
        """One scalar per element, from gradients of the values that are read."""
        found = []
        for read, grad in zip(self.reads, grads, strict=True):
            for element in read.elements:
                value = grad
                for position in element:
                    value = aten.select.int(value, 0, position)
                found.append(value)
        return found

    def element_indices(self, indices: Sequence[Tensor]) -> list[Tensor]:
        """The index of each element in its capture: indices of the read, then place in the row."""
        found: list[Tensor] = []
        start = 0
        for read in self.reads:
            own = indices[start : start + len(read.indices)]
            start += len(read.indices)
            for element in read.elements:
                device = read.node.meta["val"].device
                places = [
                    torch.full((), place, dtype=torch.int32, device=device) for place in element
                ]
                found += [*own, *places]
        return found


def split_reads(main: fx.GraphModule, wanted: Sequence[bool]) -> SplitReads:
    """Split a score_mod at its reads of captures.

    Args:
        main: graph of (score, b, h, q_idx, kv_idx, *captures) -> score.
        wanted: which captures get a gradient.

    Raises:
        UnsupportedFeatureError: one of these is used in other ways than reading single elements or
            short rows.
    """
    reads = _find_reads(main, wanted)
    outputs = [*(read.node for read in reads), *(i for read in reads for i in read.indices)]
    placeholders = main.graph.find_nodes(op="placeholder")
    reader = part_of(main, placeholders, outputs) if reads else None
    return SplitReads(reads, reader, _with_reads_as_inputs(main, reads))


def _find_reads(main: fx.GraphModule, wanted: Sequence[bool]) -> list[Read]:
    """Every read of a differentiable capture."""
    placeholders = main.graph.find_nodes(op="placeholder")[NUM_SCORE_INPUTS:]
    reads = []
    for position, (capture, want) in enumerate(zip(placeholders, wanted, strict=True)):
        if not want:
            continue
        users = [user for user in capture.users if user.target is not aten.detach.default]
        read = {user: _elements_read(user) for user in users}
        if None in read.values():
            whole = _elements_of(capture)
            if whole is None:
                user = next(user for user, elements in read.items() if elements is None)
                raise UnsupportedFeatureError(
                    feature=f"score_mod applies {user.target} to a captured tensor that needs a "
                    "gradient; this",
                    reason="only indexing such as table[h, q_idx - kv_idx] has a gradient; it "
                    f"must read one element or a row of at most {MAX_ROW}",
                    hint="Index the tensor down to one element, or detach it",
                )
            reads.append(Read(position, capture, (), whole))
        reads += [
            Read(position, n, tuple(n.args[1]), elements)
            for n, elements in read.items()
            if elements is not None
        ]
    return reads


def _elements_read(user: fx.Node) -> tuple[tuple[int, ...], ...] | None:
    """Positions in the row that an index operation reads; None for any other operation."""
    is_read = user.target is aten.index.Tensor and _is_scalar_read(user)
    return _elements_of(user) if is_read else None


def _elements_of(node: fx.Node) -> tuple[tuple[int, ...], ...] | None:
    """Positions in a row; None if it is not short."""
    if math.prod(map(hint_of, node.meta["val"].shape)) > MAX_ROW:
        return None
    shape = [int(size) for size in node.meta["val"].shape]  # guards on a symbolic size
    return tuple(itertools.product(*map(range, shape)))


def _with_reads_as_inputs(main: fx.GraphModule, reads: Sequence[Read]) -> fx.GraphModule:
    """`main` with one more input per read, whose value replaces the read."""
    copied: dict[fx.Node, fx.Node] = {}
    body = fx.Graph()
    outputs = body.graph_copy(main.graph, copied)
    last = body.find_nodes(op="placeholder")[-1]
    with body.inserting_after(last):
        inputs = [body.placeholder(f"read_{i}") for i in reversed(range(len(reads)))][::-1]
    for read, new in zip(reads, inputs, strict=True):
        old = copied[read.node]
        old.replace_all_uses_with(
            new, delete_user_cb=lambda user: user.target is not aten.detach.default
        )
    if isinstance(outputs, fx.Node):
        replaced = {copied[read.node]: new for read, new in zip(reads, inputs, strict=True)}
        outputs = replaced.get(outputs, outputs)
    body.output(outputs)
    module = fx.GraphModule(main, body)
    module.recompile()
    return module
