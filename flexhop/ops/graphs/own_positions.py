"""What depends on a packed key's position, computed once per key instead of once per score.

In packed sequences a key's position in its sequence is that of the query plus a distance
(sequences/row_tables.py). A table of keys would be read there once per score, and its gradient
added as often; `kv_idx // 7` would be computed as often. `bounded` knows an equal value that is
computed from kv_idx alone: reads and functions of the position use it, and sums and comparisons
keep the distance.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from flexhop.analysis import Analysis, copied, name_of
from flexhop.mods.bounded import BOUNDED

aten = torch.ops.aten
_COMPARED = {getattr(aten, name).Tensor for name in ("sub", "gt", "ge", "lt", "le", "eq", "ne")}
_SEARCHES = (torch.bucketize, torch.searchsorted, torch.isin)
# These may belong to a distance, such as q_idx - kv_idx, or say where a range ends.
_LINEAR = frozenset({
    "_to_copy", "add", "alias", "clone", "convert_element_type", "detach", "eq", "ge", "gt", "le",
    "lt", "mul", "ne", "neg", "rsub", "sub",
})  # fmt: skip
_PER_QUERY = ("score", "q")  # inputs on which a value of keys cannot depend


def read_at_own_positions(mod: fx.GraphModule, inputs: Sequence[str]) -> fx.GraphModule:
    """The same mod, with reads that depend on the key alone.

    Args:
        mod: (*inputs, *captures) -> value or values.
        inputs: of score, b, h, q and k, those that it takes.
    """
    if not _positions(mod):
        return mod
    mod, _ = copied(mod)
    for node in _positions(mod):
        _Redirected(mod.graph, node, inputs).redirect()
    mod.graph.eliminate_dead_code()
    mod.recompile()
    return mod


def may_have_positions(mod: Any) -> bool:
    """Whether a mod may call `bounded`. A graph, traced or Dynamo's, says so without a trace."""
    if not isinstance(mod, fx.GraphModule):
        return True
    return any(node.target in (BOUNDED, BOUNDED.overloadpacket) for node in mod.graph.nodes)


def may_search(mod: Any) -> bool:
    """Whether a mod may compute with rows of numbers. Dynamo's graph has examples of values."""
    if not isinstance(mod, fx.GraphModule):
        return True
    nodes = [node for node in mod.graph.nodes if node.op.startswith("call_")]
    examples = (node.meta.get("example_value", node.meta.get("val")) for node in nodes)
    is_row = any(isinstance(example, Tensor) and example.dim() for example in examples)
    return is_row or any(node.target in _SEARCHES for node in nodes)


def may_see_head(mask: Any) -> bool:
    """Whether a mask_mod may depend on the head. Dynamo's graph says whether it uses it."""
    if not isinstance(mask, fx.GraphModule):
        return True
    inputs = mask.graph.find_nodes(op="placeholder")
    return len(inputs) > 1 and len(inputs[1].users) > 0


def _positions(mod: fx.GraphModule) -> list[fx.Node]:
    """Calls of `bounded` that know an equal value of the key."""
    calls = mod.graph.find_nodes(op="call_function", target=BOUNDED)
    return [node for node in calls if node.args[2]]


def packed_distance(found: Analysis, node: fx.Node) -> tuple[int, int] | None:
    """The sign of q_idx - kv_idx, and what is added, in a difference or comparison of positions.

    None for other nodes, and for positions of sequences that are cut differently.

    Args:
        found: with BOUNDED among what is `held`.
        node: of the analysed graph, or of its mod.
    """
    operands: Any = node.args
    is_compared = node.target in _COMPARED and not node.kwargs
    if not is_compared or not all(isinstance(operand, fx.Node) for operand in operands):
        return None
    if all(operand.target is not BOUNDED for operand in operands):
        return None
    known = (found.known.get(operand, operand) for operand in operands)
    first, second = map(found.forms.form, known)
    if first is None or second is None:
        return None
    return found.forms.distance(first.plus(second, -1))


class _Redirected:
    """Reads at one position.

    Args:
        graph: of the mod.
        position: a call of `bounded`.
        inputs: as above.
    """

    def __init__(self, graph: fx.Graph, position: fx.Node, inputs: Sequence[str]) -> None:
        equals: Any = position.args[2]
        own, *same = equals
        self.graph = graph
        # Of values, what kernels compute in their place; None if that depends on the query.
        self.known: dict[fx.Node, fx.Node | None] = {position: own}
        self.known.update(zip(same[::2], same[1::2], strict=True))
        placeholders = graph.find_nodes(op="placeholder")
        self._has_scores = "score" in inputs
        for name, node in zip(inputs, placeholders, strict=False):
            if name in _PER_QUERY:
                self.known[node] = None
        self.uses = {position}  # values that depend on the position
        self.before = position  # where to write

    def redirect(self) -> None:
        """Use the key's own position in what does not depend on the query besides."""
        for node in list(self.graph.nodes):
            if self.uses.isdisjoint(node.all_input_nodes):
                continue
            self.uses.add(node)
            # What is equal for keys may come later than what it is computed from for queries.
            self.before = node
            new = self.of_key(node) if self._is_of_position(node) else None
            if new is not None:
                node.replace_all_uses_with(new)

    def _is_of_position(self, node: fx.Node) -> bool:
        """Whether a node reads at the position, or in a score_mod, is a function of it.

        Masks keep `kv_idx // 64`, which may be a range of keys for each query.
        """
        if node.target is aten.index.Tensor:
            return True
        is_function = node.op == "call_function" and node.target is not BOUNDED
        return self._has_scores and is_function and name_of(node) not in _LINEAR

    def of_key(self, node: fx.Node) -> fx.Node | None:
        """An equal value that does not depend on the query; None if there is none."""
        if node not in self.known:
            values = {source: self.of_key(source) for source in node.all_input_nodes}
            self.known[node] = self._copied(node, values)
        return self.known[node]

    def _copied(self, node: fx.Node, values: dict[fx.Node, fx.Node | None]) -> fx.Node | None:
        if any(value is None for value in values.values()):
            return None
        if all(source is value for source, value in values.items()):
            return node
        with self.graph.inserting_before(self.before):
            return self.graph.node_copy(node, lambda source: values[source] or source)
