"""Gradients of a row of a captured tensor, one element after the other in a loop of the kernel.

Each element of a row has a gradient: a function of its own. Written out for 32 weights, kernels
are thousands of lines long, which take a minute to compile, and spill. But the functions are one,
of the number of the element.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import fx

from flexhop.analysis import copied, elements_of, reached
from flexhop.ops.args import Site

aten = torch.ops.aten
_PRODUCTS = (aten.mm.default, aten.bmm.default, aten.addmm.default, aten.baddbmm.default)
_MANY = 17  # elements of a row; gradients of fewer are written out, unless each is long
_FEW = 4  # elements; of these, all gradients are written out
_LONG = 64  # terms that the gradient of an element adds up


class Loop(NamedTuple):
    """Sites of a row, in order.

    first: number of the first site. sites: how many there are. value, indices: numbers of the
    outputs that are functions of the element; see `with_loops`.
    """

    first: int
    sites: int
    value: int
    indices: tuple[int, ...]


def with_loops(
    graph: fx.GraphModule, sites: Sequence[Site]
) -> tuple[fx.GraphModule, tuple[Loop, ...]]:
    """A joint graph with functions of one element for each row of sites.

    Args:
        graph: (score, b, h, q_idx, kv_idx, grad_score, *captures) -> values and indices.
        sites: its sites.

    Returns:
        The graph, with one more input, the number of the element, and the functions as further
        outputs; and the rows. The graph itself if there is no long row.
    """
    rows = list(_rows(graph, sites))
    if not rows:
        return graph, ()
    module, copies = copied(graph)
    output = module.graph.output_node()
    outputs = list(cast("Sequence[Any]", output.args[0]))
    last = module.graph.find_nodes(op="placeholder")[-1]
    example = last.meta["val"]
    with module.graph.inserting_after(last):
        element = module.graph.placeholder("element")
    element.meta["val"] = example.new_empty((), dtype=torch.int32)
    loops = []
    for first, row in rows:
        site, shape = sites[first], row.meta["val"].shape
        with module.graph.inserting_before(output):
            places = _places(element, shape)
            value = module.graph.call_function(aten.index.Tensor, (copies[row], places))
        value.meta["val"] = row.meta["val"].new_empty(())
        kept = site.indices[: len(site.indices) - len(shape)]
        start = len(outputs)
        outputs += [value, *places]
        indices = (*kept, *range(start + 1, len(outputs)))
        loops.append(Loop(first, math.prod(shape), start, indices))
    output.args = (tuple(outputs),)
    module.recompile()
    return module, tuple(loops)


def _rows(graph: fx.GraphModule, sites: Sequence[Site]) -> Iterator[tuple[int, fx.Node]]:
    """The gradients of long rows, and the numbers of their first sites."""
    outputs = cast("Sequence[Any]", graph.graph.output_node().args[0])
    parts = [_part(outputs[site.value]) for site in sites]
    number = 0
    while number < len(sites):
        row, shape = parts[number][0], ()
        if row is not None:
            shape = tuple(row.meta["val"].shape)
        expected = [(row, place) for place in itertools.product(*map(range, shape))]
        count = len(expected) if row is not None else 1
        found = parts[number : number + count]
        same = {(s.capture, s.indices[: len(s.indices) - len(shape)])
                for s in _with_outputs(sites[number : number + count], outputs)}  # fmt: skip
        is_row = row is not None and found == expected and len(same) == 1
        if row is not None and is_row and _pays(row, count):
            yield number, row
            number += count
        else:
            number += 1


def _pays(row: fx.Node, count: int) -> bool:
    """Whether a loop is better than the gradients of all elements, one after the other."""
    return count >= _MANY or (count > _FEW and sum(map(_terms, reached(row))) >= _LONG)


def _terms(node: fx.Node) -> int:
    """How many terms an operator adds up."""
    sizes = [elements_of(source) for source in node.all_input_nodes]
    if node.target in _PRODUCTS:
        left, right = (n.meta["val"].shape for n in node.all_input_nodes[-2:])
        return math.prod(left) * right[-1] if left[-1] > 1 else 0
    return max(sizes) if sizes and max(sizes) > elements_of(node) else 0


def _with_outputs(sites: Sequence[Site], outputs: Sequence[Any]) -> Iterator[Site]:
    """Sites with the nodes of their indices in place of their numbers."""
    for site in sites:
        yield site._replace(indices=cast("Any", tuple(outputs[i] for i in site.indices)))


def _part(value: Any) -> tuple[fx.Node | None, tuple[int, ...]]:
    """The tensor of which a node is an element, and its place; None if it is computed."""
    place: list[int] = []
    while isinstance(value, fx.Node) and value.target is aten.select.int:
        source, dim, number = cast("tuple[fx.Node, int, int]", value.args)
        if dim != 0:
            return None, ()
        place.insert(0, number)
        value = source
    is_row = isinstance(value, fx.Node) and len(place) == value.meta["val"].dim() > 0
    return (value, tuple(place)) if is_row else (None, ())


def _places(element: fx.Node, shape: Sequence[int]) -> list[fx.Node]:
    """The place of an element in a row, by dimension."""
    graph, found, after = element.graph, [], 1
    for dim in reversed(range(len(shape))):
        place = element
        if after > 1:
            place = graph.call_function(
                aten.div.Tensor_mode, (place, after), {"rounding_mode": "floor"}
            )
            place.meta["val"] = element.meta["val"]
        if dim > 0:
            place = graph.call_function(aten.remainder.Scalar, (place, shape[dim]))
            place.meta["val"] = element.meta["val"]
        after *= int(shape[dim])
        found.insert(0, place)
    return found
