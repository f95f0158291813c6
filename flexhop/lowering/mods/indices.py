"""Keep computed indices of captured tensors in range: negative ones wrap, others are clamped.

PyTorch counts a negative index from the end; a kernel would read before the tensor. If the
analysis does not prove that an index is never negative, the tensor's size is added, as PyTorch
does. If the index may be too large, it is clamped. The result for an index outside [-size, size)
is therefore undefined, as on the GPU without device assertions, but the read is never out of
bounds.
An index of int64 keeps its lower half, which takes half of the instructions and registers.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, cast

import sympy
import torch
from torch import fx

from flexhop.analysis import Cases, Ends, copied, truth_of
from flexhop.compat.graphs import guards
from flexhop.compat.kernels import inductor
from flexhop.lowering.mods.analysed import analyse_kernel
from flexhop.ops.args import Site

aten = torch.ops.aten
convert = torch.ops.prims.convert_element_type.default
_LARGEST_SIZE = 2**31  # an index of a smaller dimension is an int32
LENGTH = 2**24  # kernels compute with positions in fp32, which represents every integer below this


def wrap_reads(
    graph: fx.GraphModule,
    inputs: Sequence[str],
    sizes: Mapping[str, Any],
    sites: Sequence[Site] = (),
) -> fx.GraphModule:
    """A copy of a user function whose reads, and indices of `sites`, stay within their tensors.

    Args:
        graph: (*inputs, *captures) -> value or values, such as a mod, or a joint graph.
        inputs: names of its first inputs.
        sizes: one more than the largest value of each input that is an index, by name.
        sites: those of a joint graph; their indices are among its outputs.
    """
    module, copies = copied(graph)
    reads = graph.graph.find_nodes(op="call_function", target=aten.index.Tensor)
    if not reads and not sites:
        return module
    wrap = _Wrap(graph, inputs, sizes, copies)
    for read in reads:
        arguments: Any = read.args
        source, indices = arguments
        copies[read].args = (copies[source], wrap.all(source, indices, copies[read]))
    captures = graph.graph.find_nodes(op="placeholder")[len(inputs) :]
    computed: Any = graph.graph.output_node().args[0]
    output = module.graph.output_node()
    for site in sites:
        indices = [computed[i] for i in site.indices]
        inside = wrap.all(captures[site.capture], indices, output)
        found, results = dict(zip(site.indices, inside, strict=True)), cast("Any", output.args[0])
        output.args = (tuple(found.get(i, result) for i, result in enumerate(results)),)
    module.recompile()
    return module


def clamp_reads(module: fx.GraphModule, indices: Collection[fx.Node]) -> None:
    """Clamp some indices at which captured tensors are read, in place."""
    for read in module.graph.find_nodes(op="call_function", target=aten.index.Tensor):
        arguments: Any = read.args
        source, places = arguments
        inside = []
        for axis, index in enumerate(places):
            if index in indices and index.meta["val"].dtype != torch.bool:
                with module.graph.inserting_before(read):
                    last, call = _last(source, axis), module.graph.call_function
                    lower = aten.clamp_max if isinstance(last, int) else aten.minimum
                    raised = call(aten.clamp_min.default, (index, 0))
                    index = call(lower.default, (raised, last))
            inside.append(index)
        read.args = (source, inside)


def _last(source: fx.Node, axis: int) -> Any:
    """The last index of a dimension: a number, or a node for a symbolic size."""
    size = source.meta["val"].shape[axis]
    if isinstance(size, int):
        return size - 1
    length = source.graph.call_function(aten.sym_size.int, (source, axis))
    return source.graph.call_function(operator.sub, (length, 1))


class _Wrap:
    """Writes indices that are in range.

    Args:
        graph, inputs, sizes: see `wrap_reads`.
        copies: of the graph's nodes, in the graph that is written to.
    """

    def __init__(
        self,
        graph: fx.GraphModule,
        inputs: Sequence[str],
        sizes: Mapping[str, Any],
        copies: Mapping[fx.Node, fx.Node],
    ) -> None:
        bounds = ((name, n if isinstance(n, int) else LENGTH) for name, n in sizes.items())
        self.found = analyse_kernel(graph, tuple(inputs), tuple(bounds))
        self.cases = Cases(self.found.forms, truth_of, frozenset())
        last = {name: inductor.as_expression(n) - 1 for name, n in sizes.items()}
        self.ends = Ends(self.found.forms, last, inductor.quotient)
        self.copies = copies

    def all(self, source: fx.Node, indices: Sequence[Any], before: fx.Node) -> list[Any]:
        """The indices of one read of `source`, each within [0, size) of its dimension.

        before: where to write.
        """
        shape = source.meta["val"].shape
        inside = []
        for axis, index in enumerate(indices):
            is_index = isinstance(index, fx.Node) and index.meta["val"].dtype != torch.bool
            with before.graph.inserting_before(before):
                inside.append(
                    self._inside(index, self.copies[source], axis, shape[axis])
                    if is_index
                    else self.copies.get(index, index)
                )
        return inside

    def _inside(self, index: fx.Node, source: fx.Node, axis: int, size: Any) -> fx.Node:
        graph, length = source.graph, inductor.as_expression(size)
        # A symbolic size becomes a node of its own.
        is_plain = isinstance(size, int)
        operand = size if is_plain else graph.call_function(aten.sym_size.int, (source, axis))
        nodes = [self.copies[index]]
        example = index.meta["val"]

        def write(target: Any, *args: Any) -> fx.Node:
            nodes.append(graph.call_function(target, args))
            nodes[-1].meta["val"] = example
            return nodes[-1]

        if example.dtype == torch.int64 and inductor.is_known(length < _LARGEST_SIZE):
            example = example.to(torch.int32)
            write(convert, nodes[0], torch.int32)
        if self._is_inside(index, length):
            return nodes[-1]
        if not self._is_always(index, lambda low, _: low >= 0):
            plain = nodes[-1]
            shifted = write(aten.add.Tensor, plain, operand)
            negative = write(aten.lt.Scalar, plain, 0)
            write(aten.where.self, negative, shifted, plain)
            if not self._is_always(index, lambda low, _: low >= -length):
                write(aten.maximum.default, nodes[-1], 0)
        if not self._is_always(index, lambda _, high: high <= length - 1):
            write(aten.minimum.default, nodes[-1], _last(source, axis))
        return nodes[-1]

    def _is_inside(self, index: fx.Node, length: Any) -> bool:
        """Whether a sum with sizes or numbers is in range, perhaps with a guard on symbols.

        A table of distances is read in range unless the program is wrong, but it has a size of its
        own. The sum is then computed right, even if parts of it wrap around.
        """
        total, shift = index, sympy.Integer(0)
        while (parts := _addends(total)) is not None:
            total, added = parts
            shift += added
        found = [] if total is index else self._in_cases(total)
        room = [part for low, high in found for part in (length - 1 - shift - high, shift + low)]
        return bool(found) and guards.guard_not_negative(room)

    def _is_always(self, index: fx.Node, holds: Callable[[Any, Any], Any]) -> bool:
        """Whether a relation with the lowest and the highest value of an index holds for
        certain."""
        facts = self.found[index]
        if inductor.is_known(holds(sympy.sympify(facts.low), sympy.sympify(facts.high))):
            return True
        ends = self._in_cases(index)
        return bool(ends) and all(inductor.is_known(holds(*end)) for end in ends)

    def _in_cases(self, index: fx.Node) -> list[tuple[Any, Any]]:
        """Bounds of an index, case by case; empty if they are not known."""
        cases = self.cases.of(self.found.known[index]) or ()
        bounds = (self.ends.of_form(case.form) for case in cases)
        return [(sympy.sympify(low), sympy.sympify(high)) for low, high in filter(None, bounds)]


def _addends(node: fx.Node) -> tuple[fx.Node, Any] | None:
    """A sum of a tensor and a number, which may be a symbol, as its two parts."""
    if node.target not in (aten.add.Tensor, aten.sub.Tensor) or len(node.args) != 2:
        return None
    first, second = node.args
    number = second.meta.get("val") if isinstance(second, fx.Node) else second
    is_whole = isinstance(number, (int, torch.SymInt)) and not isinstance(number, bool)
    if node.kwargs or not isinstance(first, fx.Node) or not is_whole:
        return None
    added = inductor.as_expression(number)
    return first, added if node.target is aten.add.Tensor else -added
