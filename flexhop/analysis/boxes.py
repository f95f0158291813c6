"""Evaluate a mod on boxes of scores: the interval of every node, from those of the indices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from flexhop.analysis.apply import apply
from flexhop.analysis.graph import Mod, dtype_of, is_number, operands
from flexhop.analysis.interval import Interval, Unsupported, is_int, point, unknown, uses_of
from flexhop.analysis.operators import packet_of
from flexhop.analysis.tables import Tables

aten = torch.ops.aten


class Table(NamedTuple):
    """A captured tensor whose leading dimensions have been read."""

    tensor: Tensor | None  # None if its values are not known
    dtype: torch.dtype
    indices: tuple[Any, ...] = ()


def evaluate_result(mod: Mod, inputs: Mapping[str, Interval], tables: Tables) -> Interval:
    """The interval of a mod's result; intermediate ones live until their last use."""
    if not isinstance(mod.result, fx.Node):
        return point(mod.result, torch.bool)
    found = evaluate(mod, inputs, tables, forget=True)
    return found[mod.result]


def evaluate(
    mod: Mod,
    inputs: Mapping[str, Interval],
    tables: Tables | None = None,
    *,
    forget: bool = False,
) -> dict[fx.Node, Any]:
    """The interval of every node; a `Table` for nodes with dimensions.

    Args:
        mod: its captured tensors are read only if `tables` is given.
        inputs: intervals of its inputs, by name.
        tables: tables built from captured tensors earlier, for boxes of the same sizes.
        forget: drop nodes that no other node needs and that are not results.
    """
    found: dict[fx.Node, Any] = {node: inputs[name] for name, node in mod.inputs.items()}
    positions = [inputs.get(name) for name in "qk"]
    for node, tensor in mod.captures.items():
        found[node] = _capture(node, tensor if tables is not None else None)
    left = {node: len(node.users) for node in mod.graph.nodes}
    for node in mod.operators:
        found[node] = _evaluate(node, found, tables, positions)
        for source in node.all_input_nodes if forget else ():
            left[source] -= 1
            if left[source] == 0 and source not in mod.results:
                del found[source]
    return found


def plain_inputs(mod: Mod, sizes: Mapping[str, int]) -> dict[str, Interval]:
    """The intervals of the inputs over all scores of a call, given the sizes of b, h, q and k."""
    found: dict[str, Interval] = {}
    for name, node in mod.inputs.items():
        dtype = dtype_of(node) or torch.float32
        if name not in sizes:
            found[name] = unknown(dtype)
            continue
        last = sizes[name] - 1
        uses = frozenset((name,))
        found[name] = Interval(0, last, dtype, False, (0, last), uses, True, True)
    return found


def _capture(node: fx.Node, tensor: Tensor | None) -> Any:
    """A captured number is one value; a table is read."""
    dtype = dtype_of(node)
    if dtype is None:
        return unknown(torch.int64, frozenset())  # a symbolic size
    if not is_number(node):
        return Table(tensor, dtype)
    static = node.meta.get("bounds")
    if tensor is None:
        return unknown(dtype, frozenset()) if static is None else _between(dtype, static)
    return point(tensor.long() if is_int(dtype) else tensor, dtype, static)


def _between(dtype: torch.dtype, static: tuple[int, int]) -> Interval:
    """One number, the same for all scores, with known bounds."""
    return Interval(*static, dtype, False, static, frozenset())


def _evaluate(
    node: fx.Node, found: Mapping[fx.Node, Any], tables: Tables | None, positions: list[Any]
) -> Any:
    dtype = dtype_of(node)
    args, kwargs = operands(node, found.__getitem__)
    if dtype is None:
        return unknown(torch.int64, frozenset())
    if packet_of(node.target) is aten.index:
        return _read(args[0], args[1], dtype, tables, positions)
    flat = [*args, *kwargs.values()]
    is_table = any(isinstance(a, (Table, list, tuple)) and a for a in flat)
    if is_table or not is_number(node):  # rules expect one number per score
        return unknown(dtype, _uses(flat))
    return apply(node.target, dtype, args, kwargs)


def _read(
    table: Any,
    indices: Sequence[Any],
    dtype: torch.dtype,
    tables: Tables | None,
    positions: list[Any],
) -> Any:
    """An entry, or the rest of a table that is read in steps."""
    uses = _uses([table, *indices])
    if not isinstance(table, Table) or not all(isinstance(i, Interval) for i in indices):
        return unknown(dtype, uses)
    indices = (*table.indices, *indices)
    if any(i.dtype == torch.bool for i in indices):
        return unknown(dtype, uses)
    if tables is None or table.tensor is None:
        return unknown(dtype, uses)
    if len(indices) < table.tensor.dim():
        return Table(table.tensor, dtype, indices)
    try:
        return tables.read(table.tensor, indices, positions)
    except Unsupported:
        return unknown(dtype, uses)


def _uses(values: Sequence[Any]) -> frozenset[str]:
    found = uses_of(v for v in values if isinstance(v, Interval))
    for value in values:
        if isinstance(value, Table):
            found |= _uses(value.indices)
        elif isinstance(value, (tuple, list)):
            found |= _uses(value)
    return found
