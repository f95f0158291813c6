"""Cheaper arithmetic on positions.

`slope * (kv_idx - q_idx)` subtracts integers for every score and converts each difference to a
float, which is as slow as an exponential. Converting the two positions first gives the same value
if fp32 represents all integers on the way, and needs only one conversion per row and column. So
does every sum of what depends on the query and what depends on the key, such as the distance of
two patches of an image, `(q_idx // 64 - kv_idx // 64).abs() + (q_idx % 64 - kv_idx % 64).abs()`.

Quotients and remainders follow Python: they round down. Inductor prints that as a division that
rounds to zero, and corrections for negative numbers, which the compiler cannot remove because it
does not know that positions are not negative.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import fx

from flexhop.analysis import INDICES, Analysis, analyse

aten = torch.ops.aten
convert = torch.ops.prims.convert_element_type.default
_FLOAT_OPS = (aten.mul.Tensor, aten.add.Tensor, aten.sub.Tensor, aten.div.Tensor)
# Of integers that fp32 represents, these are the same in fp32, if it represents the result.
_EXACT = (
    aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.abs.default, aten.neg.default,
    aten.maximum.default, aten.minimum.default,
)  # fmt: skip
_QUOTIENTS = (aten.floor_divide.default, aten.div.Tensor_mode, aten.div.Scalar_mode)
_REMAINDERS = (aten.remainder.Scalar, aten.remainder.Tensor)
# Of remainders and quotients: by powers of two, for integers of either sign; and others.
_ROUNDS_DOWN = (aten.bitwise_and.Scalar, aten.bitwise_right_shift.Tensor_Scalar)
_ROUNDS_TO_ZERO = (aten.fmod.Scalar, aten.div.Tensor_mode)
_LARGEST = 2**24  # fp32 represents all integers up to this
# Bounds on positions: the sum of two is exact.
_SIZES = dict.fromkeys(INDICES, _LARGEST // 2)


def cheaper(graph: fx.GraphModule, inputs: tuple[str, ...]) -> fx.GraphModule:
    """The same function with cheaper divisions, and sums in floats if they become floats.

    Args:
        graph: (*inputs, ...) -> value or values; not changed.
        inputs: names of its first inputs, as in `analyse`.
    """
    module = _copy(graph)
    sites = [site for node in module.graph.nodes for site in _conversions(node)]
    if sites:
        writer = _Writer(module.graph, analyse(module, inputs, _SIZES))
        for user, position in sites:
            writer.convert_operand(user, position)
    _replace_divisions(module, inputs)  # last: bounds follow from what the user wrote
    module.graph.eliminate_dead_code()
    module.recompile()
    return module


def _copy(graph: fx.GraphModule) -> fx.GraphModule:
    result = fx.Graph()
    output = result.graph_copy(graph.graph, {})
    result.output(output)
    return fx.GraphModule(graph, result)


def _replace_divisions(module: fx.GraphModule, inputs: tuple[str, ...]) -> None:
    """Replace quotients and remainders of integers by a positive number of the program."""
    found = [(node, kind) for node in module.graph.nodes if (kind := _division(node)) is not None]
    if any(not _is_power_of_two(node.args[1]) for node, _ in found):
        facts = analyse(module, inputs, _SIZES)
        never_negative = {node for node, _ in found if facts[node.args[0]].low >= 0}
    else:
        never_negative = set[fx.Node]()
    for node, is_quotient in found:
        value, divisor = node.args
        options = {}
        if _is_power_of_two(divisor):
            kind, amount = _ROUNDS_DOWN[is_quotient], divisor.bit_length() - 1
            amount = amount if is_quotient else divisor - 1
        elif node in never_negative:
            kind, amount = _ROUNDS_TO_ZERO[is_quotient], divisor
            options = {"rounding_mode": "trunc"} if is_quotient else {}
        else:
            continue
        with module.graph.inserting_before(node):
            new = module.graph.call_function(kind, (value, amount), options)
        new.meta = dict(node.meta)
        node.replace_all_uses_with(new)
        module.graph.erase_node(node)


def _division(node: fx.Node) -> bool | None:
    """Whether a node is a quotient that rounds down, or its remainder; None: neither."""
    rounding = node.kwargs.get("rounding_mode")
    is_quotient = node.target in _QUOTIENTS and rounding in (None, "floor")
    if not (is_quotient or node.target in _REMAINDERS):
        return None
    value, divisor = node.args
    is_number = isinstance(divisor, int) and not isinstance(divisor, bool) and divisor > 0
    is_plain = isinstance(value, fx.Node) and _is_integer(value) and _is_integer(node)
    return is_quotient if is_number and is_plain else None


def _is_power_of_two(number: Any) -> bool:
    return number & (number - 1) == 0


def _conversions(node: fx.Node) -> list[tuple[fx.Node, int]]:
    """The operands of a node that are sums of integers, and converted to fp32."""
    if node.target is convert and node.args[1] == torch.float32:
        positions = range(1)
    elif node.target in _FLOAT_OPS and _dtype(node) == torch.float32:
        positions = range(2)
    else:
        return []
    operands = ((i, node.args[i]) for i in positions)
    return [(node, i) for i, x in operands if isinstance(x, fx.Node) and _is_sum(x)]


def _is_sum(node: fx.Node) -> bool:
    return node.target in _EXACT and not node.kwargs and _is_integer(node)


def _is_integer(node: fx.Node) -> bool:
    return _dtype(node) in (torch.int32, torch.int64)


def _dtype(node: object) -> torch.dtype | None:
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return value.dtype if isinstance(value, torch.Tensor) else None


class _Writer:
    """Writes sums of integers in fp32.

    Args:
        graph: changed in place.
        found: its analysis.
    """

    def __init__(self, graph: fx.Graph, found: Analysis) -> None:
        self.graph, self.found = graph, found

    def convert_operand(self, user: fx.Node, position: int) -> None:
        """Give `user` this operand in fp32, if that is exact."""
        value = cast("fx.Node", user.args[position])
        if not self._is_exact(value):
            return
        with self.graph.inserting_before(user):
            new = self._as_float(value)
        if user.target is convert:
            user.replace_all_uses_with(new)
        else:
            user.update_arg(position, new)

    def _is_exact(self, operand: Any) -> bool:
        """Whether fp32 represents an operand, and what it is made of."""
        if isinstance(operand, int):
            return abs(operand) <= _LARGEST
        if not isinstance(operand, fx.Node) or not _is_integer(operand):
            return False
        facts = self.found[operand]
        if not (-_LARGEST <= facts.low and facts.high <= _LARGEST):
            return False
        return all(map(self._is_exact, operand.args)) if _is_sum(operand) else _is_narrow(facts)

    def _as_float(self, node: fx.Node) -> fx.Node:
        if _is_sum(node):
            operands = (self._as_float(x) if isinstance(x, fx.Node) else x for x in node.args)
            new = self.graph.call_function(cast("Any", node.target), tuple(operands))
        else:
            new = self.graph.call_function(convert, (node, torch.float32))
        new.meta["val"] = node.meta["val"].to(torch.float32)
        return new


def _is_narrow(facts: Any) -> bool:
    """Whether a value is converted once per row or column, not once per score."""
    return "score" not in facts.depends and not {"q", "k"} <= facts.depends
