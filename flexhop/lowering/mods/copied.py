"""A bias of pairs whose tiles a kernel copies, ahead of their use.

`bias[b, h, q_idx, kv_idx]` is a matrix with a row for each query of each head and batch. Then the
kernel's score_mod takes what it reads there as an input, and another function says which row is
the first of a head.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import fx

from flexhop.analysis import Analysis, copied
from flexhop.compat.graphs import views
from flexhop.lowering.mods.analysed import (
    SCORE,
    analyse_kernel,
    kernel_graph,
    positions_of,
    reads_of,
)
from flexhop.lowering.mods.captured import ends_in
from flexhop.lowering.mods.rows import PIECE
from flexhop.lowering.problem import Axis
from flexhop.templates.printers.holes import PAIRS, CopiedPairs

aten, prims = torch.ops.aten, torch.ops.prims
_SIZES = {torch.float16: 2, torch.bfloat16: 2, torch.float32: 4}  # bytes of what is copied
_AXES: tuple[Axis, ...] = ("query", "key")


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
    read = _find(kernel_graph(score, SCORE))
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
    read = _find(score)
    if read is None:
        return None
    inputs = score.graph.find_nodes(op="placeholder")
    source = captures[inputs.index(read.source) - len(SCORE)]
    sizes, strides = source.get_size(), source.get_stride()
    matrix = _matrix(read, sizes, strides, source.get_dtype())
    offset = source.get_layout().offset
    is_aligned = _is_number(offset) and views.starts_aligned(source, PIECE)
    if matrix is None or not is_aligned:
        return None
    pairs = CopiedPairs(source.get_name(), int(offset), *matrix)
    return Bias(_without(score, read), _row(score, read, strides, matrix[-1]), pairs)


def _find(score: fx.GraphModule) -> _Read | None:
    """The only read at both positions, if it is at one query and one key."""
    found = analyse_kernel(score, SCORE)
    pairs = {read for read, positions in reads_of(found) if all(positions)}
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
    query, key = (_place(found, known, axis) for axis in _AXES)
    if query is None or key is None or value.dtype not in _SIZES:
        return None
    return _Read(node, source, query, key)


def _as_fp32(source: Any) -> Any:
    """What is converted to fp32 as a whole, as kernels convert what they copy."""
    is_converted = source.target is prims.convert_element_type.default
    return source.args[0] if is_converted and source.args[1] == torch.float32 else source


def _place(found: Analysis, indices: list[Any], axis: Axis) -> int | None:
    """The dimension of which the query, or the key, is the index; None if there are others."""
    at = _AXES.index(axis)
    own = [i for i, index in enumerate(indices) if positions_of(found, [index])[at]]
    if len(own) != 1:
        return None
    others = [index for i, index in enumerate(indices) if i != own[0]]
    return own[0] if ends_in(found, [*others, indices[own[0]]], axis) else None


def _matrix(read: _Read, sizes: Any, strides: Any, dtype: Any) -> tuple[int, int, int] | None:
    """Rows, columns and stride of the matrix; None if it is none, or not aligned."""
    if not all(map(_is_number, (*sizes, *strides))):
        return None
    sizes, strides = list(map(int, sizes)), list(map(int, strides))
    stride, unit = strides[read.query], PIECE // _SIZES.get(dtype, PIECE)
    outer = [i for i in range(len(sizes)) if i not in (read.query, read.key)]
    if strides[read.key] != 1 or stride <= 0 or stride % unit or 0 in sizes:
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


def _row(score: fx.GraphModule, read: _Read, strides: Any, stride: int) -> fx.GraphModule:
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
