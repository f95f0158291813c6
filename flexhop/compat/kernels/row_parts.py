"""Operators that put a mod's short row of numbers beside others: padding, and gradients of slices.

Inductor's own rules branch, which the text of a mod cannot. Here, what lies outside is chosen by
comparisons, or left out if the place is known. torch 2.11 to 2.15.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import sympy
import torch
from torch._inductor import ir
from torch._inductor.lowering import expand, to_dtype
from torch._inductor.virtualized import V, ops

__all__ = ["ROW_PARTS"]

aten = torch.ops.aten


class _Part(NamedTuple):
    """Every `step`-th place from `start` on, of one dimension: `count` of them."""

    start: int
    count: int
    step: int = 1

    def find(self, place: Any) -> tuple[Any, Any]:
        """The number of a place among them, and whether it is one: True, False or a condition."""
        if isinstance(place, (int, sympy.Integer)):
            number, rest = divmod(int(place) - self.start, self.step)
            return sympy.Integer(number), rest == 0 and 0 <= number < self.count
        zero, last = _number(0), _number(self.count - 1)
        distance = ops.sub(ops.index_expr(place, torch.int32), _number(self.start))
        number = distance if self.step == 1 else ops.floordiv(distance, _number(self.step))
        is_one = ops.logical_and(ops.ge(distance, zero), ops.le(number, last))
        if self.step != 1:
            is_multiple = ops.eq(ops.mul(number, _number(self.step)), distance)
            is_one = ops.logical_and(is_one, is_multiple)
        safe = ops.minimum(ops.maximum(number, zero), last)
        return ops.indirect_indexing(safe, self.count, check=False), is_one


def _number(value: int) -> Any:
    return ops.constant(value, torch.int32)


def _pad(row: Any, padding: Sequence[int], fill: float = 0) -> Any:
    """A row between numbers that are all the same."""
    load, sizes = row.make_loader(), list(row.get_size())
    parts: dict[int, _Part] = {}
    for before, (low, high) in enumerate(zip(padding[::2], padding[1::2], strict=True)):
        dim = len(sizes) - 1 - before
        parts[dim] = _Part(low, V.graph.sizevars.guard_int(sizes[dim]))
        sizes[dim] = sympy.Integer(parts[dim].count + low + high)
    dtype = row.get_dtype()

    def element(index: Sequence[Any]) -> Any:
        return _chosen(index, parts, load, lambda: ops.constant(fill, dtype))

    return _pointwise(row, element, sizes)


def _put_slice(row: Any, source: Any, dim: int = 0, *ends: Any, **named: Any) -> Any:
    """A row whose slice, as start, end and step say, is another row."""
    given = {**dict(zip(("start", "end", "step"), ends, strict=False)), **named}
    wanted = slice(given.get("start"), given.get("end"), given.get("step"))
    sizes = list(row.get_size())
    dim %= len(sizes)
    places = range(V.graph.sizevars.guard_int(sizes[dim]))[wanted]
    shape = [*sizes[:dim], sympy.Integer(len(places)), *sizes[dim + 1 :]]
    inside, outside = (
        part.make_loader() for part in (expand(to_dtype(source, row.get_dtype()), shape), row)
    )
    parts = {dim: _Part(places.start, len(places), places.step)}

    def element(index: Sequence[Any]) -> Any:
        return _chosen(index, parts, inside, lambda: outside(index))

    return _pointwise(row, element, sizes)


def _chosen(index: Sequence[Any], parts: dict[int, _Part], inside: Any, outside: Any) -> Any:
    """An element of the part if the index is in it, or else what is outside."""
    within, is_inside = list(index), True
    for dim, part in parts.items():
        within[dim], is_here = part.find(index[dim])
        if is_here is False or not part.count:
            return outside()
        if is_here is not True:
            is_inside = is_here if is_inside is True else ops.logical_and(is_inside, is_here)
    return inside(within) if is_inside is True else ops.where(is_inside, inside(within), outside())


def _pointwise(like: Any, element: Any, sizes: Sequence[Any]) -> Any:
    return ir.Pointwise.create(
        device=like.get_device(), dtype=like.get_dtype(), inner_fn=element, ranges=list(sizes)
    )


ROW_PARTS = {
    aten.constant_pad_nd.default: _pad,
    aten.slice_scatter.default: _put_slice,
}
