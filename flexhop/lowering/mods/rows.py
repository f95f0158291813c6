"""Captured tensors that are read in rows: neighbouring keys are neighbours in memory.

A bias of pairs, `bias[b, h, q_idx, kv_idx]`, is the common case. A GPU copies such rows in pieces
of 16 bytes, ahead of their use, and adds four neighbours of a gradient at once.

Some kernels copy whole tiles of it. It is then a matrix with a row for each query of each head
and batch. The kernel's score_mod takes what it reads there as an input, and another function says
which row is the first of a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from flexhop.analysis import Analysis, copied
from flexhop.compat.graphs import views
from flexhop.lowering.mods.analysed import (
    INDICES,
    SCORE,
    analyse_kernel,
    analysed,
    kernel_graph,
    positions_of,
    reads_of,
)
from flexhop.lowering.mods.captured import ends_in, is_by_distance, is_one_to_one
from flexhop.lowering.problem import COPIED, Axis, PairRows
from flexhop.templates.printers.holes import PAIRS, CopiedPairs

aten, prims = torch.ops.aten, torch.ops.prims
_PIECE = 16  # bytes
_SIZES = {torch.float16: 2, torch.bfloat16: 2, torch.float32: 4}  # bytes of what kernels copy
_AXES: tuple[Axis, ...] = ("query", "key")


def row_bytes(score: fx.GraphModule) -> int:
    """Bytes that a score_mod reads per score in rows of keys; 0 if it reads other pairs, too."""
    found = analysed(score, SCORE)
    pairs = _pairs_of(found)
    if not all(_is_in_rows(found, read) for read in pairs):
        return 0
    return sum(read.meta["val"].dtype.itemsize for read in pairs)


def head_row_bytes(mod: fx.GraphModule, roles: tuple[str, ...]) -> int:
    """Bytes that a mod reads per score in rows of pairs of each head that all batches share."""
    found = analysed(mod, roles)
    return sum(
        read.meta["val"].dtype.itemsize
        for read in _pairs_of(found)
        if all(_rows_of(found, read, axis) for axis in _AXES)
        and "h" in (depends := found.forms.of_all(read.args[1]))
        and "b" not in depends
    )


def mask_rows(mask: fx.GraphModule) -> PairRows | None:
    """How neighbouring scores read what a mask_mod reads at both positions; None: in other ways.

    Triton copies elements of four bytes and more, and shorter ones in aligned rows.
    """
    found = analysed(mask, INDICES)
    ways: set[PairRows | None] = {_way(found, read) for read in _pairs_of(found)}
    if ways == {"keys", "short keys"}:
        return "short keys"
    return ways.pop() if len(ways) == 1 else None


def _pairs_of(found: Analysis) -> list[Any]:
    """Reads at indices that depend on both positions."""
    return [read for read, positions in reads_of(found) if all(positions)]


def _way(found: Analysis, read: Any) -> PairRows | None:
    """How neighbouring scores read one tensor."""
    dtype = read.meta["val"].dtype
    if (rows := _rows_of(found, read, "key")) is not None and rows[-1] == 1:
        is_copied = dtype.itemsize >= COPIED or _is_aligned(rows, dtype)
        return "keys" if is_copied else "short keys"
    if (rows := _rows_of(found, read, "query")) is not None and rows[-1] == 1:
        return "queries"
    return "distances" if _is_on_diagonals(found, read) else None


def _is_on_diagonals(found: Analysis, read: Any) -> bool:
    """Whether neighbouring keys read neighbours in a table by distance."""
    strides = read.args[0].meta["val"].stride()
    indices = list(zip(read.args[1], strides, strict=False))
    own = [(i, stride) for i, stride in indices if any(positions_of(found, [i]))]
    if len(own) != 1 or own[0][1] != 1:
        return False
    return is_by_distance(found, own[0][0]) and is_one_to_one(found, own[0][0])


def _is_in_rows(found: Analysis, read: Any) -> bool:
    """Whether one index is the key, whose neighbours are side by side in rows that are aligned.

    The key's dimension need not be the last one: a tensor may be a view of a transposed one.
    """
    strides = _rows_of(found, read, "key")
    return strides is not None and _is_aligned(strides, read.meta["val"].dtype)


def _rows_of(found: Analysis, read: Any, axis: Axis) -> list[Any] | None:
    """The strides of what is read, that of keys (or queries) last; None if no index is a key."""
    strides, indices = list(read.args[0].meta["val"].stride()), list(read.args[1])
    own = _dimension_of(found, indices, axis) if len(indices) == len(strides) else None
    return None if own is None else [*strides[:own], *strides[own + 1 :], strides[own]]


def _dimension_of(found: Analysis, indices: list[Any], axis: Axis) -> int | None:
    """The dimension of which the query, or the key, is the index; None if there are others."""
    at = _AXES.index(axis)
    own = [i for i, index in enumerate(indices) if positions_of(found, [index])[at]]
    if len(own) != 1:
        return None
    others = [index for i, index in enumerate(indices) if i != own[0]]
    return own[0] if ends_in(found, [*others, indices[own[0]]], axis) else None


def _is_aligned(strides: Sequence[Any], dtype: torch.dtype) -> bool:
    """Whether rows start at multiples of 16 bytes; the last stride is that of a row's elements."""
    *others, last = strides
    piece = max(1, _PIECE // dtype.itemsize)
    return last == 1 and all(isinstance(n, int) and n % piece == 0 for n in others)


class Bias(NamedTuple):
    """A score_mod without its only read at both positions.

    score: (*SCORE, pairs, *captures) -> score. row: (*SCORE, *captures) -> the row of the first
    query. pairs: the matrix.
    """

    score: fx.GraphModule
    row: fx.GraphModule
    pairs: CopiedPairs


class _Read(NamedTuple):
    """A read of rows: its node, the captured tensor, and its dimensions that are positions."""

    node: Any
    source: Any
    query: int
    key: int


def copied_bytes(score: Any) -> int:
    """Bytes per score that a kernel could copy of a bias of pairs, 0 if there is none.

    Whether its rows start at multiples of 16 bytes is known if its strides are numbers here.
    """
    read = _find_copied(kernel_graph(score, SCORE))
    if read is None:
        return 0
    source = read.source.meta["val"]
    sizes = _matrix(read, source.size(), source.stride(), source.dtype)
    return 0 if sizes is None else source.dtype.itemsize


def apart(score: fx.GraphModule, captures: Any) -> Bias | None:
    """The parts of a score_mod that reads a bias of pairs; None if it cannot be copied as it lies.

    Args:
        score: (*SCORE, *captures) -> score.
        captures: what it captures, lowered.
    """
    read = _find_copied(score)
    if read is None:
        return None
    inputs = score.graph.find_nodes(op="placeholder")
    source = captures[inputs.index(read.source) - len(SCORE)]
    sizes, strides = source.get_size(), source.get_stride()
    matrix = _matrix(read, sizes, strides, source.get_dtype())
    offset = source.get_layout().offset
    is_aligned = _is_number(offset) and views.starts_aligned(source, _PIECE)
    if matrix is None or not is_aligned:
        return None
    pairs = CopiedPairs(source.get_name(), int(offset), *matrix)
    return Bias(_without(score, read), _first_row(score, read, strides, matrix[-1]), pairs)


def _find_copied(score: fx.GraphModule) -> _Read | None:
    """The only read at both positions, if it is at one query and one key."""
    found = analyse_kernel(score, SCORE)
    pairs = _pairs_of(found)
    reads = score.graph.find_nodes(op="call_function", target=aten.index.Tensor)
    nodes: list[Any] = [read for read in reads if found.known[read] in pairs]
    if len(pairs) != 1 or len(nodes) != 1:
        return None
    (node,) = nodes
    source, indices = _as_fp32(node.args[0]), node.args[1]
    value = source.meta["val"]
    if source.op != "placeholder" or None in indices or len(indices) != value.dim():
        return None
    known = [found.known[index] for index in indices]
    query, key = (_dimension_of(found, known, axis) for axis in _AXES)
    if query is None or key is None or value.dtype not in _SIZES:
        return None
    return _Read(node, source, query, key)


def _as_fp32(source: Any) -> Any:
    """What is converted to fp32 as a whole, as kernels convert what they copy."""
    is_converted = source.target is prims.convert_element_type.default
    return source.args[0] if is_converted and source.args[1] == torch.float32 else source


def _matrix(read: _Read, sizes: Any, strides: Any, dtype: Any) -> tuple[Any, Any, int] | None:
    """Rows, columns and stride of the matrix; None if it is none, or not aligned.

    Strides are numbers. Sizes need not be, such as that of the outermost dimension.
    """
    if not all(map(_is_number, strides)):
        return None
    strides = list(map(int, strides))
    stride, unit = strides[read.query], _PIECE // _SIZES.get(dtype, _PIECE)
    outer = [i for i in range(len(sizes)) if i not in (read.query, read.key)]
    if strides[read.key] != 1 or stride <= 0 or stride % unit:
        return None
    if any(strides[i] % stride or strides[i] < 0 for i in outer):
        return None
    first = sum((sizes[i] - 1) * (strides[i] // stride) for i in outer)
    return first + sizes[read.query], sizes[read.key], stride


def _is_number(value: Any) -> bool:
    return isinstance(value, int) or bool(getattr(value, "is_number", False))


def _without(score: fx.GraphModule, read: _Read) -> fx.GraphModule:
    module, copies = copied(score)
    inputs = module.graph.find_nodes(op="placeholder")
    with module.graph.inserting_after(inputs[len(SCORE) - 1]):
        pairs = module.graph.placeholder(PAIRS)
    pairs.meta["val"] = read.node.meta["val"]
    copies[read.node].replace_all_uses_with(pairs)
    module.graph.eliminate_dead_code()
    module.recompile()
    return module


def _first_row(score: fx.GraphModule, read: _Read, strides: Any, stride: int) -> fx.GraphModule:
    module, copies = copied(score)
    output = module.graph.output_node()
    others = [axis for axis in range(len(strides)) if axis not in (read.query, read.key)]
    with module.graph.inserting_before(output):
        # A number of the kernel, also if there are no other dimensions.
        batch = module.graph.find_nodes(op="placeholder")[SCORE.index("b")]
        total = _insert(module, aten.mul.Tensor, batch, 0)
        for axis in others:
            factor = int(strides[axis]) // stride
            part = _insert(module, aten.mul.Tensor, copies[read.node.args[1][axis]], factor)
            total = _insert(module, aten.add.Tensor, total, part)
    output.args = (total,)
    module.graph.eliminate_dead_code()
    module.recompile()
    return module


def _insert(module: fx.GraphModule, target: Any, *args: Any) -> fx.Node:
    node = module.graph.call_function(target, args)
    node.meta["val"] = args[0].meta["val"]
    return node
