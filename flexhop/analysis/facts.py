"""The facts about each node of a mod, for other rooms."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from torch import fx

from flexhop.analysis.cost import instructions_of, instructions_of_quotient, is_quotient, rate
from flexhop.analysis.forms import Form, Forms, Seen
from flexhop.analysis.graph import Mod, read_graph
from flexhop.analysis.interval import INDICES

LARGEST_INDEX = 2**31  # one more than the largest int32: for unknown sizes


class Facts(NamedTuple):
    """The facts about one node.

    Args:
        depends: inputs that it depends on: score, grad, b, h, q, k.
        seen: the same, with its dependence on q and k as coordinates: "q", "k", or a Coordinate,
            one integer of both such as their distance.
        form: a sum of integer coefficients times nodes, plus a constant, modulo the width of its
            dtype; None if it is not an integer.
        low, high: plain bounds over all scores; infinite if unknown.
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
        mod: the mod in the analysis's form.
        known: for each node of the original graph, the node of `mod` with its value.
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

    def instructions(
        self,
        nodes: Iterable[fx.Node] | None = None,
        of: Callable[[fx.Node], float] | None = None,
        rows: Literal["q", "k"] = "q",
    ) -> float:
        """Instructions per score of some nodes of `mod`, by default of all that compute.

        of: instructions of one operator, at any rate; by default `instructions_of`. rows: see
            `rate`.
        """
        of = self.instructions_of if of is None else of
        chosen = self.mod.operators if nodes is None else nodes
        return sum(of(node) * rate(self.forms.depends_on(node), rows) for node in chosen)

    def instructions_of(self, node: fx.Node) -> float:
        """Instructions of one operator of `mod`, at any rate, given what its operands may be."""
        if is_quotient(node) and self.forms.bounds_of(node.args[0])[0] >= 0:
            return instructions_of_quotient(node)
        return instructions_of(node)

    def _find(self, node: Any) -> Facts:
        forms = self.forms
        depends, (low, high) = forms.depends_on(node), forms.bounds_of(node)
        is_computed = isinstance(node, fx.Node) and node.op == "call_function"
        cost = self.instructions([node]) if is_computed else 0.0
        return Facts(depends, forms.seen(node), forms.form(node), low, high, cost)


def analyse(
    module: fx.GraphModule,
    inputs: Sequence[str] = INDICES,
    sizes: Mapping[str, int] | None = None,
    held: Collection[Any] = (),
    kept: Collection[fx.Node] = (),
) -> Analysis:
    """Analyse every node of a mod: what it depends on, its linear form, its range.

    Args:
        module: (*inputs, *captures) -> value or values, of PyTorch operators, with examples in
            `meta["val"]`. It is not changed. No captured tensor is read.
        inputs: names of its first inputs, among score, b, h, q, k and grad.
        sizes: sizes of b, h, q and k, by name, or bounds on them; missing ones may be any.
        held: operators of two operands that have the form of the first, wherever scores are used.
        kept: see `read_graph`.
    """
    mod, known = read_graph(module, inputs, kept)
    bounds = {name: LARGEST_INDEX for name in INDICES if name in mod.inputs}
    return Analysis(mod, known, Forms(mod, bounds | dict(sizes or {}), held))
