"""Captured tensors in a traced graph: sizes may be symbolic, and no value is read."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flexhop.analysis.interval import Interval, Unsupported, negate, select
from flexhop.analysis.tables import (
    LARGEST,
    Tables,
    as_interval,
    carried,
    entries_at,
    inside,
    out_of_range,
)
from flexhop.compat.sizes import assert_all, bound_of, is_known


class GraphTables(Tables):
    """The captured tensors of a graph that is being traced.

    Args:
        block: block sizes of queries and keys.
        lengths: numbers of queries and of keys.
    """

    def __init__(self, block: tuple[int, int], lengths: tuple[Any, Any]) -> None:
        super().__init__(block)
        self.lengths = lengths

    def _inside(self, index: Interval, size: Any, positions: Sequence[Any]) -> Interval:
        for position, length in zip(positions, self.lengths, strict=True):
            if index is position and is_known(length <= size):
                return index
        if isinstance(size, int):
            return inside(index, size)
        last = bound_of(size)
        if not index.is_point or last is None:
            raise Unsupported
        low = torch.as_tensor(index.low)
        low = select(low < 0, low + size, low).clamp(min=0).minimum(low.new_full((), size - 1))
        return dataclasses.replace(index, low=low, high=low, static=(0, last - 1))

    def _refuse(self, index: Interval, size: Any) -> None:
        if not isinstance(size, int):
            return  # this would need a guard
        outside = out_of_range(index, size)
        if outside is not False:
            message = f"an index of a captured tensor is out of range for a dimension of {size}"
            assert_all(negate(torch.as_tensor(outside)), message)

    def log2(self, length: Any, end: int) -> Any:
        """See Tables; Inductor (2.11 to 2.13) cannot vectorise `frexp` in C++."""
        if not isinstance(length, Tensor):
            return super().log2(length, end)
        return sum((length >= 2**power).long() for power in range(1, end)) + length * 0

    def _tiles(
        self, table: Tensor, indices: Any, held: list[Interval], wide: list[int], positions: Any
    ) -> Interval:
        """Reduce the entries that each block reads, without a table of them."""
        assert self.block is not None
        sizes = [self.block[held[axis] is not positions[0]] for axis in wide]
        return _reduce_runs(table, held, wide, sizes)

    def _stretches(self, table: Tensor, held: list[Interval], wide: list[int]) -> Interval:
        """Few runs are read entry by entry: a sparse table takes Inductor long to compile."""
        ends = [e for i in held for e in (i.low, i.high) if isinstance(e, Tensor)]
        sizes = [table.shape[axis] for axis in wide]
        reads = math.prod([*torch.broadcast_shapes(*(e.shape for e in ends)), *sizes])
        if is_known(reads <= LARGEST):
            return _reduce_runs(table, held, wide, sizes)
        return super()._stretches(table, held, wide)


def _reduce_runs(
    table: Tensor, held: list[Interval], wide: list[int], sizes: Sequence[Any]
) -> Interval:
    """Reduce from the low to the high index of each wide axis, which are at most sizes apart."""
    places: list[Any] = [index.low for index in held]
    for number, (axis, size) in enumerate(zip(wide, sizes, strict=True)):
        low, high = (
            torch.as_tensor(end, device=table.device)[..., None]
            for end in (held[axis].low, held[axis].high)
        )
        behind = len(wide) - 1 - number
        places[axis] = torch.minimum(low + torch.arange(size, device=table.device), high)
        for _ in range(behind):
            places[axis] = places[axis][..., None]
        for _ in range(number):
            places[axis] = places[axis].unsqueeze(-2 - behind)
    for axis, value in enumerate(places):
        if axis not in wide and isinstance(value, Tensor):
            places[axis] = value[(..., *[None] * len(wide))]
    read = carried(entries_at(table, places))
    dims = list(range(-len(wide), 0))
    return as_interval(read.amin(dims), read.amax(dims), table)
