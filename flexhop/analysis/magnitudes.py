"""Rewrite absolute values of integers, however they are spelled, as `abs`.

`maximum(x, -x)`, `where(x >= 0, x, -x)`, `maximum(a, b) - minimum(a, b)` and `x * sign(x)` are the
same function: x if x is positive, and -x otherwise. Code that reads graphs by operators, or counts
instructions, then sees one form.
"""

from __future__ import annotations

import torch
from torch import fx

from flexhop.analysis.cases import Case, Cases
from flexhop.analysis.conditions import all_of, at_least
from flexhop.analysis.facts import Analysis
from flexhop.analysis.forms import Form
from flexhop.analysis.graph import dtype_of
from flexhop.analysis.operators import packet_of
from flexhop.analysis.truths import truth_of
from flexhop.analysis.written import Writer, copied

aten = torch.ops.aten
# Operators whose result is one of several forms.
_SEVERAL = {
    aten.maximum, aten.minimum, aten.where, aten.sign, aten.relu,
    aten.clamp, aten.clamp_min, aten.clamp_max,
}  # fmt: skip


def with_magnitudes(module: fx.GraphModule, found: Analysis) -> fx.GraphModule:
    """The same function; the same graph if it contains no absolute value.

    Args:
        module: the graph; not changed.
        found: its analysis.
    """
    signs = _signs(found, module.graph)
    if not signs:
        return module
    result, copies = copied(module)
    writer = Writer(found, copies)
    for node, (form, sign) in signs.items():
        at = copies[node]
        new = writer.call(at, aten.abs.default, writer.write(at, form))
        writer.replace(at, new if sign > 0 else writer.call(at, aten.neg.default, new))
    result.graph.eliminate_dead_code()
    result.recompile()
    return result


def _signs(found: Analysis, graph: fx.Graph) -> dict[fx.Node, tuple[Form, int]]:
    """The nodes that are an absolute value: of which form; and 1, or -1 for its negation."""
    cases = Cases(found.forms, truth_of)
    made = set[fx.Node]()  # by the operators above, not yet from an absolute value
    signs: dict[fx.Node, tuple[Form, int]] = {}
    for node in graph.nodes:
        sources = made.intersection(node.all_input_nodes)
        is_new = node.op == "call_function" and (sources or packet_of(node.target) in _SEVERAL)
        if not is_new or dtype_of(node) in (None, torch.bool):
            continue
        sign = _sign_of(found, cases.of(found.known[node]) or [])
        if sign is None:
            made.add(node)
        else:
            signs[node] = sign
    return signs


def _sign_of(found: Analysis, cases: list[Case]) -> tuple[Form, int] | None:
    """The form whose absolute value a number is, and 1, or -1 for its negation; else None."""
    q_idx = found.mod.inputs["q"]  # of the dtype in which the form is written
    moving = [case.form for case in cases if case.form.terms]
    if len(cases) < 2 or not moving or not found.forms.can_hold(q_idx, moving[0]):
        return None
    # Of q - k, not of k - q.
    form = max(moving[0], moving[0].times(-1), key=lambda form: form.terms.get(q_idx, 0))
    for sign in (1, -1):
        if all(_agrees(case, form, sign) for case in cases):
            return form, sign
    return None


def _agrees(case: Case, form: Form, sign: int) -> bool:
    """Whether a case is sign * |form|, wherever it holds."""
    positive, negative = at_least(form, 1), at_least(form.times(-1), 1)
    if case.form == form.times(sign):
        return all_of(case.condition, negative) is False
    if case.form == form.times(-sign):
        return all_of(case.condition, positive) is False
    if case.form.terms or case.form.offset:
        return False
    return all_of(case.condition, negative) is False is all_of(case.condition, positive)
