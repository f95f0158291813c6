"""The entries of a table: a part of a mod, computed for every value of its inputs."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, fx

from flexhop.analysis import Analysis, Coordinate, Ends, elements_of, is_float, reached
from flexhop.block_mask.scores import hidden_count
from flexhop.compat.mods.indexing import IndexMode, of_one_dtype
from flexhop.compat.operators import hop
from flexhop.compat.sizes import LONGEST_ROW, hint_of
from flexhop.mods.bounded import BOUNDED
from flexhop.ops.args import Capture
from flexhop.ops.graphs.unread import Unread

aten = torch.ops.aten
_LENGTH = 2**23  # bounds a dynamic size: kernels represent the sum of two positions in fp32
# Reads for one value; a search among more than 16 numbers takes five (compat/mods/places.py).
_MOST_READS = 4
_ALIGNED = 16  # entries of a row of pairs: with such strides, Triton reads several at once
_COPIES = 32  # of what neighbouring keys read, as many as a warp has lanes
_FEW = 2**12  # fewer values may be an axis in calls of any size


class Sizes(NamedTuple):
    """Numbers of b, h, q and k, by name.

    now: in this call. bounds: in calls of the same code.
    """

    now: dict[str, int]
    bounds: dict[str, int]

    def longer(self) -> dict[str, int]:
        """Sizes of another call of the same code, if some are dynamic."""
        return {n: size if size == self.bounds[n] else 2 * size for n, size in self.now.items()}


def sizes_of(given: Mapping[str, Any]) -> Sizes:
    """The sizes of a call; given: by name, some may be symbols."""
    bounds = {n: size if isinstance(size, int) else _LENGTH for n, size in given.items()}
    return Sizes({name: hint_of(size) for name, size in given.items()}, bounds)


class Table(NamedTuple):
    """A part of a mod, as a table.

    node: its values are the entries, or their negatives if they are `is_negative`. axes: what they
    depend on, in dimension order: "b", "h", "q", "k", or a Coordinate, one integer of both
    positions such as their distance. may_spoil: whether the derivative of an entry with respect to
    a captured tensor may be infinite or NaN.
    """

    node: fx.Node
    axes: tuple[Any, ...]
    may_spoil: bool = False
    is_negative: bool = False


class Extents:
    """The values along the axes of tables in calls of some sizes.

    Args:
        found: of the mod. Its bounds on indices hold for the sizes.
        sizes: numbers of b, h, q and k by name; they may be symbols.
    """

    def __init__(self, found: Analysis, sizes: Mapping[str, Any]) -> None:
        self._sizes = sizes
        last = {name: size - 1 for name, size in sizes.items()}
        self._ends = Ends(found.forms, last, widest=_FEW)
        lengths = ((sizes[name], found.forms.sizes[name]) for name in "qk")
        # The analysis then knows the ends of coordinates.
        self._is_exact = all(isinstance(size, int) and size == bound for size, bound in lengths)

    def of(self, axis: Any) -> tuple[Any, Any] | None:
        """The first value along an axis, and the number of values; None if it is not known."""
        if not isinstance(axis, Coordinate):
            return 0, self._sizes[axis]
        if self._is_exact:
            return axis.first, axis.size
        ends = self._ends.of_form(axis.form)
        return None if ends is None else (ends[0], ends[1] - ends[0] + 1)


class Maker:
    """Computes tables with the mod's own operators, on broadcasting tensors instead of scalars.

    16-bit captured tensors are read in fp32, because gradients of their entries are summed in
    fp32; kernels also compute with them in fp32.
    """

    def __init__(self, found: Analysis, captures: Sequence[Capture], extents: Extents) -> None:
        self.found, self.extents = found, extents
        self.captures = dict(zip(found.mod.captures, map(_widened, captures), strict=True))
        self.device = found.mod.inputs["q"].meta["val"].device
        # In packed sequences, some entries are of distances beyond a sequence. No score uses them.
        self.may_leave = any(node.target is BOUNDED for node in found.mod.graph.nodes)

    def make(self, table: Table) -> Tensor:
        """The entries of a table, [*axes]."""
        return _Entries(self, table).make()


class _Entries:
    """Computes the entries of one table.

    `_known` holds the values of nodes, which broadcast with [*axes]. Those that depend on captured
    tensors alone have the shapes of the mod.
    """

    def __init__(self, maker: Maker, table: Table) -> None:
        self._maker, self._table = maker, table
        self._forms = maker.found.forms
        self._shape = [self._extent(axis)[1] for axis in table.axes]
        self._unread = Unread(self._shape) if table.may_spoil else None
        self._known: dict[fx.Node, Any] = dict(maker.captures)
        inputs = maker.found.mod.inputs
        for axis in table.axes:
            if isinstance(axis, str):
                dtype = inputs[axis].meta["val"].dtype  # the mod may divide it
                self._known[inputs[axis]] = self._along(axis, dtype)

    def make(self) -> Tensor:
        """The entries, [*axes, *row]."""
        row = self._table.node.meta["val"].shape
        values = self._value(self._table.node).expand(*self._shape, *row)
        entries = -values if self._table.is_negative else values.contiguous()
        if self._is_of_pairs:
            entries = torch.nn.functional.pad(entries, (0, -self._shape[-1] % _ALIGNED))
        return entries if self._unread is None else self._unread.note(entries)

    @property
    def _is_of_pairs(self) -> bool:
        return {"q", "k"} <= {*self._table.axes}

    def _extent(self, axis: Any) -> tuple[Any, Any]:
        extent = self._maker.extents.of(axis)
        assert extent is not None, "the axes of a chosen table have known extents"
        return extent

    def _along(self, axis: Any, dtype: torch.dtype) -> Tensor:
        """The values of an axis, along its dimension."""
        first, size = self._extent(axis)
        values = hidden_count(size, self._maker.device).to(dtype) + first
        return values.view([-1 if axis == other else 1 for other in self._table.axes])

    def _value(self, node: Any) -> Any:
        if not isinstance(node, fx.Node):
            return node
        if node not in self._known:
            split = self._split(node)
            if split is not None and split.coordinate in self._table.axes:
                self._known[node] = self._from_sum(node, self._sum(split))
            else:
                self._known[node] = self._call(node)
        return self._known[node]

    def _split(self, node: fx.Node) -> Any:
        """Split a node that adds a coordinate to other terms, or compares such a sum."""
        forms = self._forms
        if is_row(node):
            return None
        is_sum = forms.form(node) is not None
        compares_two = not is_sum and all(isinstance(a, fx.Node) for a in node.args)
        sees_both = forms.depends_on(node) >= {"q", "k"}
        return forms.split(node) if sees_both and (is_sum or compares_two) else None

    def _sum(self, split: Any) -> Tensor:
        total = split.factor * self._along(split.coordinate, self._dtype_of_sum(split))
        total = total + split.rest.offset
        for atom, coefficient in split.rest.terms.items():
            total = total + coefficient * self._value(atom)
        return total

    def _dtype_of_sum(self, split: Any) -> torch.dtype:
        """int32 if it holds all values: portable kernels compute entries that are constants."""
        first, size = self._extent(split.coordinate)
        ends = (split.factor * end + split.rest.offset for end in (first, first + size))
        is_known = not split.rest.terms and isinstance(first, int) and isinstance(size, int)
        return torch.int32 if is_known and max(map(abs, ends)) < 2**31 else torch.int64

    def _from_sum(self, node: fx.Node, total: Tensor) -> Tensor:
        """The sum itself, or for a comparison, the difference of its sides compared with 0."""
        if self._forms.form(node) is not None:
            return total.to(node.meta["val"].dtype)
        return node.target(total, torch.zeros_like(total))  # type: ignore[operator]

    def _call(self, node: fx.Node) -> Any:
        """The value of an operator."""
        values = {source: self._value(source) for source in node.all_input_nodes}
        if node.target is operator.getitem:  # of an operator with several results
            return values[node.all_input_nodes[0]][node.args[1]]
        varies = {
            source: isinstance(value, Tensor) and bool(self._forms.depends_on(source))
            for source, value in values.items()
        }
        if node.target is aten.sym_size.int:
            of, dim = cast("tuple[fx.Node, int]", node.args)
            return self._row_sizes(values[of], varies[of])[dim]
        is_read, is_expanded = _is_read(node), self._unread is not None and any(varies.values())
        if is_read and self._maker.may_leave:
            values |= self._within(node, values, varies)
        if is_expanded and not is_read:
            for source, value in values.items():
                if not varies[source]:
                    values[source], varies[source] = self._expanded(value, 0)
        if any(is_row(part) for part in (node, *node.all_input_nodes)):
            result = self._call_of_rows(node, values, varies)
        elif is_read and self._is_contended(values[node.all_input_nodes[0]]):
            result = self._read_copies(node, values)
        else:
            result = _call_of_numbers(node, values)
        if is_expanded and is_read and not varies[node.all_input_nodes[0]]:
            result, _ = self._expanded(result, len(self._shape))
        return result

    def _within(
        self, read: fx.Node, values: Mapping[fx.Node, Any], varies: Mapping[fx.Node, bool]
    ) -> dict[fx.Node, Any]:
        """The indices of a read, moved into the tensor."""
        source, indices = cast("tuple[fx.Node, Sequence[fx.Node]]", read.args)
        sizes = self._row_sizes(values[source], varies[source])
        found = {index: values[index].long() for index in indices}
        for index, size in zip(indices, sizes, strict=False):
            found[index] = found[index].clamp(-size, size - 1)
        return found

    def _row_sizes(self, value: Tensor, varies: bool) -> Sequence[Any]:
        """The sizes of a value in the mod, which values of entries have last."""
        return value.shape[len(self._shape) if varies else 0 :]

    def _is_contended(self, source: Any) -> bool:
        """Whether many pairs read each entry of a trained tensor, to whose gradient they add."""
        if not (self._is_of_pairs and isinstance(source, Tensor)):
            return False
        entries, numbers = (math.prod(map(hint_of, x)) for x in (self._shape, source.shape))
        return source.requires_grad and numbers * _COPIES <= entries

    def _read_copies(self, node: fx.Node, values: Mapping[fx.Node, Any]) -> Tensor:
        """The read, of a copy by key: a GPU adds to one address after the other."""
        read: Any = fx.map_arg(node.args, values.__getitem__)
        source, indices = read
        copies = source.unsqueeze(-1).expand(*source.shape, _COPIES).contiguous()
        turn = self._along("k", torch.int64) % _COPIES
        return _read_at(node, copies, (*indices, turn))

    def _expanded(self, value: Any, axes: int) -> tuple[Any, bool]:
        """What entries get from a captured tensor, for each on its own; whether it is trained."""
        is_trained = isinstance(value, Tensor) and value.requires_grad
        if not is_trained or self._unread is None:
            return value, False
        return self._unread.expand(value, axes), True

    def _call_of_rows(
        self, node: fx.Node, values: Mapping[fx.Node, Any], varies: Mapping[fx.Node, bool]
    ) -> Any:
        """The operator, of short rows of numbers: for one entry after the other, as it reads.

        Rows are the last dimensions of values, behind those of the table.
        """
        axes = len(self._shape)
        if not any(varies.values()):
            return _apply(node, values)
        moving = [value for source, value in values.items() if varies[source]]
        sizes = torch.broadcast_shapes(*(value.shape[:axes] for value in moving))
        flat = [
            value.expand(*sizes, *value.shape[axes:]).flatten(0, axes - 1)
            if varies[source]
            else value
            for source, value in values.items()
        ]
        of_one = lambda *given: _apply(node, dict(zip(values, given, strict=True)))  # noqa: E731
        with IndexMode():
            found = torch.vmap(of_one, tuple(0 if moves else None for moves in varies.values()))(
                *flat
            )
        return hop.pytree.tree_map(lambda result: result.unflatten(0, sizes), found)


def _call_of_numbers(node: fx.Node, values: Mapping[fx.Node, Any]) -> Any:
    """The operator itself."""
    if _is_read(node):
        source, indices = fx.map_arg(node.args, values.__getitem__)  # type: ignore[misc]
        return _read_at(node, source, indices)  # type: ignore[arg-type]
    result = _apply(node, values)
    if not isinstance(result, Tensor) or result.is_floating_point():  # no tensor: a size
        return result
    return result.to(node.meta["val"].dtype)


def _read_at(node: fx.Node, source: Tensor, indices: Sequence[Tensor]) -> Tensor:
    """The entries that a node reads, of a tensor at indices that broadcast."""
    # Python's brackets would read the value of an index that is the same everywhere.
    return node.target(source, [i.long() for i in torch.broadcast_tensors(*indices)])  # type: ignore[operator]


def _is_read(node: fx.Node) -> bool:
    return node.target is aten.index.Tensor


def is_row(node: fx.Node) -> bool:
    """Whether the value of a computed node is a row of numbers."""
    if node.target is aten.detach.default:  # a captured tensor stays one
        return is_row(node.args[0])  # type: ignore[arg-type]
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.dim() > 0 and node.op == "call_function"


def is_needed(table: Table) -> bool:
    """Whether a kernel could not compute a table's node: rows would need too many registers."""
    rows = filter(is_row, _parts(table))
    return any(elements_of(row) > LONGEST_ROW for row in rows)


def takes_many_reads(table: Table, ends: Callable[[fx.Node], bool]) -> bool:
    """Whether a kernel could compute a table's node only in many reads, one after another.

    ends: whether the operands of a node are not needed.
    """
    return _reads(_parts(table, ends)) > _MOST_READS


def _parts(
    table: Table, ends: Callable[[fx.Node], bool] = lambda node: False
) -> Collection[fx.Node]:
    """The nodes that a table's node needs. What the index needs is read either way."""
    axes = (axis for axis in table.axes if isinstance(axis, Coordinate))
    kept = {atom for axis in axes for atom, _ in axis.terms}

    def sources(node: fx.Node) -> list[fx.Node]:
        return [] if ends(node) else [x for x in node.all_input_nodes if x not in kept]

    return reached(table.node, sources)


def is_search(node: fx.Node) -> bool:
    """Whether a node is computed with rows of numbers, or by a search among them."""
    parts = reached(node)
    return any(map(is_row, parts)) or _reads(parts) > _MOST_READS


def _reads(parts: Collection[fx.Node]) -> int:
    return sum(map(_is_read, parts))


def is_subtracted(node: fx.Node) -> bool:
    """Whether a node of floats has users, and these subtract it from others.

    Kernels then add its negative: for a sum, they need one instruction less for each score.
    """
    return is_float(node) and len(node.users) > 0 and all(
        user.target is aten.sub.Tensor and user.args[1] is node and user.args[0] is not node
        and not user.kwargs
        for user in node.users
    )  # fmt: skip


def has_plain_reads(node: fx.Node) -> bool:
    """Whether a node needs no rows of captured tensors, but single entries."""
    reads = filter(_is_read, reached(node))
    return all(None not in read.args[1] for read in reads)  # type: ignore[operator]


def _apply(node: fx.Node, values: Mapping[fx.Node, Any]) -> Any:
    args, kwargs = (fx.map_arg(given, values.__getitem__) for given in (node.args, node.kwargs))
    return node.target(*of_one_dtype(node.target, args), **kwargs)  # type: ignore[operator]


def _widened(capture: Capture) -> Capture:
    if not isinstance(capture, Tensor):
        return capture
    is_narrow = capture.is_floating_point() and capture.dtype.itemsize < 4
    return capture.float() if is_narrow else capture
