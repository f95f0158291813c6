"""Quotients of integers, and the bounds of integers in calls of other sizes."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import fx

from flexhop.analysis.forms import Form, Forms
from flexhop.analysis.operators import packet_of

aten = torch.ops.aten
_SHIFTS = (aten.bitwise_right_shift, aten.__rshift__)
_ROUNDED_DOWN = (aten.floor_divide, aten.remainder, *_SHIFTS)
Bounds = tuple[Any, Any]


class Quotient(NamedTuple):
    """An integer that is divided by a positive number of the program.

    rounds_down: or towards 0. is_remainder: whether it is what the division leaves.
    """

    value: Any
    divisor: int
    rounds_down: bool
    is_remainder: bool


def quotient_of(forms: Forms, node: Any) -> Quotient | None:
    """A node as a quotient or a remainder, also one that is spelled as a shift; else None."""
    if not isinstance(node, fx.Node) or node.op != "call_function" or not forms.is_integer(node):
        return None
    packet = packet_of(node.target)
    rounding = "floor" if packet in _ROUNDED_DOWN else None
    if packet is aten.div:
        rounding = node.kwargs.get("rounding_mode")
    number = forms.form(node.args[1]) if rounding and len(node.args) == 2 else None
    if number is None or number.terms or number.offset < 0:
        return None
    divisor = number.offset
    if packet in _SHIFTS:  # by all bits but the sign, nothing else is left
        divisor = 1 << min(divisor, 8 * node.meta["val"].dtype.itemsize - 1)
    if not divisor:
        return None
    return Quotient(node.args[0], divisor, rounding == "floor", packet is aten.remainder)


class Ends:
    """Bounds of a mod's integers in calls whose sizes the analysis bounds, but does not know.

    Args:
        forms: of the mod; its bounds on indices hold in all these calls.
        last: the largest value of each index, by name; it may be a symbol.
        divide: (bound, divisor) -> quotient that rounds down.
        widest: most values of a number that does not follow from the indices.
    """

    def __init__(
        self,
        forms: Forms,
        last: Mapping[str, Any],
        divide: Callable[[Any, int], Any] = operator.floordiv,
        widest: float = math.inf,
    ) -> None:
        self._forms, self._divide, self._widest = forms, divide, widest
        self._last = {forms.mod.inputs[name]: end for name, end in last.items()}

    def of_form(self, form: Form) -> Bounds | None:
        """Bounds of a linear form; None if they are not known."""
        low: Any = form.offset
        high: Any = form.offset
        for atom, factor in form.terms.items():
            ends = self.of(atom)
            if ends is None:
                return None
            near, far = ends if factor > 0 else ends[::-1]
            low, high = low + factor * near, high + factor * far
        return low, high

    def of(self, node: Any) -> Bounds | None:
        """Bounds of an integer; None if they are not known."""
        if node in self._last:
            return 0, self._last[node]
        form = self._forms.form(node)
        if form is not None and node not in form.terms:
            return self.of_form(form)
        low, high = self._forms.range_of(node)
        return self._of_quotient(node) or ((low, high) if high - low + 1 <= self._widest else None)

    def _of_quotient(self, node: fx.Node) -> Bounds | None:
        """Bounds of a quotient of a bounded number that is not negative."""
        found = quotient_of(self._forms, node)
        if found is None or found.is_remainder or self._forms.range_of(found.value)[0] < 0:
            return None
        low, high = self.of(found.value) or (None, None)
        if low is None:
            return None
        return self._divide(low, found.divisor), self._divide(high, found.divisor)
