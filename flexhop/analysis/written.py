"""Linear forms, and sums and products, as operators of a graph."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from flexhop.analysis.facts import Analysis
from flexhop.analysis.forms import Form
from flexhop.compat.compilation import module_of

aten, prims = torch.ops.aten, torch.ops.prims
convert = prims.convert_element_type.default


def copied(module: fx.GraphModule) -> tuple[fx.GraphModule, dict[fx.Node, fx.Node]]:
    """A copy to write to, and the copy of each node."""
    graph, known = fx.Graph(), dict[fx.Node, fx.Node]()
    graph.output(graph.graph_copy(module.graph, known))
    return module_of(module, graph), known


def settled(written: fx.GraphModule, module: fx.GraphModule) -> fx.GraphModule:
    """The copy of a graph, ready for use; the graph itself if nothing was written to the copy."""
    written.graph.eliminate_dead_code()
    if str(written.graph) == str(module.graph):
        return module
    written.recompile()
    return written


def returning(module: fx.GraphModule, value: Any) -> fx.GraphModule:
    """A function of a module's inputs that returns a number, or the value of a node, in fp32."""
    result, copies = copied(module)
    output = result.graph.output_node()
    example = result.graph.find_nodes(op="placeholder")[0].meta["val"]
    with result.graph.inserting_before(output):
        if isinstance(value, fx.Node):
            number = result.graph.call_function(convert, (copies[value], torch.float32))
        else:
            options = {"dtype": torch.float32, "device": example.device}
            number = result.graph.call_function(aten.full.default, ([], float(value)), options)
    number.meta["val"] = example
    output.args = (number,)
    result.graph.eliminate_dead_code()
    result.recompile()
    return result


class Writer:
    """Writes linear forms of nodes.

    Args:
        found: the analysis of the graph that was copied.
        copies: the copy of each of its nodes.
    """

    def __init__(self, found: Analysis, copies: Mapping[fx.Node, fx.Node]) -> None:
        values = reversed(list(found.known.items()))  # of equal nodes, the first one
        self.copies = {value: copies[node] for node, value in values if node in copies}

    def write(self, before: fx.Node, form: Form) -> Any:
        """The sum, in front of a node: a node, or a number if the form has no terms."""
        result: Any = None
        for atom, factor in sorted(form.terms.items(), key=lambda term: term[1] < 0):
            node = self.times(before, self.copies[atom], abs(factor))
            if result is None:
                result = node if factor > 0 else self.call(before, aten.neg.default, node)
            else:
                kind = aten.add.Tensor if factor > 0 else aten.sub.Tensor
                result = self.call(before, kind, result, node)
        return self.plus(before, 0 if result is None else result, form.offset)

    def times(self, before: fx.Node, a: Any, b: Any) -> Any:
        """The product of nodes or numbers, in front of a node."""
        if 0 in (a, b):
            return 0
        if 1 in (a, b):
            return b if a == 1 else a
        return self._combined(before, operator.mul, aten.mul.Tensor, a, b)

    def plus(self, before: fx.Node, a: Any, b: Any) -> Any:
        """The sum of nodes or numbers, in front of a node."""
        if 0 in (a, b):
            return b if a == 0 else a
        return self._combined(before, operator.add, aten.add.Tensor, a, b)

    def _combined(self, before: fx.Node, of_numbers: Any, target: Any, a: Any, b: Any) -> Any:
        if isinstance(a, fx.Node):
            return self.call(before, target, a, b)
        return self.call(before, target, b, a) if isinstance(b, fx.Node) else of_numbers(a, b)

    def call(self, before: fx.Node, target: Any, *args: Any) -> fx.Node:
        """A new operator in front of a node."""
        examples = fx.map_arg(args, lambda node: node.meta["val"])
        with before.graph.inserting_before(before):
            new = before.graph.call_function(target, args)
        new.meta["val"] = target(*examples)
        return new

    def replace(self, node: fx.Node, new: fx.Node) -> None:
        """Use a value in place of a node, in its dtype."""
        dtype = node.meta["val"].dtype
        if new.meta["val"].dtype != dtype:
            new = self.call(node, prims.convert_element_type.default, new, dtype)
        node.replace_all_uses_with(new)
