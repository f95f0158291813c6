"""Operators on a mod's short rows of numbers, as expressions of their elements.

Inductor's own rules make a buffer, branch, or call a library; a kernel computes each score in
registers. torch 2.11 to 2.15.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import sympy
import torch
from torch._inductor import ir
from torch._inductor.lowering import (
    add,
    exp,
    expand,
    lowerings,
    mean,
    mul,
    sub,
    sum_,
    to_dtype,
    unsqueeze,
    var_mean_sum_,
)
from torch._inductor.virtualized import V, ops

__all__ = ["PRODUCTS", "SHORT_ROWS", "unrolled"]

aten = torch.ops.aten


@contextlib.contextmanager
def unrolled() -> Iterator[None]:
    """Reduce short rows to one number by terms, not by a loop, on a CPU as on a GPU.

    Inductor's rule, the same in 2.11 to 2.15, asks for a GPU if the result is one number.
    """
    with mock.patch.object(ir, "is_gpu", lambda kind: True):
        yield


def _concatenate(inputs: Sequence[Any], dim: int = 0) -> Any:
    """A row of numbers, of which any can be read: `torch.stack([score, 2 * score])[h]`."""
    dtype = functools.reduce(torch.promote_types, (value.get_dtype() for value in inputs))
    parts = [to_dtype(value, dtype) for value in inputs]
    loaders = [part.make_loader() for part in parts]
    ranges = list(parts[0].get_size())
    dim %= len(ranges)
    lengths = V.graph.sizevars.guard_int_seq([part.get_size()[dim] for part in parts])
    ends = list(itertools.accumulate(lengths))
    ranges[dim] = sympy.Integer(ends[-1])

    def element(index: Sequence[Any], place: int) -> Any:
        number = next(n for n, end in enumerate(ends) if place < end)
        within = list(index)
        within[dim] = sympy.Integer(place - (ends[number - 1] if number else 0))
        return loaders[number](within)

    def load(index: Sequence[Any]) -> Any:
        place = index[dim]
        if isinstance(place, (int, sympy.Integer)):
            return element(index, int(place))
        chosen = element(index, ends[-1] - 1)
        asked = ops.index_expr(place, torch.int32)
        for other in reversed(range(ends[-1] - 1)):
            is_here = ops.eq(asked, ops.constant(other, torch.int32))
            chosen = ops.where(is_here, element(index, other), chosen)
        return chosen

    return _pointwise(parts[0], dtype, load, ranges)


def _put(row: Any, indices: Sequence[Any], values: Any, accumulate: bool = False) -> Any:
    """A row with a value at one place, as gradients of `row[h]` need it."""
    places = [*indices, *[None] * (len(row.get_size()) - len(indices))]
    if any(place is not None and len(place.get_size()) > 0 for place in places):
        return lowerings[aten.index_put_.default](row, indices, values, accumulate)
    sizes, dtype = list(row.get_size()), row.get_dtype()
    kept = [size for size, place in zip(sizes, places, strict=True) if place is None]
    value_at = expand(to_dtype(values, dtype), kept).make_loader()
    before_at = row.make_loader()
    asked = [None if place is None else place.make_loader() for place in places]

    def load(index: Sequence[Any]) -> Any:
        is_here = ops.constant(True, torch.bool)
        for here, size, place in zip(index, sizes, asked, strict=True):
            if place is not None:
                at = ops.to_dtype(place([]), torch.int32)
                is_before = ops.lt(at, ops.constant(0, torch.int32))
                at = ops.where(is_before, ops.add(at, ops.index_expr(size, torch.int32)), at)
                here = ops.index_expr(here, torch.int32)
                is_here = ops.logical_and(is_here, ops.eq(here, at))
        before = before_at(index)
        rest = [here for here, place in zip(index, asked, strict=True) if place is None]
        value = value_at(rest)
        return ops.where(is_here, ops.add(before, value) if accumulate else value, before)

    return _pointwise(row, dtype, load, sizes)


def _scatter(row: Any, dim: int, places: Any, values: Any) -> Any:
    """A row with other values at some places, as gradients of `row.max(0).values` need it."""
    sizes = list(row.get_size())
    if not sizes:  # a row of one number has one place
        return to_dtype(values, row.get_dtype())
    dim %= len(sizes)
    (count,) = V.graph.sizevars.guard_int_seq([places.get_size()[dim]])
    before_at, place_at = row.make_loader(), places.make_loader()
    value_at = to_dtype(values, row.get_dtype()).make_loader()

    def load(index: Sequence[Any]) -> Any:
        chosen, here = before_at(index), ops.index_expr(index[dim], torch.int32)
        for number in range(count):
            at = [*index[:dim], sympy.Integer(number), *index[dim + 1 :]]
            is_here = ops.eq(here, ops.to_dtype(place_at(at), torch.int32))
            chosen = ops.where(is_here, value_at(at), chosen)
        return chosen

    return _pointwise(row, row.get_dtype(), load, sizes)


def _pointwise(like: Any, dtype: torch.dtype, load: Any, ranges: Sequence[Any]) -> Any:
    return ir.Pointwise.create(
        device=like.get_device(), dtype=dtype, inner_fn=load, ranges=list(ranges)
    )


def _product(left: Any, right: Any) -> Any:
    """A matrix product, of batches or not, as sums of products."""
    last = len(left.get_size())
    return sum_(mul(unsqueeze(left, last), unsqueeze(right, last - 2)), [last - 1])


def _added_product(start: Any, left: Any, right: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
    return add(mul(start, beta), mul(_product(left, right), alpha))


def _variance(
    row: Any, dim: Any = None, *, correction: Any = None, keepdim: bool = False, with_mean: bool
) -> Any:
    """Of a short row, by two sums. Inductor's rule would update a state, which is not unrolled."""
    (spread,) = var_mean_sum_(row, dim, correction, keepdim, return_mean=False)
    return (spread, mean(row, dim, keepdim)) if with_mean else spread


def _softmax(row: Any, dim: int) -> tuple[Any, Any]:
    """The largest element, and the sum of exponentials. In 2.11, Inductor's rule warns that it
    makes two reductions of them."""
    largest = lowerings[aten.amax.default](row, [dim], True)
    return largest, sum_(exp(sub(row, largest)), [dim], True)


# Their last operand has the summed dimension before its last.
PRODUCTS = {
    aten.mm.default: _product,
    aten.bmm.default: _product,
    aten.addmm.default: _added_product,
    aten.baddbmm.default: _added_product,
}
SHORT_ROWS = {
    aten.cat.default: _concatenate,
    aten.index_put_.default: _put,
    aten.index_put.default: _put,
    aten.scatter.src: _scatter,
    aten.var.correction: functools.partial(_variance, with_mean=False),
    aten.var_mean.correction: functools.partial(_variance, with_mean=True),
    torch.ops.prims.prepare_softmax_online.default: _softmax,
    **PRODUCTS,
}
