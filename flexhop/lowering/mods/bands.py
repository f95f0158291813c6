"""mask_mods that keep the keys near a query, such as sliding windows: how far they reach.

A query then sees the keys between two numbers, q_idx + first and q_idx + end. Hopper's kernels
make bits of these for a whole step, which takes fewer instructions than two comparisons of each
score. A mask with one side, such as a causal one, has one comparison, and stays a function.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import fx

aten = torch.ops.aten
_FAR = 2**30  # a side that is not there; sums of it and a position fit 32 bits


class Band(NamedTuple):
    """Keys from q_idx + first on, to before q_idx + end."""

    first: int
    end: int


def key_band(mask: fx.GraphModule) -> Band | None:
    """The band that a mask_mod keeps; None if it keeps anything else, or has one side only.

    Args:
        mask: (b, h, q_idx, kv_idx, *captures) -> bool.
    """
    result = mask.graph.output_node().args[0]
    result = result[0] if isinstance(result, (tuple, list)) else result
    _, _, q_idx, kv_idx = mask.graph.find_nodes(op="placeholder")[:4]
    band = _band_of(result, {q_idx: _Line(1, 0, 0), kv_idx: _Line(0, 1, 0)})
    has_both = band is not None and -_FAR < band.first and band.end < _FAR
    return band if has_both else None


class _Line(NamedTuple):
    """of_query * q_idx + of_key * kv_idx + offset."""

    of_query: int
    of_key: int
    offset: int

    def plus(self, other: _Line, sign: int = 1) -> _Line:
        return _Line(*(a + sign * b for a, b in zip(self, other, strict=True)))


_ZERO = _Line(0, 0, 0)
_Known = dict[fx.Node, _Line]


def _band_of(node: Any, known: _Known) -> Band | None:
    """The band of a node that is true or false; one side may be far."""
    target = getattr(node, "target", None)
    operator = getattr(target, "overloadpacket", None)
    if operator in (aten.bitwise_and, aten.logical_and):
        parts = [_band_of(operand, known) for operand in node.args]
        return None if None in parts else _meet(*parts)  # type: ignore[arg-type]
    if operator in _COMPARISONS:
        larger, smaller, least = _COMPARISONS[operator](*node.args)
        return _difference_band(larger, smaller, least, known)
    return None


# Which operand is the larger one, and by how much at least.
_COMPARISONS: dict[Any, Callable[[Any, Any], tuple[Any, Any, int]]] = {
    aten.ge: lambda a, b: (a, b, 0),
    aten.gt: lambda a, b: (a, b, 1),
    aten.le: lambda a, b: (b, a, 0),
    aten.lt: lambda a, b: (b, a, 1),
}


def _meet(a: Band, b: Band) -> Band:
    return Band(max(a.first, b.first), min(a.end, b.end))


def _difference_band(larger: Any, smaller: Any, least: int, known: _Known) -> Band | None:
    """Where larger - smaller >= least; smaller may be the magnitude of a distance."""
    top = _line_of(larger, known)
    is_magnitude = getattr(smaller, "target", None) is aten.abs.default
    line = _line_of(smaller.args[0] if is_magnitude else smaller, known)
    if top is None or line is None:
        return None
    sides = [_side(top.plus(line, -sign), least) for sign in ((1, -1) if is_magnitude else (1,))]
    return None if None in sides else _meet(sides[0], sides[-1])  # type: ignore[arg-type]


def _side(line: _Line, least: int) -> Band | None:
    """Where a line that goes by the distance of key and query is at least `least`."""
    offset = line.offset - least
    if abs(offset) >= _FAR or line.of_query != -line.of_key:
        return None
    if line.of_key == 1:
        return Band(-offset, _FAR)
    return Band(-_FAR, offset + 1) if line.of_key == -1 else None


def _line_of(value: Any, known: _Known) -> _Line | None:
    """A number, a position, or a sum or difference of such, in integers; None if it is neither."""
    if isinstance(value, int) and not isinstance(value, bool):
        return _Line(0, 0, value)
    if not isinstance(value, fx.Node):
        return None
    if value in known or value.kwargs or not _is_integer(value):
        return known.get(value)
    operator = getattr(value.target, "overloadpacket", None)
    lines = [_line_of(operand, known) for operand in value.args]
    if operator not in _SUMS or None in lines:
        return None
    return _SUMS[operator](*lines)


def _is_integer(node: fx.Node) -> bool:
    example = node.meta.get("val")
    return isinstance(example, torch.Tensor) and example.dtype in (torch.int32, torch.int64)


_SUMS: dict[Any, Callable[..., _Line]] = {
    aten.add: _Line.plus,
    aten.sub: lambda a, b: a.plus(b, -1),
    aten.rsub: lambda a, b: b.plus(a, -1),
    aten.neg: lambda a: _ZERO.plus(a, -1),
    aten.clone: lambda a: a,
}
