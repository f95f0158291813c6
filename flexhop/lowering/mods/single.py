"""Scores in fp32 beside numbers in fp64, as NumPy makes them.

PyTorch promotes `score + table[h]` to fp64 if the table is. The score is a number of fp32, and its
result becomes one, so what depends on it may be fp32 as well. What does not depend on it stays as
it is: the difference of two times would be lost. So stays a score that the mod itself converts to
fp64, and what may exceed the range of fp32, as an exponential does: kernels round the result.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from flexhop.analysis import (
    constant_of,
    copied,
    dependents,
    dtype_of,
    is_conversion,
    is_float,
    name_of,
    settled,
)
from flexhop.analysis.written import convert

_SUMS = frozenset({"add", "sub", "rsub", "addcmul", "addcdiv"})
# Rounding their operands first is as exact as rounding their result.
_PRODUCTS = frozenset({"mul", "div", "neg", "abs"})
# Their results are about as large as an operand.
_BOUNDED = _SUMS | _PRODUCTS | {
    "where", "masked_fill", "minimum", "maximum", "clamp", "clamp_min", "clamp_max", "relu",
    "sign", "sgn", "tanh", "sigmoid", "zeros_like", "ones_like", "full_like",
}  # fmt: skip


def in_single(graph: fx.GraphModule, inputs: tuple[str, ...]) -> fx.GraphModule:
    """The same function, which computes in fp32 what depends on the score or its gradient.

    Not if fp64 was asked for, or is needed: if it adds more than one number of fp64 to a score,
    they may cancel.

    Args:
        graph: (*inputs, *captures) -> value or values; not changed.
        inputs: names of its first inputs, as in `analyse`.
    """
    if not any(map(_is_double, graph.graph.nodes)):
        return graph
    given = graph.graph.find_nodes(op="placeholder")
    roots = dict(zip(inputs, given, strict=False))
    of_grad, of_score = (
        {roots[name], *dependents([roots[name]])} if name in roots else set()
        for name in ("grad", "score")
    )
    of_score = {node for node in of_score | of_grad if node.op == "call_function"}
    doubles = [node for node in graph.graph.nodes if node in of_score and _is_double(node)]
    if not doubles or not all(_may_be_single(node, of_grad) for node in doubles):
        return graph
    if sum(_adds_double(node, of_score) for node in doubles) > 1:
        return graph
    module, copies = copied(graph)
    single = _Single(copies, of_score)
    for node in doubles:
        single.become(node)
    for node in (copies[node] for node in graph.graph.nodes if node in of_score):
        _settle(node)
    return settled(module, graph)


class _Single:
    """Writes operators of fp32.

    Args:
        copies: the copy of each node, to which they are written.
        of_score: what depends on the score.
    """

    def __init__(self, copies: dict[fx.Node, fx.Node], of_score: set[fx.Node]) -> None:
        self.copies, self._of_score = copies, of_score

    def become(self, node: fx.Node) -> None:
        """Let the copy of a node in fp64 that depends on the score have operands in fp32."""
        copy = self.copies[node]
        if is_conversion(node):
            copy.target, copy.kwargs = convert, {}
            copy.args = (copy.args[0], torch.float32)
            return
        if copy.kwargs.get("dtype") == torch.float64:
            copy.update_kwarg("dtype", torch.float32)
        for other in _others(node, self._of_score):
            copy.replace_input_with(self.copies[other], self._write(other, copy))

    def _write(self, node: fx.Node, before: fx.Node) -> fx.Node:
        """A number of fp64 in fp32: a product of its factors in fp32, or the number rounded."""
        if name_of(node) in _PRODUCTS and not node.kwargs:
            target: Any = node.target
            operands = fx.map_arg(node.args, lambda x: self._factor(x, before))
        else:
            target, operands = convert, (self.copies[node], torch.float32)
        with before.graph.inserting_before(before):
            new = before.graph.call_function(target, operands)
        new.meta["val"] = node.meta["val"].to(torch.float32)
        return new

    def _factor(self, node: fx.Node, before: fx.Node) -> fx.Node:
        return self._write(node, before) if _is_double(node) else self.copies[node]


def _is_double(node: Any) -> bool:
    return isinstance(node, fx.Node) and dtype_of(node) == torch.float64


def _may_be_single(node: fx.Node, of_grad: set[fx.Node]) -> bool:
    """Whether an operator in fp64 has about the same result in fp32, and the mod did not ask for
    fp64: autograd converts gradients, and mods convert scores."""
    if is_conversion(node):
        (source,) = node.all_input_nodes
        return source in of_grad or not is_float(source)
    return name_of(node) in _BOUNDED


def _others(node: fx.Node, of_score: Iterable[fx.Node]) -> list[fx.Node]:
    """Operands in fp64 that do not depend on the score."""
    return [x for x in node.all_input_nodes if _is_double(x) and x not in of_score]


def _adds_double(node: fx.Node, of_score: Iterable[fx.Node]) -> bool:
    """Whether a number of fp64 that is not known is added to what depends on the score."""
    return name_of(node) in _SUMS and any(
        constant_of(other) is None for other in _others(node, of_score)
    )


def _settle(node: fx.Node) -> None:
    """Note the dtype that a node has now; drop it if it converts to the dtype that it gets."""
    target: Any = node.target
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda x: x.meta["val"])
    node.meta["val"] = target(*args, **kwargs)
    if is_conversion(node):
        (source,) = node.all_input_nodes
        if dtype_of(source) == dtype_of(node):
            node.replace_all_uses_with(source)
