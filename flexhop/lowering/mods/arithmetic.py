"""Cheaper arithmetic on positions.

`slope * (kv_idx - q_idx)` subtracts integers for every score and converts each difference to a
float, which is as slow as an exponential. Converting the two positions first gives the same value
if fp32 represents all integers on the way, and needs only one conversion per row and column. So
does every sum of what depends on the query and what depends on the key, such as the distance of
two patches of an image, `(q_idx // 64 - kv_idx // 64).abs() + (q_idx % 64 - kv_idx % 64).abs()`.

Conversions round to the nearest float, so they keep order and signs: the magnitude, the larger or
the smaller of integers of 64 bits is that of their floats, however large they are. A magnitude of
floats takes no instruction, one of int64 seven. (-2**63 has no magnitude in int64, but it has one
here.)

Quotients and remainders follow Python: they round down. Inductor prints that as a division that
rounds to zero, and corrections for negative numbers, which the compiler cannot remove because it
does not know that positions are not negative. Kernels multiply by a reciprocal instead
(compat/kernels/integers.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from flexhop.analysis import Analysis, Answers, copied, dtype_of, quotient_of, settled
from flexhop.compat.kernels.integers import note_quotient
from flexhop.lowering.mods.analysed import analyse_kernel, per_graph
from flexhop.lowering.mods.narrow import narrowed

aten = torch.ops.aten
convert = torch.ops.prims.convert_element_type.default
_FLOAT_OPS = (aten.mul.Tensor, aten.add.Tensor, aten.sub.Tensor, aten.div.Tensor)
# Of integers that fp32 represents, these are the same in fp32, if it represents the result.
_EXACT = (
    aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.abs.default, aten.neg.default,
    aten.maximum.default, aten.minimum.default,
)  # fmt: skip
# Of any int64, these are the same in fp32, after rounding.
_ORDERED = (
    aten.abs.default, aten.neg.default, aten.relu.default,
    aten.maximum.default, aten.minimum.default,
    aten.clamp.default, aten.clamp_min.default, aten.clamp_max.default,
)  # fmt: skip
_LARGEST = 2**24  # fp32 represents all integers up to this


@per_graph
def cheaper(graph: fx.GraphModule, inputs: tuple[str, ...]) -> fx.GraphModule:
    """The same function with cheaper divisions, integers of 32 bits if they fit, and sums in
    floats if they become floats.

    Args:
        graph: (*inputs, ...) -> value or values; not changed.
        inputs: names of its first inputs, as in `analyse`.
    """
    graph = narrowed(graph, inputs)
    module, copies = copied(graph)
    floats = _Floats(analyse_kernel(graph, inputs), copies)
    for node, copy in copies.items():
        with module.graph.inserting_before(copy):
            floats.convert_operands(node)
            if (new := _division(node, copy, floats.found)) is not None:
                new.meta = copy.meta | new.meta
                copy.replace_all_uses_with(new)
                copies[node] = new
    return settled(module, graph)


def _division(node: fx.Node, copy: fx.Node, known: Analysis) -> fx.Node | None:
    """A quotient that rounds down, or its remainder, of integers by a positive number."""
    found = quotient_of(known.forms, known.known[node])
    arguments: Any = copy.args
    if found is None or not found.rounds_down or not all(map(_is_integer, (arguments[0], node))):
        return None
    value, divisor = arguments[0], found.divisor
    call = copy.graph.call_function
    if divisor & (divisor - 1) == 0:  # for integers of either sign
        if found.is_remainder:
            return call(aten.bitwise_and.Scalar, (value, divisor - 1))
        return call(aten.bitwise_right_shift.Tensor_Scalar, (value, divisor.bit_length() - 1))
    low, high = known.forms.range_of(found.value)
    if low < 0:
        return None
    if found.is_remainder:
        new = call(aten.fmod.Scalar, (value, divisor))
    else:
        new = call(aten.div.Tensor_mode, (value, divisor), {"rounding_mode": "trunc"})
    return note_quotient(new, divisor, high)


def _is_sum(node: fx.Node) -> bool:
    return node.target in _EXACT and not node.kwargs and _is_integer(node)


def _is_integer(node: object) -> bool:
    return dtype_of(node) in (torch.int32, torch.int64)


class _Floats:
    """Writes sums of integers in fp32.

    Args:
        found: the analysis of a graph.
        copies: the copy of each node, to which they are written.
    """

    def __init__(self, found: Analysis, copies: Mapping[fx.Node, fx.Node]) -> None:
        self.found, self.copies = found, copies
        self._known: dict[fx.Node, fx.Node] = {}
        self._answers = Answers(len(copies))

    def convert_operands(self, user: fx.Node) -> None:
        """Give a node in fp32 the operands that are sums of integers in fp32, if that is exact."""
        is_conversion = user.target is convert and user.args[1] == torch.float32
        if not is_conversion and not (
            user.target in _FLOAT_OPS and dtype_of(user) == torch.float32
        ):
            return
        for place, value in enumerate(user.args[:2]):
            if isinstance(value, fx.Node) and self._is_cheaper(value):
                new = self._as_float(value)
                if is_conversion:
                    self.copies[user].replace_all_uses_with(new)
                else:
                    self.copies[user].update_arg(place, new)

    def _is_cheaper(self, value: fx.Node) -> bool:
        """Whether a value is to be computed in fp32, where it is the same."""
        if _is_sum(value) and self._is_lossless(value):
            return True
        is_ordered = value.target in _ORDERED and dtype_of(value) == torch.int64
        return is_ordered and not value.kwargs and all(map(self._is_bound, value.args[1:]))

    def _is_bound(self, other: Any) -> bool:
        """Whether the other operand of an order is not converted for every score, but exactly."""
        if isinstance(other, fx.Node):
            return not {"q", "k"} <= self.found[other].depends
        return other is None or (isinstance(other, int) and abs(other) <= _LARGEST)

    def _is_lossless(self, operand: Any) -> bool:
        """Whether fp32 represents an operand, and what it is made of."""
        if not isinstance(operand, fx.Node):
            return isinstance(operand, int) and abs(operand) <= _LARGEST
        return self._answers.of("lossless", operand, self._is_lossless_node)

    def _is_lossless_node(self, operand: fx.Node) -> bool:
        facts = self.found[operand]
        if not (_is_integer(operand) and max(-facts.low, facts.high) <= _LARGEST):
            return False
        if _is_sum(operand):
            return all(map(self._is_lossless, operand.args))
        # Converted once per row or column, not once per score.
        return "score" not in facts.depends and not {"q", "k"} <= facts.depends

    def _as_float(self, node: Any) -> Any:
        if not isinstance(node, fx.Node):
            return node
        if node not in self._known:
            target: Any = convert
            operands = (self.copies[node], torch.float32)
            if self._is_cheaper(node):
                target, operands = node.target, tuple(map(self._as_float, node.args))
            new = self.copies[node].graph.call_function(target, operands)
            new.meta["val"] = node.meta["val"].to(torch.float32)
            self._known[node] = new
        return self._known[node]
