"""score_mods that add a line over keys, such as ALiBi: recognise them, and find the slopes.

A mod returns score + f * kv_idx + g, where f and g depend on neither the score nor kv_idx: it adds
f more from one key to the next. A kernel then evaluates the mod once per query and tile of keys,
and follows the line from there (the templates named line). f is the derivative of the mod, by the
rules for sums and products. Any other dependence on kv_idx is not a line.

A line may have one bend: an absolute value abs(e), where e itself is a line over keys and over
queries, such as q_idx - kv_idx. The slope then depends on the sign of e, which is constant in most
tiles.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from flexhop.lowering.mods.graphs import reaches, returning
from flexhop.ops.reads import NUM_SCORE_INPUTS

aten = torch.ops.aten
convert = torch.ops.prims.convert_element_type
# Dtypes in which kernels compute as written. Eager mode would round 16-bit ones.
_EXACT = (torch.float32, torch.int32, torch.int64)
Slope = Any  # a number, or a node; None: not a line


class Line(NamedTuple):
    """Functions of the inputs of a score_mod, fp32.

    slope: the slope on kv_idx's side of the bend. bend: its sign is the side; None if the line has
    no bend.
    """

    slope: fx.GraphModule
    bend: fx.GraphModule | None


def key_line(score: fx.GraphModule) -> Line | None:
    """The line over keys that a score_mod adds; None if it adds anything else.

    Args:
        score: (score, b, h, q_idx, kv_idx, *captures) -> fp32 score.
    """
    graph = fx.Graph()
    result = graph.graph_copy(score.graph, {})
    result = result[0] if isinstance(result, (tuple, list)) else result
    inputs = graph.find_nodes(op="placeholder")[:NUM_SCORE_INPUTS]
    first, _, _, q_idx, kv_idx = inputs
    if not isinstance(result, fx.Node) or _Derivative(graph, first).of(result) != 1:
        return None
    rules = _Derivative(graph, kv_idx)
    slope = rules.of(result)
    if slope is None or reaches(slope, (first, kv_idx), rules.sides):
        return None
    bends = [side.args[0] for side in rules.sides]
    if len(bends) > 1 or not all(_is_plane(graph, bend, (first, q_idx, kv_idx)) for bend in bends):
        return None
    return Line(
        returning(score, graph, slope), returning(score, graph, bends[0]) if bends else None
    )


def zero(score: fx.GraphModule) -> fx.GraphModule:
    """The number 0, as a function of the inputs of a score_mod."""
    graph = fx.Graph()
    graph.graph_copy(score.graph, {})
    return returning(score, graph, 0.0)


def _is_plane(graph: fx.Graph, value: Any, inputs: Sequence[fx.Node]) -> bool:
    """Whether a node is linear in q_idx and kv_idx, and independent of the score."""
    slopes = [_Derivative(graph, root).of(value) for root in inputs[1:]]
    known = all(s is not None and not reaches(s, inputs) for s in slopes)
    return known and not reaches(value, inputs[:1])


class _Derivative:
    """The derivative of nodes by one input, in which they must be linear.

    Adds the nodes that it needs to the graph. If a derivative depends on the input itself, the
    function was not linear; the caller checks that. sides: nodes that are the sign of an
    expression whose absolute value was taken.
    """

    def __init__(self, graph: fx.Graph, root: fx.Node) -> None:
        self.graph = graph
        self.root = root
        self.found: dict[fx.Node, Slope] = {root: 1}
        self.sides: list[fx.Node] = []

    def of(self, value: Any) -> Slope:
        """A number or a node; None if no rule applies."""
        if not isinstance(value, fx.Node):
            return 0
        if value not in self.found:
            self.found[value] = self._of_node(value)
        return self.found[value]

    def _of_node(self, node: fx.Node) -> Slope:
        if not reaches(node, (self.root,)):
            return 0
        rule = _RULES.get(getattr(node.target, "overloadpacket", None))
        example = node.meta.get("val")
        if rule is None or not isinstance(example, torch.Tensor) or example.dtype not in _EXACT:
            return None
        return rule(self, node)

    def sum(self, a: Slope, b: Slope) -> Slope:
        """a + b."""
        if a is None or b is None:
            return None
        if not isinstance(a, fx.Node) and not isinstance(b, fx.Node):
            return a + b
        if a == 0 or b == 0:
            return b if a == 0 else a
        return self.call(aten.add.Tensor, *((a, b) if isinstance(a, fx.Node) else (b, a)))

    def product(self, a: Slope, b: Slope) -> Slope:
        """a * b."""
        if a is None or b is None:
            return None
        if not isinstance(a, fx.Node) and not isinstance(b, fx.Node):
            return a * b
        if a == 0 or b == 0:
            return 0
        if a == 1 or b == 1:
            return b if a == 1 else a
        return self.call(aten.mul.Tensor, *((a, b) if isinstance(a, fx.Node) else (b, a)))

    def quotient(self, a: Slope, b: Slope) -> Slope:
        """a / b."""
        if a is None or not isinstance(b, fx.Node):
            return None if a is None else self.product(a, 1.0 / b)
        return self.product(a, self.call(aten.reciprocal.default, b))

    def call(self, target: Any, *args: Any) -> fx.Node:
        """A new node."""
        node = self.graph.call_function(target, args)
        node.meta["val"] = self.graph.find_nodes(op="placeholder")[0].meta["val"]
        return node


def _add(rules: _Derivative, node: fx.Node, sign: int = 1) -> Slope:
    if not set(node.kwargs) <= {"alpha"} or _is_size(node.kwargs.get("alpha")):
        return None
    left, right = node.args[:2]
    factor = rules.product(sign, node.kwargs.get("alpha", 1))
    return rules.sum(rules.of(left), rules.product(factor, rules.of(right)))


def _subtract(rules: _Derivative, node: fx.Node) -> Slope:
    return _add(rules, node, -1)


def _subtract_from(rules: _Derivative, node: fx.Node) -> Slope:
    """aten.rsub(a, b) = b - alpha * a."""
    left, right = node.args[:2]
    factor = rules.product(-1, node.kwargs.get("alpha", 1 if len(node.args) < 3 else node.args[2]))
    return rules.sum(rules.of(right), rules.product(factor, rules.of(left)))


def _negate(rules: _Derivative, node: fx.Node) -> Slope:
    return rules.product(-1, rules.of(node.args[0]))


def _multiply(rules: _Derivative, node: fx.Node) -> Slope:
    left, right = node.args[:2]
    if _is_size(left) or _is_size(right):
        return None
    return rules.sum(rules.product(rules.of(left), right), rules.product(rules.of(right), left))


def _add_product(rules: _Derivative, node: fx.Node) -> Slope:
    """aten.addcmul(a, b, c) = a + value * b * c."""
    addend, left, right = node.args[:3]
    if not set(node.kwargs) <= {"value"} or _is_size(node.kwargs.get("value")):
        return None
    slope = rules.sum(rules.product(rules.of(left), right), rules.product(rules.of(right), left))
    return rules.sum(rules.of(addend), rules.product(node.kwargs.get("value", 1), slope))


def _divide(rules: _Derivative, node: fx.Node) -> Slope:
    left, right = node.args[:2]
    has_rounding = bool(node.kwargs)
    if has_rounding or rules.of(right) != 0 or _is_size(right):
        return None
    return rules.quotient(rules.of(left), right)


def _is_size(value: Any) -> bool:
    """Whether a node is a symbolic number; operators take one only together with a tensor."""
    return isinstance(value, fx.Node) and not isinstance(value.meta.get("val"), torch.Tensor)


def _convert(rules: _Derivative, node: fx.Node) -> Slope:
    """Conversions that keep the value: integers, and integers as fp32."""
    source = node.args[0]
    was_float = isinstance(source, fx.Node) and source.meta["val"].dtype.is_floating_point
    if was_float and not node.meta["val"].dtype.is_floating_point:
        return None
    return rules.of(source)


def _bend(rules: _Derivative, node: fx.Node) -> Slope:
    inner = node.args[0]
    rules.sides.append(rules.call(aten.sign.default, inner))
    return rules.product(rules.sides[-1], rules.of(inner))


def _same(rules: _Derivative, node: fx.Node) -> Slope:
    return rules.of(node.args[0])


_RULES: dict[Any, Callable[[_Derivative, fx.Node], Slope]] = {
    aten.add: _add,
    aten.sub: _subtract,
    aten.rsub: _subtract_from,
    aten.neg: _negate,
    aten.mul: _multiply,
    aten.addcmul: _add_product,
    aten.abs: _bend,
    aten.div: _divide,
    aten._to_copy: _convert,
    convert: _convert,
    aten.clone: _same,
    aten.alias: _same,
    aten.detach: _same,
}
