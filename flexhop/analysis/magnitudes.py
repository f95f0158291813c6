"""Rewrite absolute values of integers, however they are spelled, as `abs`.

`maximum(x, -x)`, `where(x >= 0, x, -x)`, `maximum(a, b) - minimum(a, b)` and `x * sign(x)` are the
same function. Code that reads graphs by operators, or counts instructions, then sees one form.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from flexhop.analysis.facts import Analysis, analyse
from flexhop.analysis.forms import Form
from flexhop.analysis.operators import packet_of
from flexhop.analysis.truths import AtLeast, truth_of

aten = torch.ops.aten


def with_magnitudes(
    module: fx.GraphModule, inputs: tuple[str, ...], sizes: dict[str, int]
) -> fx.GraphModule:
    """The same function; unchanged if it contains no absolute value. Arguments of `analyse`.

    Args:
        module: the graph; not changed.
        inputs: names of its first inputs.
        sizes: bounds on b, h, q and k.
    """
    found = analyse(module, inputs, sizes)
    signs = {node: sign for node in module.graph.nodes if (sign := _sign_of(found, node))}
    if not signs:
        return module
    graph, known = fx.Graph(), dict[fx.Node, fx.Node]()
    result = graph.graph_copy(module.graph, known)
    graph.output(result)
    for node, (inner, sign) in signs.items():
        _write(graph, known[node], fx.map_arg(inner, lambda n: known[n]), sign)
    graph.eliminate_dead_code()
    return fx.GraphModule(module, graph)


def _write(graph: fx.Graph, node: fx.Node, inner: Any, sign: int) -> None:
    """Replace a node by sign * |inner|; inner: a node, or two that are subtracted."""
    with graph.inserting_before(node):
        if isinstance(inner, (tuple, list)):
            inner = graph.call_function(aten.sub.Tensor, tuple(inner))
            inner.meta = dict(node.meta)
        new = graph.call_function(aten.abs.default, (inner,))
        new.meta = dict(node.meta)
        if sign < 0:
            new = graph.call_function(aten.neg.default, (new,))
            new.meta = dict(node.meta)
    node.replace_all_uses_with(new)


def _sign_of(found: Analysis, node: fx.Node) -> tuple[Any, int] | None:
    """The expression whose absolute value a node is, and 1, or -1 for its negation; else None."""
    packet = packet_of(node.target) if node.op == "call_function" else None
    rule = _RULES.get(packet)
    is_known = rule is not None and not node.kwargs and found[node].form is not None
    return rule(found, node) if is_known else None  # type: ignore[misc]


def _form(found: Analysis, value: Any) -> Form | None:
    """The form of an operand, if it is exact."""
    node = found.known.get(value, value) if isinstance(value, fx.Node) else value
    return found.forms.form(node) if found.forms.is_exact(node) else None


def _are_opposite(found: Analysis, a: Any, b: Any) -> bool:
    first, second = _form(found, a), _form(found, b)
    if first is None or second is None or not isinstance(a, fx.Node):
        return False
    return bool(first.terms) and first.plus(second) == Form({}, 0)


def _extreme(found: Analysis, node: fx.Node) -> tuple[Any, int] | None:
    """maximum(x, -x) and minimum(x, -x)."""
    a, b = node.args
    if not _are_opposite(found, a, b):
        return None
    return a, (1 if packet_of(node.target) is aten.maximum else -1)


def _choice(found: Analysis, node: fx.Node) -> tuple[Any, int] | None:
    """where(x >= 0, x, -x), with any sign and any comparison."""
    condition, a, b = node.args
    if not _are_opposite(found, a, b):
        return None
    truth = truth_of(found.forms, found.known.get(condition, condition))  # type: ignore[arg-type]
    form = _form(found, a)
    if not isinstance(truth, AtLeast) or form is None:
        return None
    for sign in (1, -1):
        for least in (0, 1):  # at 0 both choices are the same
            if truth.form == form.times(sign).plus(Form({}, least), -1):
                return a, sign
    return None


def _difference(found: Analysis, node: fx.Node) -> tuple[Any, int] | None:
    """maximum(a, b) - minimum(a, b)."""
    first, second = node.args[:2]
    packets = [packet_of(x.target) if isinstance(x, fx.Node) else None for x in (first, second)]
    if sorted(map(str, packets)) != ["aten.maximum", "aten.minimum"] or len(node.args) > 2:
        return None
    (a, b), others = first.args, second.args  # type: ignore[union-attr]
    forms, other_forms = ([_form(found, x) for x in pair] for pair in ((a, b), others))
    if None in forms or other_forms not in (forms, forms[::-1]):
        return None
    return (a, b), 1 if packets[0] is aten.maximum else -1


def _product(found: Analysis, node: fx.Node) -> tuple[Any, int] | None:
    """x * sign(x)."""
    for a, b in (node.args[:2], node.args[1::-1]):
        if not isinstance(b, fx.Node) or packet_of(b.target) is not aten.sign:
            continue
        if isinstance(a, fx.Node) and found.known.get(b.args[0]) is found.known[a]:  # type: ignore[arg-type]
            return (a, 1) if _form(found, a) is not None else None
    return None


_RULES: dict[Any, Any] = {
    aten.maximum: _extreme,
    aten.minimum: _extreme,
    aten.where: _choice,
    aten.sub: _difference,
    aten.mul: _product,
}
