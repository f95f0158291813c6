"""Read one element of a computed row by computing that element: `(w @ x + b)[h]`.

A product, a sum or a function of rows is computed for the element that is read, from the elements
that it needs: `(w[h] * x).sum() + b[h]`. Kernels compute less. And captured tensors are read at
single rows, which have gradients, where all of their entries would be too many.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from flexhop.analysis import dependents
from flexhop.compat.operators import hop
from flexhop.ops.graphs.beyond import is_beyond_kernels
from flexhop.ops.graphs.pick_rules import RULES, Picks, elementwise, picked
from flexhop.ops.graphs.reads import NUM_SCORE_INPUTS, number_before

aten = torch.ops.aten


def pick_first(graph: fx.GraphModule) -> None:
    """Move reads of computed rows towards captured tensors, in place.

    What depends on captured tensors alone stays: it is computed before the kernel.

    Args:
        graph: (score, b, h, q_idx, kv_idx, *captures) -> score, without writes.
    """
    inputs = graph.graph.find_nodes(op="placeholder")[:NUM_SCORE_INPUTS]
    picker = _Picker(graph.graph, inputs)
    for node in list(graph.graph.nodes):
        source, picks = picked(node)
        if source is not None and (found := picker.by_rule(node, source, picks)) is not None:
            node.replace_all_uses_with(found)
    graph.graph.eliminate_dead_code()
    graph.recompile()


class _Picker:
    """Writes elements of computed tensors.

    Args:
        graph: where to write.
        inputs: score, b, h, q and k.
    """

    def __init__(self, graph: fx.Graph, inputs: Sequence[fx.Node]) -> None:
        self._graph, self._per_element = graph, {*inputs, *dependents(inputs)}
        score, _, _, q, k = inputs
        apart = ({n, *dependents([n])} for n in (score, q, k))
        self._of_score, self._of_query, self._of_key = apart
        self._before: Any = None
        self._known: dict[Any, fx.Node | None] = {}
        self._reads: dict[Any, fx.Node] = {}

    def by_rule(self, before: fx.Node, source: fx.Node, picks: Picks) -> fx.Node | None:
        """The elements, written before a node; None if no rule computes them."""
        self._before = before
        return self._ruled(source, _normal(source, picks))

    def _ruled(self, source: fx.Node, picks: Picks) -> fx.Node | None:
        if source not in self._per_element or source.op != "call_function":
            return None
        if all(pick is None for pick in picks):
            return source
        key = (source, picks)
        if key not in self._known:
            found = self._by_target(source, picks)
            is_same = found is not None and found.meta["val"].dtype == source.meta["val"].dtype
            self._known[key] = found if is_same else None
        return self._known[key]

    def _by_target(self, source: fx.Node, picks: Picks) -> fx.Node | None:
        if not isinstance(source.meta.get("val"), Tensor):
            return None
        if any(type(size) is not int for size in source.meta["val"].shape):
            return None
        if is_beyond_kernels(source) and self._is_made_before(source):
            return None
        rule = RULES.get(source.target)
        if rule is None and torch.Tag.pointwise in getattr(source.target, "tags", ()):
            rule = elementwise
        return None if rule is None else rule(self, source, picks)

    def _is_made_before(self, node: fx.Node) -> bool:
        """Whether a row that no kernel computes is computed before it; see tables.py."""
        is_of_both = node in self._of_query and node in self._of_key
        return node not in self._of_score and not is_of_both

    def __call__(self, source: fx.Node, picks: Sequence[Any]) -> fx.Node:
        """The elements of a tensor."""
        picks = _normal(source, tuple(picks))
        if all(pick is None for pick in picks):
            return source
        found = self._ruled(source, picks)
        if found is None:
            found = self._reads.get((source, picks)) or self._read(source, picks)
            self._reads[source, picks] = found
        return found

    def _read(self, source: fx.Node, picks: Picks) -> fx.Node:
        """source[picks] by an index of leading dimensions."""
        ones = [d for d, pick in enumerate(picks) if pick == 0 and source.meta["val"].size(d) == 1]
        if ones:
            source = self.call(aten.squeeze.dims, source, ones)
            picks = tuple(pick for d, pick in enumerate(picks) if d not in ones)
        asked = [d for d, pick in enumerate(picks) if pick is not None]
        if not asked:
            return source
        others = [d for d, pick in enumerate(picks) if pick is None]
        if asked != list(range(len(asked))):
            source = self.call(aten.permute.default, source, [*asked, *others])
        indices = [self._place(picks[d]) for d in asked]
        return self.call(aten.index.Tensor, source, indices)

    def _place(self, pick: Any) -> fx.Node:
        return number_before(self._before, pick) if isinstance(pick, int) else pick

    def call(self, target: Any, *args: Any, **options: Any) -> fx.Node:
        """A new node."""
        with self._graph.inserting_before(self._before):
            new = self._graph.call_function(target, args, options)
        with hop.without_modes():
            values = fx.map_arg((args, options), lambda n: n.meta["val"])
            new.meta["val"] = target(*values[0], **values[1])
        for known in (self._per_element, self._of_score, self._of_query, self._of_key):
            if not known.isdisjoint(new.all_input_nodes):
                known.add(new)
        return new


def _normal(source: fx.Node, picks: Picks) -> Picks:
    """The picks with numbers counted from the start, and 0 where there is one element.

    Of a dimension of unknown length, a number stays: no rule reads computed rows of that.
    """

    def normal(pick: Any, length: Any) -> Any:
        if pick is None or type(length) is not int:
            return pick
        if length == 1:
            return 0
        return pick % length if type(pick) is int else pick

    return tuple(map(normal, picks, source.meta["val"].shape))
