"""Keep computed indices of captured tensors in range: negative ones wrap, others are clamped.

PyTorch counts a negative index from the end; a kernel would read before the tensor. Each index is
bounded by interval arithmetic over b, h, q_idx, kv_idx and constants. If it may be negative, the
tensor's size is added, as PyTorch does. If it may be too large, it is clamped. The result for an
index outside [-size, size) is therefore undefined, as on the GPU without device assertions, but
the read is never out of bounds.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import sympy
import torch
from torch import fx

from flexhop.compat import inductor
from flexhop.ops.args import Site

aten, prims = torch.ops.aten, torch.ops.prims


class Range(NamedTuple):
    """Smallest and largest value of an integer node; None if unknown."""

    low: Any
    high: Any


UNKNOWN = Range(None, None)


def wrap_reads(
    graph: fx.GraphModule, positions: Mapping[int, Range], sites: Sequence[Site] = ()
) -> fx.GraphModule:
    """A copy of a user function whose reads, and indices of `sites`, stay within their tensors.

    Args:
        graph: a mod, or a joint graph.
        positions: the range of each input that is an index, by input number.
        sites: those of a joint graph; their indices are among its outputs.
    """
    copied = fx.GraphModule(graph, _copy(graph.graph))
    inputs = copied.graph.find_nodes(op="placeholder")
    ranges = {inputs[number]: found for number, found in positions.items()}
    for read in list(copied.graph.find_nodes(op="call_function", target=aten.index.Tensor)):
        source, indices = read.args
        with copied.graph.inserting_before(read):
            read.args = (source, _inside(copied.graph, source, indices, ranges))
    if sites:
        _wrap_sites(copied.graph, inputs[-_capture_count(inputs, positions) :], sites, ranges)
    copied.recompile()
    return copied


def _capture_count(inputs: Sequence[fx.Node], positions: Mapping[int, Range]) -> int:
    """Captures come after the gradient of the score, which comes after the positions."""
    return len(inputs) - (max(positions) + 2)


def _copy(graph: fx.Graph) -> fx.Graph:
    copy = fx.Graph()
    known: dict[fx.Node, fx.Node] = {}
    copy.output(copy.graph_copy(graph, known))
    return copy


def _wrap_sites(
    graph: fx.Graph,
    captures: Sequence[fx.Node],
    sites: Sequence[Site],
    ranges: dict[fx.Node, Range],
) -> None:
    output = graph.output_node()
    results: list[Any] = list(cast("Any", output.args[0]))
    with graph.inserting_before(output):
        for site in sites:
            indices = [results[i] for i in site.indices]
            wrapped = _inside(graph, captures[site.capture], indices, ranges)
            for position, index in zip(site.indices, wrapped, strict=True):
                results[position] = index
    output.args = (tuple(results),)


def _inside(
    graph: fx.Graph, source: fx.Node, indices: Sequence[Any], ranges: dict[fx.Node, Range]
) -> list[Any]:
    """The indices of one read, each within [0, size) of its dimension."""
    sizes = source.meta["val"].shape
    inside = []
    for axis, index in enumerate(indices):
        if not isinstance(index, fx.Node) or index.meta["val"].dtype == torch.bool:
            inside.append(index)
            continue
        inside.append(_inside_one(graph, index, (source, axis, sizes[axis]), ranges))
    return inside


def _inside_one(
    graph: fx.Graph, index: fx.Node, where: tuple[fx.Node, int, Any], ranges: dict[fx.Node, Range]
) -> fx.Node:
    source, axis, size = where
    found = range_of(index, ranges)
    length = inductor.as_expression(size)
    # A symbolic size becomes a node of its own.
    operand = (
        size if isinstance(size, int) else graph.call_function(aten.sym_size.int, (source, axis))
    )
    added = []
    if found.low is None or not inductor.is_known(found.low >= 0):
        negative = graph.call_function(aten.lt.Scalar, (index, 0))
        shifted = graph.call_function(aten.add.Tensor, (index, operand))
        added.append(graph.call_function(aten.where.self, (negative, shifted, index)))
        if found.low is None or not inductor.is_known(found.low >= -length):
            added.append(graph.call_function(aten.maximum.default, (added[-1], 0)))
    if found.high is None or not inductor.is_known(found.high < length):
        last = (
            size - 1 if isinstance(size, int) else graph.call_function(operator.sub, (operand, 1))
        )
        added.append(graph.call_function(aten.minimum.default, ((added or [index])[-1], last)))
    for node in added:
        node.meta["val"] = index.meta["val"]
    return (added or [index])[-1]


def range_of(node: Any, ranges: dict[fx.Node, Range]) -> Range:
    """The range of an integer node; `ranges` caches results."""
    if isinstance(node, (int, torch.SymInt)) and not isinstance(node, bool):
        value = inductor.as_expression(node)
        return Range(value, value)
    if not isinstance(node, fx.Node):
        return UNKNOWN
    if node not in ranges:
        ranges[node] = _range_of_call(node, ranges)
    return ranges[node]


def _range_of_call(node: fx.Node, ranges: dict[fx.Node, Range]) -> Range:
    target = getattr(node.target, "overloadpacket", node.target)
    options = {k: v for k, v in node.kwargs.items() if k not in _HARMLESS}
    rounding = options.pop("rounding_mode", None)
    rule = _RULES.get(_divide if target is aten.div and rounding is not None else target)
    if rule is None or options or not isinstance(node.meta.get("val"), torch.Tensor):
        return UNKNOWN
    return rule(*(range_of(argument, ranges) for argument in node.args))


def _known(*values: Any) -> bool:
    return all(value is not None for value in values)


def _add(a: Range, b: Range) -> Range:
    return Range(
        a.low + b.low if _known(a.low, b.low) else None,
        a.high + b.high if _known(a.high, b.high) else None,
    )


def _negative(a: Range) -> Range:
    return Range(None if a.high is None else -a.high, None if a.low is None else -a.low)


def _subtract(a: Range, b: Range) -> Range:
    return _add(a, _negative(b))


def _multiply(a: Range, b: Range) -> Range:
    corners = (a.low, a.high, b.low, b.high)
    if _known(*corners) and all(corner.is_number for corner in corners):
        products = [x * y for x in a for y in b]
        return Range(min(products), max(products))
    if _known(a.low, b.low) and inductor.is_known(a.low >= 0) and inductor.is_known(b.low >= 0):
        return Range(a.low * b.low, a.high * b.high if _known(a.high, b.high) else None)
    return UNKNOWN


def _smaller(a: Range, b: Range) -> Range:
    """The range of min(a, b)."""
    low = sympy.Min(a.low, b.low) if _known(a.low, b.low) else None
    highs = [high for high in (a.high, b.high) if high is not None]
    return Range(low, sympy.Min(*highs) if highs else None)


def _larger(a: Range, b: Range) -> Range:
    return _negative(_smaller(_negative(a), _negative(b)))


def _clamp(a: Range, low: Range = UNKNOWN, high: Range = UNKNOWN) -> Range:
    raised = a if low.low is None else _larger(a, low)
    return raised if high.high is None else _smaller(raised, high)


def _choose(_: Range, a: Range, b: Range) -> Range:
    return Range(
        sympy.Min(a.low, b.low) if _known(a.low, b.low) else None,
        sympy.Max(a.high, b.high) if _known(a.high, b.high) else None,
    )


def _magnitude(a: Range) -> Range:
    return Range(sympy.Integer(0), _larger(a, _negative(a)).high)


def _remainder(_: Range, b: Range) -> Range:
    """Remainder by a positive divisor; the result has the divisor's sign."""
    if b.low is None or b.high is None or not inductor.is_known(b.low > 0):
        return UNKNOWN
    return Range(sympy.Integer(0), b.high - 1)


def _divide(a: Range, b: Range) -> Range:
    """Rounded quotient of non-negative by positive numbers."""
    if (
        not _known(a.low, b.low)
        or not inductor.is_known(a.low >= 0)
        or not inductor.is_known(b.low > 0)
    ):
        return UNKNOWN
    if _known(a.high, b.high) and a.high.is_number and b.low.is_number:
        return Range(sympy.Integer(0), a.high // b.low)
    return Range(sympy.Integer(0), a.high)


def _mask_bits(a: Range, b: Range) -> Range:
    """a & b."""
    limits = [x.high for x in (a, b) if x.low is not None and inductor.is_known(x.low >= 0)]
    known = [limit for limit in limits if limit is not None]
    return Range(sympy.Integer(0), sympy.Min(*known) if known else None) if limits else UNKNOWN


def _shift_right(a: Range, b: Range) -> Range:
    if b.low is None or b.low != b.high or not b.low.is_number:
        return UNKNOWN
    divisor = sympy.Integer(2) ** b.low
    return _divide(a, Range(divisor, divisor))


def _remainder_to_zero(a: Range, b: Range) -> Range:
    """A remainder that has the dividend's sign."""
    if a.low is None or not inductor.is_known(a.low >= 0):
        return UNKNOWN
    return _remainder(a, b)


def _same(a: Range, *_: Range) -> Range:
    return a


# Keywords that do not change an integer's value.
_HARMLESS = {"dtype", "device", "layout", "pin_memory", "memory_format"}
_RULES: dict[Any, Callable[..., Range]] = {
    aten.add: _add,
    aten.sub: _subtract,
    aten.neg: _negative,
    aten.mul: _multiply,
    aten.minimum: _smaller,
    aten.maximum: _larger,
    aten.clamp: _clamp,
    aten.clamp_min: _larger,
    aten.clamp_max: _smaller,
    aten.where: _choose,
    aten.abs: _magnitude,
    aten.remainder: _remainder,
    aten.fmod: _remainder_to_zero,
    aten.floor_divide: _divide,
    aten.bitwise_and: _mask_bits,
    aten.bitwise_right_shift: _shift_right,
    aten.__rshift__: _shift_right,
    _divide: _divide,
    aten.clone: _same,
    aten.full: lambda _, value: value,
    prims.convert_element_type: _same,
}
