"""Rows of numbers that a mod makes and reduces: `stack([q >= k, q - k < w]).all(0)` is an `and`.

The rest of the analysis is about numbers. A row is followed element by element, from where it is
made to where it is reduced.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from flexhop.analysis.operators import OPERATORS, packet_of

aten = torch.ops.aten
_ONE = {aten.unsqueeze, aten.view, aten.reshape, aten.expand, aten._unsafe_view}
_REDUCTIONS = {
    aten.all: aten.bitwise_and.Tensor,
    aten.any: aten.bitwise_or.Tensor,
    aten.amin: aten.minimum.default,
    aten.min: aten.minimum.default,
    aten.amax: aten.maximum.default,
    aten.max: aten.maximum.default,
    aten.sum: aten.add.Tensor,
}


class Rows:
    """The elements of rows, by node.

    Args:
        call: (operator, args, kwargs, example) -> the node of an operator on numbers.
        longest: most elements of a row.
    """

    def __init__(self, call: Callable[..., Any], longest: int) -> None:
        self._call, self._longest = call, longest
        self._elements: dict[fx.Node, Sequence[Any]] = {}

    def number(self, target: Any, args: Sequence[Any], kwargs: Any, example: Any) -> Any:
        """The node of a number that is reduced or taken from a row; None for other operators."""
        row = self._elements.get(args[0]) if args and isinstance(args[0], fx.Node) else None
        if row is None or kwargs or not isinstance(example, Tensor) or example.dim():
            return None
        if target is aten.select.int:
            return row[args[2]]
        packet = packet_of(target)
        is_truth = packet in (aten.all, aten.any)
        if packet not in _REDUCTIONS or (is_truth and dtype_of(row[0]) != torch.bool):
            return None
        result, *others = (self._as(element, example.dtype) for element in row)
        for element in others:
            result = self._call(_REDUCTIONS[packet], (result, element), {}, example)
        return result

    def note(self, node: fx.Node, example: Any) -> None:
        """Find the elements of a node, if it is a row of numbers."""
        if isinstance(example, Tensor) and example.dim() == 1:
            found = self._made(node)
            if found is not None and len(found) == example.shape[0] <= self._longest:
                self._elements[node] = [self._as(element, example.dtype) for element in found]

    def _made(self, node: fx.Node) -> Sequence[Any] | None:
        operands: Any = node.args
        packet, first = packet_of(node.target), operands[0]
        if packet is aten.stack and all(map(is_number, first)):
            return list(first)
        if packet in _ONE and is_number(first):
            return [first]
        if packet is aten.cat and all(part in self._elements for part in first):
            return [element for part in first for element in self._elements[part]]
        sources = node.all_input_nodes
        rows = [self._elements[source] for source in sources if source in self._elements]
        others = [source for source in sources if source not in self._elements]
        if packet not in OPERATORS or not rows or not all(map(is_number, others)):
            return None
        # A row and a number of another dtype are combined in the dtype of the row.
        if len({len(row) for row in rows}) > 1 or len(set(map(dtype_of, sources))) > 1:
            return None
        example = _example(dtype_of(node))
        return [
            self._call(node.target, self._at(i, node.args), self._at(i, node.kwargs), example)
            for i in range(len(rows[0]))
        ]

    def _at(self, place: int, operands: Any) -> Any:
        """Operands with rows replaced by one of their elements."""
        return fx.map_arg(
            operands, lambda a: self._elements[a][place] if a in self._elements else a
        )

    def _as(self, element: Any, dtype: torch.dtype) -> Any:
        if dtype_of(element) == dtype:
            return element
        return self._call(aten._to_copy.default, (element,), {"dtype": dtype}, _example(dtype))


def _example(dtype: torch.dtype | None) -> Tensor:
    return torch.empty((), dtype=dtype, device="meta")


def is_number(value: Any) -> bool:
    """Whether a node is a 0-d tensor."""
    example = value.meta.get("val") if isinstance(value, fx.Node) else None
    return isinstance(example, Tensor) and example.dim() == 0


def dtype_of(value: Any) -> torch.dtype | None:
    """The dtype of a node, if it is a tensor."""
    example = value.meta.get("val") if isinstance(value, fx.Node) else None
    return example.dtype if isinstance(example, Tensor) else None
