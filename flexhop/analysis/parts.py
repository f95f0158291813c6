"""Operators by what they are made of: sums of products, and numbers between limits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from flexhop.analysis.operators import packet_of

aten = torch.ops.aten
Product = tuple[Any, ...]  # numbers of the program, which may be symbols, and nodes
# x is an option, and y the same in another place.
_SUMS: dict[Any, Callable[..., list[Product]]] = {
    aten.add: lambda x, a, b, y=1: [(a,), (b, x, y)],
    aten.sub: lambda x, a, b, y=1: [(a,), (b, x, y, -1)],
    aten.rsub: lambda x, a, b, y=1: [(b,), (a, x, y, -1)],
    aten.neg: lambda x, a: [(a, -1)],
    aten.mul: lambda x, a, b: [(a, b)],
    aten.addcmul: lambda x, a, b, c: [(a,), (b, c, x)],
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
    """The same; None for sums of products, which may be rounded, or overflow, before the sum."""
    found = sum_of(node) or []
    factors = (sum(isinstance(part, fx.Node) for part in product) for product in found)
    return None if not found or (len(found) > 1 and max(factors) > 1) else found


def limits_of(node: fx.Node) -> tuple[Any, Any, Any] | None:
    """A number that a node holds between limits, the least and the most, or None for no limit;
    None for other operators."""
    rule = _LIMITS.get(packet_of(node.target))
    return None if rule is None or node.kwargs else rule(*node.args)
