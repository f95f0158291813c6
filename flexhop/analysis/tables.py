"""Minima and maxima of captured tensors between two indices, without reading all entries.

An index that is a position itself reads a contiguous run in each block, which is reduced to one
minimum and one maximum. For other indices, a sparse table holds, for every place and power of two,
the minimum and maximum of that many entries from there on; any run is covered by two of them. Long
tables are first reduced by GRAIN. Memory is N log N numbers for the lifetime of a `Tables`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flexhop.analysis.interval import (
    Interval,
    Number,
    Unsupported,
    apart,
    both,
    either,
    extent,
    is_int,
    lift,
    like,
    negate,
    select,
    uses_of,
)

LONG = 1 << 16  # entries per line above which a table is reduced
GRAIN = 16
LARGEST = 1 << 24  # most numbers of a sparse table
_DTYPES = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class OutOfRange(Exception):
    """Some score reads beyond the end of a captured tensor."""


class Tables:
    """The captured tensors of one call, and tables derived from them.

    Args:
        block: block sizes of queries and keys, if boxes are aligned to them.

    `grid`, set by the caller: the Intervals of b, h, q and k if the boxes are all blocks in order,
    each along its own axis.
    """

    def __init__(self, block: tuple[int, int] | None = None) -> None:
        self.made: dict[Any, Any] = {}
        self.block = block
        self.grid: list[Interval] = []

    def read(self, table: Tensor, indices: Sequence[Any], positions: Sequence[Any]) -> Interval:
        """Bounds of `table[indices]`.

        Args:
            table: has one dimension per index.
            indices: an Interval, or a number, for each dimension.
            positions: the Intervals of q and k.

        Raises:
            Unsupported: the entries are unknown.
            OutOfRange: an index that occurs in a box is out of range (checked on the CPU).
        """
        if table.dim() != len(indices) or table.dtype not in (*_DTYPES, *_FLOATS):
            raise Unsupported
        if table.numel() == 0:
            raise Unsupported
        held = [
            self._inside(lift(i), size, positions)
            for i, size in zip(indices, table.shape, strict=True)
        ]
        if table.device.type == "cpu":  # elsewhere, reading would synchronise
            for index, size in zip(indices, table.shape, strict=True):
                self._refuse(lift(index), size)
        return _occurring(self._read(table, indices, positions, held), held)

    def _inside(self, index: Interval, size: Any, positions: Sequence[Any]) -> Interval:
        return inside(index, size)

    def _refuse(self, index: Interval, size: Any) -> None:
        outside = out_of_range(index, size)
        if bool(outside.any()) if isinstance(outside, Tensor) else outside:
            raise OutOfRange

    def _read(self, table: Tensor, indices: Any, positions: Any, held: list[Interval]) -> Interval:
        wide = [axis for axis, index in enumerate(held) if not index.is_point]
        if not wide:
            low = carried(entries_at(table, [index.low for index in held]))
            return as_interval(low, low, table)
        is_position = [any(held[axis] is p for p in positions) for axis in wide]
        if self.block is not None and all(is_position):
            return self._tiles(table, indices, held, wide, positions)
        if len(wide) > 2 or not self._is_small(table, wide):
            return self._anywhere(table, held, wide)
        found = self._stretches(table, held, wide)
        is_reduced = any(table.shape[axis] > LONG for axis in wide)
        return dataclasses.replace(found, tight=not is_reduced)

    def log2(self, length: Number, end: int) -> Number:
        """Floor of the binary logarithm of a positive integer that is at most `end`."""
        del end  # tables of graphs need it
        if not isinstance(length, Tensor):
            return max(1, int(length)).bit_length() - 1
        # The exponent of a double is exact for integers below 2^53.
        return torch.frexp(length.clamp(min=1).double()).exponent.to(torch.int64) - 1

    def _is_small(self, table: Tensor, wide: list[int]) -> bool:
        levels = math.prod(table.shape[axis].bit_length() for axis in wide)
        grains = math.prod(GRAIN for axis in wide if table.shape[axis] > LONG)
        return table.numel() // grains * levels <= LARGEST

    def _stretches(self, table: Tensor, held: list[Interval], wide: list[int]) -> Interval:
        """Reduce along one or two axes between two places."""
        found: list[Tensor] = []
        for reduce, combine in ((torch.amin, torch.minimum), (torch.amax, torch.maximum)):
            sparse = self._sparse(table, wide, reduce, combine)
            found.append(self._look_up(sparse, held, wide, combine))
        return as_interval(found[0], found[1], table)

    def _sparse(self, table: Tensor, wide: list[int], reduce: Any, combine: Any) -> Any:
        key = (id(table), tuple(wide), reduce)
        if key not in self.made:
            current, grains = carried(table), list[int]()
            for axis in wide:
                grains.append(GRAIN if current.shape[axis] > LONG else 1)
                current = _reduced(current, axis, grains[-1], reduce)
            for number, axis in enumerate(wide):  # each adds a leading axis of levels
                current = _doubled(current, axis + number, combine)
            self.made[key] = (current, grains, table)  # keeps the key's identity alive
        return self.made[key][:2]

    def _look_up(
        self, sparse: tuple[Tensor, list[int]], held: list[Interval], wide: list[int], combine: Any
    ) -> Tensor:
        """Two overlapping runs along each wide axis."""
        made, grains = sparse
        choices: list[list[Any]] = [[index.low] for index in held]
        levels: list[Any] = []
        for grain, axis in zip(grains, wide, strict=True):
            low, high = (e // grain if grain > 1 else e for e in (held[axis].low, held[axis].high))
            level = self.log2(high - low + 1, made.shape[len(wide) - 1 - len(levels)])
            levels.insert(0, level)  # the axis that was doubled last is first
            size = 1 << level if not isinstance(level, Tensor) else torch.ones_like(level) << level
            choices[axis] = [low, high - size + 1]
        result = None
        for places in _product(choices):
            found = entries_at(made, [*levels, *places])
            result = found if result is None else combine(result, found)
        assert result is not None
        return result

    def _tiles(
        self, table: Tensor, indices: Any, held: list[Interval], wide: list[int], positions: Any
    ) -> Interval:
        """Reduce to tiles: indices that are the query and the key themselves."""
        assert self.block is not None
        sizes = [
            self.block[0] if indices[axis] is positions[0] else self.block[1] for axis in wide
        ]
        places = [index.low for index in held]
        for axis, size in zip(wide, sizes, strict=True):
            places[axis] = places[axis] // size
        found: list[Tensor] = []
        for reduce in (torch.amin, torch.amax):
            lengths = [held[axis].static[1] for axis in wide]
            key = (id(table), tuple(wide), reduce, *sizes, *lengths)
            if key not in self.made:
                tiled = _tiled(table, held, wide, sizes, reduce)
                self.made[key] = (_widened(tiled), table)
            tiled = self.made[key][0]
            whole = self._along_axes(tiled, held)
            found.append(entries_at(tiled, places) if whole is None else whole)
        return as_interval(found[0], found[1], table)

    def _along_axes(self, tiled: Tensor, held: list[Interval]) -> Tensor | None:
        """All tiles along the axes of the boxes, if the indices are those of the boxes."""
        axes = [next((n for n, own in enumerate(self.grid) if own is i), -1) for i in held]
        if not axes or axes != sorted(set(axes)) or axes[0] < 0:
            return None
        sizes = [1] * len(self.grid)
        for axis, place in enumerate(axes):
            sizes[place] = self.grid[place].low.numel()
            tiled = tiled.narrow(axis, 0, sizes[place])
        return tiled.reshape(sizes)

    def _anywhere(self, table: Tensor, held: list[Interval], wide: list[int]) -> Interval:
        """Reduce along whole axes."""
        places = [index.low for axis, index in enumerate(held) if axis not in wide]
        found: list[Tensor] = []
        for reduce in (torch.amin, torch.amax):
            key = (id(table), tuple(wide), "anywhere", reduce)
            if key not in self.made:
                self.made[key] = (reduce(carried(table), dim=wide), table)
            found.append(entries_at(self.made[key][0], places))
        return dataclasses.replace(as_interval(found[0], found[1], table), tight=False)


def _tiled(table: Tensor, held: list[Interval], wide: list[int], sizes: list[int], reduce: Any):
    current = table
    for axis in wide:  # no entry beyond the last position
        current = current.narrow(axis, 0, held[axis].static[1] + 1)
    current = carried(current)
    for axis, size in zip(wide, sizes, strict=True):
        current = _reduced(current, axis, size, reduce)
    return current


def _occurring(found: Interval, indices: list[Interval]) -> Interval:
    """Values known to occur: indices that take all places between their ends, in all pairs."""
    tight = found.tight and apart(indices) and all(i.tight and i.gapless for i in indices)
    found = dataclasses.replace(found, uses=uses_of(indices), tight=tight)
    if found.dtype != torch.bool:
        return found
    some, miss = found.low, negate(found.high)
    if tight:
        some, miss = found.high, negate(found.low)
    return dataclasses.replace(found, some=some, miss=miss, decided=tight)


def inside(index: Interval, size: int) -> Interval:
    """Resolve an index as Python does: negative ones count from the end."""
    if not is_int(index.dtype) or index.dtype == torch.uint8:  # bytes are a mask
        raise Unsupported
    low, high = index.low, index.high
    first, last = index.static
    if 0 <= first and last < size:
        return index
    if -size <= first and last < 0:
        low = low + size
        high = low if index.is_point else high + size
        static = (first + size, last + size)
        return dataclasses.replace(index, low=low, high=high, static=static)
    if index.is_point:
        low = select(low < 0, low + size, low) if isinstance(low, Tensor) else low % size
        low = low.clamp(0, size - 1) if isinstance(low, Tensor) else low
        return dataclasses.replace(index, low=low, high=low)
    fits = both(low >= 0, high < size)
    behind = both(high < 0, low >= -size)
    low = select(fits, low, select(behind, low + size, like(low, 0)))
    high = select(fits, high, select(behind, high + size, like(high, size - 1)))
    return Interval(low, high, torch.int64, False, (0, size - 1), index.uses)


def out_of_range(index: Interval, size: Any) -> Number:
    """Whether some score of a box reads beyond the ends of an axis."""
    if not index.tight or (-size <= index.static[0] and index.static[1] < size):
        return False
    return either(index.low < -size, index.high >= size)


def entries_at(table: Tensor, places: Sequence[Number]) -> Tensor:
    """The entries at places that broadcast, one per dimension.

    `table[places]` would read the value of a 0-d tensor, which a graph does not have.
    """
    if not any(isinstance(p, Tensor) for p in places):
        return table[tuple(int(p) for p in places)]
    indices = [
        p if isinstance(p, Tensor) else torch.full((), int(p), device=table.device) for p in places
    ]
    return torch.ops.aten.index.Tensor(table, indices)


def carried(table: Tensor) -> Tensor:
    """A table in a dtype that supports minima and maxima everywhere."""
    if table.dtype == torch.bool:
        return table.to(torch.int8)
    return table.to(torch.int64) if is_int(table.dtype) and table.dtype != torch.int32 else table


def _widened(table: Tensor) -> Tensor:
    """A table in the dtype of intervals."""
    return table.to(torch.int64) if is_int(table.dtype) else table


def as_interval(low: Tensor, high: Tensor, table: Tensor) -> Interval:
    """The interval between two entries of a table, both of which occur."""
    dtype = table.dtype
    is_one = low is high
    static = extent(dtype)
    if dtype == torch.bool:
        first = low > 0
        return Interval(first, first if is_one else high > 0, dtype, False, static, tight=True)
    if not dtype.is_floating_point:
        first = low.to(torch.int64)
        last = first if is_one else high.to(torch.int64)
        return Interval(first, last, dtype, False, static, tight=True, gapless=is_one)
    bad = torch.isnan(low) if is_one else torch.isnan(low) | torch.isnan(high)
    low, high = torch.where(bad, -math.inf, low), torch.where(bad, math.inf, high)
    return Interval(low, high, dtype, bad, static, tight=True)


def _reduced(table: Tensor, axis: int, grain: int, reduce: Any) -> Tensor:
    """Reduce every `grain` entries along an axis to one."""
    if grain == 1:
        return table
    size = table.shape[axis]
    whole = size // grain * grain
    parts = reduce(table.narrow(axis, 0, whole).unflatten(axis, (-1, grain)), dim=axis + 1)
    if whole == size:
        return parts
    rest = reduce(table.narrow(axis, whole, size - whole), dim=axis, keepdim=True)
    return torch.cat([parts, rest], dim=axis)


def _doubled(table: Tensor, axis: int, combine: Any) -> Tensor:
    """[levels, ...]: level l combines 2^l entries from each place on, if there are that many."""
    size = table.shape[axis]
    levels = [table]
    while 2 ** len(levels) <= size:
        step = 2 ** (len(levels) - 1)
        last = levels[-1]
        ahead = last.narrow(axis, step, size - step)
        joined = combine(last.narrow(axis, 0, size - step), ahead)
        levels.append(torch.cat([joined, last.narrow(axis, size - step, step)], dim=axis))
    return torch.stack(levels)


def _product(choices: list[list[Any]]) -> list[tuple[Any, ...]]:
    found: list[tuple[Any, ...]] = [()]
    for options in choices:
        found = [(*places, option) for places in found for option in options]
    return found
