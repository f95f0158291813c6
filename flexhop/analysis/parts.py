"""Operators by what they are made of: sums of products, and numbers between limits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from flexhop.analysis.operators import packet_of

aten = torch.ops.aten
Product = tuple[Any, tuple[Any, ...]]  # a factor from the program, and operands
# x is an option, and y the same in another place.
_SUMS: dict[Any, Callable[..., list[Product]]] = {
    aten.add: lambda x, a, b, y=1: [(1, (a,)), (x * y, (b,))],
    aten.sub: lambda x, a, b, y=1: [(1, (a,)), (-x * y, (b,))],
    aten.rsub: lambda x, a, b, y=1: [(1, (b,)), (-x * y, (a,))],
    aten.neg: lambda x, a: [(-1, (a,))],
    aten.mul: lambda x, a, b: [(1, (a, b))],
    aten.addcmul: lambda x, a, b, c: [(1, (a,)), (x, (b, c))],
}
_LIMITS: dict[Any, Callable[..., tuple[Any, Any, Any]]] = {
    aten.relu: lambda value: (value, 0, None),
    aten.maximum: lambda value, least: (value, least, None),
    aten.minimum: lambda value, most: (value, None, most),
    aten.clamp_min: lambda value, least: (value, least, None),
    aten.clamp_max: lambda value, most: (value, None, most),
    aten.clamp: lambda value, least=None, most=None: (value, least, most),
}


def sum_of(node: fx.Node) -> list[Product] | None:
    """The products whose sum a node is; None for other operators."""
    rule, options = _SUMS.get(packet_of(node.target)), dict(node.kwargs)
    factor = options.pop("alpha", options.pop("value", 1))
    return None if rule is None or options else rule(factor, *node.args)


def exact_sum_of(node: fx.Node) -> list[Product] | None:
    """The same with integers as factors; None for sums of products, which may be rounded, or
    overflow, before the sum."""
    found = sum_of(node) or []
    is_mixed = len(found) > 1 and any(len(operands) > 1 for _, operands in found)
    is_whole = all(isinstance(factor, int) for factor, _ in found)
    return found if found and is_whole and not is_mixed else None


def limits_of(node: fx.Node) -> tuple[Any, Any, Any] | None:
    """A number that a node holds between limits, the least and the most, or None for no limit;
    None for other operators."""
    rule = _LIMITS.get(packet_of(node.target))
    return None if rule is None or node.kwargs else rule(*node.args)
