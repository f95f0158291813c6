"""Integers of 64 bits in 32, where the analysis proves that they fit.

`q_idx.long() // 64` is an integer of 64 bits, as PyTorch's own indices are. A comparison of two
such numbers takes two instructions, a product four, and a quotient a dozen. What starts from
positions and constants is small, so the same operators of 32 bits give the same numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from flexhop.analysis import Analysis, copied, dtype_of, is_comparison, is_conversion, name_of
from flexhop.analysis.written import convert
from flexhop.lowering.mods.analysed import analyse_kernel

_LIMIT = 2**31
# Of integers of 64 bits; of 32 bits they are the same if their operands and results fit.
_OPERATORS = frozenset({
    "add", "sub", "rsub", "mul", "neg", "abs", "sign", "floor_divide", "remainder", "fmod", "div",
    "minimum", "maximum", "clamp", "clamp_min", "clamp_max", "relu", "where",
    "bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_not", "bitwise_right_shift",
    "__and__", "__or__", "__xor__", "__rshift__",
})  # fmt: skip


def narrowed(graph: fx.GraphModule, inputs: tuple[str, ...]) -> fx.GraphModule:
    """The same function, whose integers have 32 bits if they fit.

    Args:
        graph: (*inputs, ...) -> value or values; not changed.
        inputs: names of its first inputs, as in `analyse`.
    """
    if not any(dtype_of(node) == torch.int64 for node in graph.graph.nodes):
        return graph
    module, copies = copied(graph)
    narrow = _Narrow(analyse_kernel(graph, inputs), copies)
    for node, copy in copies.items():
        if node.op == "call_function" and dtype_of(node) != torch.int64:
            narrow.change_operands(node, copy)
    module.graph.eliminate_dead_code()
    module.recompile()
    return module


class _Narrow:
    """Writes integers of 32 bits.

    Args:
        found: the analysis of a graph.
        copies: the copy of each node, to which they are written.
    """

    def __init__(self, found: Analysis, copies: Mapping[fx.Node, fx.Node]) -> None:
        self.found, self.copies = found, copies
        self._known: dict[fx.Node, fx.Node] = {}

    def change_operands(self, user: fx.Node, copy: fx.Node) -> None:
        """Give an operator of another dtype, such as a comparison, operands of 32 bits."""
        if is_comparison(user) and not all(map(self._fits, user.all_input_nodes)):
            return
        dtype = dtype_of(user)  # a size has none
        becomes_float = dtype is not None and dtype.is_floating_point
        for node in user.all_input_nodes:
            is_wide = dtype_of(node) == torch.int64 and self._fits(node)
            # Half of an integer of 64 bits is no cheaper to convert: arithmetic.py converts it.
            if is_wide and not (becomes_float and self._is_half(node)):
                copy.replace_input_with(self.copies[node], self._narrow(node))

    def _fits(self, value: Any) -> bool:
        """Whether an operand is a number, or an integer that has 32 bits or needs no more."""
        if not isinstance(value, fx.Node):
            return not isinstance(value, float) and -_LIMIT <= value < _LIMIT
        if dtype_of(value) != torch.int64:
            return dtype_of(value) in (torch.int32, torch.bool)
        facts = self.found[value]
        return -_LIMIT <= facts.low and facts.high < _LIMIT

    def _narrow(self, node: Any) -> Any:
        """An operand that fits, in 32 bits."""
        if not isinstance(node, fx.Node) or dtype_of(node) != torch.int64:
            return self.copies.get(node, node)
        if node not in self._known:
            self._known[node] = self._write(node)
        return self._known[node]

    def _is_half(self, node: fx.Node) -> bool:
        """Whether an integer that fits is made of one that may not."""
        is_source = is_conversion(node) or name_of(node) in _OPERATORS
        return not (is_source and all(map(self._fits, node.all_input_nodes)))

    def _write(self, node: fx.Node) -> fx.Node:
        copy, example = self.copies[node], node.meta["val"].to(torch.int32)
        target: Any = convert
        operands, options = (copy, torch.int32), {}
        if is_conversion(node) and dtype_of(node.args[0]) == torch.int32:
            return self._narrow(node.args[0])
        if name_of(node) in _OPERATORS and not self._is_half(node):
            target, options = node.target, dict(node.kwargs)
            operands = fx.map_arg(node.args, self._narrow)
        with copy.graph.inserting_after(copy):
            new = copy.graph.call_function(target, operands, options)
        new.meta["val"] = example
        return new
