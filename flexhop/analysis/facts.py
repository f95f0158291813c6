"""The facts about each node of a mod, as other rooms ask for them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import fx

from flexhop.analysis.cost import instructions_of, rate
from flexhop.analysis.forms import Form, Forms, Seen
from flexhop.analysis.graph import Mod, read_graph
from flexhop.analysis.interval import INDICES

LARGEST_INDEX = 2**31  # one more than the largest int32: of sizes that nobody knows


class Facts(NamedTuple):
    """What is known about one node.

    Args:
        depends: inputs that it depends on: score, grad, b, h, q, k.
        seen: the same, with what it sees of q and k as coordinates: "q", "k", or a Coordinate,
            one integer of both such as their distance.
        form: a sum of integer coefficients times nodes, plus a number, modulo the width of its
            dtype; None for what is no integer.
        low, high: plain numbers that it lies between for all scores; infinite if unknown.
        cost: instructions per score, of this node alone, at the rate at which it is computed.
    """

    depends: frozenset[str]
    seen: Seen
    form: Form | None
    low: Any
    high: Any
    cost: float


class Analysis(Mapping[fx.Node, Facts]):
    """Facts about the nodes of a graph.

    Args:
        mod: the mod in the form that the analysis reads.
        known: for each node of the graph that was given, the node of `mod` with its value.
        forms: dependence and forms of the nodes of `mod`.
    """

    def __init__(self, mod: Mod, known: Mapping[fx.Node, Any], forms: Forms) -> None:
        self.mod, self.known, self.forms = mod, known, forms
        self._facts: dict[fx.Node, Facts] = {}

    def __iter__(self) -> Iterator[fx.Node]:
        return iter(self.known)

    def __len__(self) -> int:
        return len(self.known)

    def __getitem__(self, node: fx.Node) -> Facts:
        if node not in self._facts:
            self._facts[node] = self._find(self.known[node])
        return self._facts[node]

    def _find(self, node: Any) -> Facts:
        forms = self.forms
        depends, (low, high) = forms.depends_on(node), forms.bounds_of(node)
        is_computed = isinstance(node, fx.Node) and node.op == "call_function"
        cost = instructions_of(node) * rate(depends) if is_computed else 0.0
        return Facts(depends, forms.seen(node), forms.form(node), low, high, cost)


def analyse(
    module: fx.GraphModule,
    inputs: Sequence[str] = INDICES,
    sizes: Mapping[str, int] | None = None,
    held: Collection[Any] = (),
) -> Analysis:
    """What every node of a mod depends on, in which linear form and in which range.

    Args:
        module: (*inputs, *captures) -> value or values, of operators of PyTorch, with examples in
            `meta["val"]`. It is not changed. No captured tensor is looked at.
        inputs: names of its first inputs: of score, b, h, q, k and grad.
        sizes: of b, h, q and k, by these names, or bounds on them; what is left out may be any.
        held: operators of two operands that have the form of the first, wherever scores count.
    """
    mod, known = read_graph(module, inputs)
    bounds = {name: LARGEST_INDEX for name in INDICES if name in mod.inputs}
    return Analysis(mod, known, Forms(mod, bounds | dict(sizes or {}), held))
