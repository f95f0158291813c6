"""A mod that reads tables in place of computing their entries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from flexhop.analysis import Analysis, Coordinate
from flexhop.ops.graphs.table_entries import Table

aten, convert = torch.ops.aten, torch.ops.prims.convert_element_type.default


def with_reads(
    found: Analysis, tables: Sequence[Table], firsts: Mapping[Coordinate, int | None]
) -> tuple[fx.GraphModule, tuple[int, ...], tuple[Coordinate, ...]]:
    """The mod with reads in place of the tabulated parts, the captures that it still reads, and
    the coordinates whose first values it takes."""
    writer = _Writer(found, tables, firsts)
    writer.graph.output(writer.copy(found.mod.result))
    captures = [writer.known[node] for node in found.mod.captures]
    kept = tuple(i for i, node in enumerate(captures) if node.users)
    for node in captures:
        if not node.users:
            writer.graph.erase_node(node)
    return fx.GraphModule(torch.nn.Module(), writer.graph), kept, tuple(writer.moving)


class _Writer:
    """Copies a mod, with reads in place of tabulated parts."""

    def __init__(
        self, found: Analysis, tables: Sequence[Table], firsts: Mapping[Coordinate, int | None]
    ) -> None:
        self.graph, self.known = fx.Graph(), dict[fx.Node, fx.Node]()
        self._bounds = found.forms.bounds_of
        self._inputs = found.mod.inputs
        for node in (*found.mod.inputs.values(), *found.mod.captures):
            self.known[node] = self.graph.node_copy(node)
        self._tables = {table.node: table for table in tables}
        self._firsts = firsts
        moving = [axis for axis, first in firsts.items() if first is None]
        self.moving = {axis: self.graph.placeholder(f"place_{i}") for i, axis in enumerate(moving)}
        self._sources = {
            table.node: self.graph.placeholder(f"table_{i}") for i, table in enumerate(tables)
        }

    def copy(self, node: fx.Node) -> fx.Node:
        """The node that computes or reads the value of `node`."""
        if node not in self.known and node in self._tables:
            indices = [self._place(axis) for axis in self._tables[node].axes]
            entry = self._call(aten.index.Tensor, self._sources[node], indices)
            self.known[node] = self._bounded(entry, node)
        if node not in self.known:
            args, kwargs = fx.map_arg(node.args, self.copy), fx.map_arg(node.kwargs, self.copy)
            target = aten.add.Tensor if self._subtracts_table(node) else node.target
            self.known[node] = self.graph.call_function(target, args, kwargs)  # type: ignore[arg-type]
        return self.known[node]

    def _bounded(self, entry: fx.Node, node: fx.Node) -> fx.Node:
        """The entry; clamped to the bounds of an integer, which it has, so that they stay known.

        If it is part of an index, that needs no check for each score.
        """
        dtype, (low, high) = node.meta["val"].dtype, self._bounds(node)
        if dtype.is_floating_point or dtype == torch.bool:
            return entry
        if low <= torch.iinfo(dtype).min or high >= torch.iinfo(dtype).max:
            return entry
        return self._call(aten.clamp.default, entry, int(low), int(high))

    def _subtracts_table(self, node: fx.Node) -> bool:
        """Whether an operator subtracts what a table holds the negatives of."""
        if node.target is not aten.sub.Tensor:
            return False
        table = self._tables.get(node.args[1])  # type: ignore[arg-type]
        return table is not None and table.is_negative

    def _place(self, axis: Any) -> fx.Node:
        """The index of an axis: the query's and the key's parts of a coordinate."""
        if isinstance(axis, str):
            return self.known[self._inputs[axis]]
        (first, coefficient), *others = axis.terms
        total = self._wide(first)
        if coefficient != 1:
            total = self._call(aten.mul.Tensor, total, coefficient)
        for atom, coefficient in others:
            part = self._wide(atom)
            if abs(coefficient) != 1:
                part = self._call(aten.mul.Tensor, part, abs(coefficient))
            sign = aten.add.Tensor if coefficient > 0 else aten.sub.Tensor
            total = self._call(sign, total, part)
        if axis in self.moving:
            return self._call(aten.add.Tensor, total, self.moving[axis])
        first = self._firsts[axis]
        return self._call(aten.add.Tensor, total, -first) if first else total

    def _wide(self, atom: fx.Node) -> fx.Node:
        """A term of an index. Ids of 8 or 16 bits overflow when they are added."""
        dtype = atom.meta["val"].dtype
        part = self.copy(atom)
        return part if dtype.itemsize >= 4 else self._call(convert, part, torch.int32)

    def _call(self, target: Any, *args: Any) -> fx.Node:
        return self.graph.call_function(target, args)
