"""Masks whose queries see one contiguous range of keys each: where the range begins and ends.

An integer comparison has the form F(b, h, q) - G(b, h, k) >= 0. If G is monotone along the keys,
the keys that satisfy it are a range up to one end. The intersection of ranges is a range. So is
the union of two that start at the first key, or end at the last one. This follows from a mask's
operators alone, whatever captured tensors contain, so kernels and block lists may be chosen by it.

Cost: vectors of M and of N numbers, and binary searches. Nothing has M * N numbers, and nothing
synchronises.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from flexhop.analysis.conditions import All, AtLeast, Choice, Equals, Leaf, Some, Truth
from flexhop.analysis.forms import Form, Forms, agreed
from flexhop.analysis.interval import HUGE
from flexhop.analysis.operators import Trait, packet_of, traits_of
from flexhop.analysis.truths import are_integers, truth_of
from flexhop.analysis.values import NotReproducible, Values
from flexhop.compat.sizes import broadcast

aten = torch.ops.aten
_FAR = 2**50  # as large as needed next to sums of positions
_MODERATE = 2**48  # sums of positions; a larger one may not be beside a number that is unbounded


class Span(NamedTuple):
    """Query q sees keys first <= k < end: [B or 1, H or 1, M] int64 each.

    starts, stops: whether all ranges begin at the first key, and end after the last one.
    """

    first: Tensor
    end: Tensor
    starts: bool = False
    stops: bool = False


class _NoSpan(Exception):
    """These rules do not prove that the mask is a range."""


def find_span(
    forms: Forms,
    device: torch.device,
    places: Mapping[str, Tensor] | None = None,
) -> Span | None:
    """The range of each query; None if the mask's operators do not prove one.

    Args:
        forms: the forms of a mask with captured tensors, and bounds on its sizes of b, h, q and k.
        device: device of the results.
        places: int32 vectors of the requested b, h, q and k; k must be all of them in order. By
            default everything within the bounds.
    """
    try:
        finder = _Finder(forms, device, places)
        return finder.of(truth_of(forms, forms.mod.result))
    except (_NoSpan, NotReproducible):
        return None


class _Finder:
    def __init__(
        self, forms: Forms, device: torch.device, places: Mapping[str, Tensor] | None
    ) -> None:
        self.forms, self.device, self.places = forms, device, places
        sizes = forms.sizes if places is None else {n: places[n].shape[0] for n in "qk"}
        self.queries, self.keys = sizes["q"], sizes["k"]

    @functools.cached_property
    def values(self) -> Values:
        """Of what depends on at most one position: [B or 1, H or 1, M or N]."""
        counts = dict(self.places or _all_places(self.forms.sizes, self.device))
        for axis, name in enumerate("bhqk"):
            counts[name] = counts[name].view([-1 if n == min(axis, 2) else 1 for n in range(3)])
        return Values(self.forms.mod, counts, self.device)

    def of(self, truth: Truth) -> Span:
        """The range of keys for which a condition holds."""
        if isinstance(truth, bool):
            return self._constant(torch.full((1, 1, 1), truth, device=self.device))
        if isinstance(truth, (All, Some)):
            # Those that may fail first: nothing is computed in vain.
            parts = sorted(truth.parts, key=lambda part: isinstance(part, AtLeast))
            spans = [self.of(part) for part in parts]
            found = spans[0]
            for span in spans[1:]:
                found = _meet(found, span) if isinstance(truth, All) else _join(found, span)
            return found
        if isinstance(truth, AtLeast):
            return self._compared(aten.ge, truth.form)
        if isinstance(truth, Equals):
            return self._compared(aten.eq if truth.is_equal else aten.ne, truth.form)
        if isinstance(truth, Choice):
            return self._choice(truth)
        return self._leaf(truth)

    def _choice(self, truth: Choice) -> Span:
        a, b = self.of(truth.chosen), self.of(truth.other)
        condition = self.values.of(truth.condition)
        first = torch.where(condition, a.first, b.first)
        end = torch.where(condition, a.end, b.end)
        return Span(first, end, a.starts and b.starts, a.stops and b.stops)

    def _leaf(self, leaf: Leaf) -> Span:
        node, depends = leaf.node, self.forms.depends_on(leaf.node)
        if "k" not in depends:
            return self._constant(self.values.of(node).bool() == leaf.is_true)
        packet = packet_of(node.target)
        if Trait.COMPARISON not in traits_of(packet):
            raise _NoSpan
        if not leaf.is_true:
            packet = _NEGATED[packet]
        a, b = node.args[:2]
        if "k" in self.forms.depends_on(a):
            a, b, packet = b, a, _FLIPPED[packet]
        if "k" in self.forms.depends_on(a) or "q" in self.forms.depends_on(b):
            raise _NoSpan
        if not are_integers(self.forms, a, b):
            raise _NoSpan  # NaN has no order
        of_query, of_key = (self._number(x) for x in (a, b))
        return self._search(packet, of_query, of_key, self.forms.grows(b, "k"))

    def _number(self, value: Any) -> Tensor:
        if isinstance(value, fx.Node):
            return self.values.of(value).long()
        return torch.full((1, 1, 1), value, dtype=torch.int64, device=self.device)

    # Comparisons.

    def _sides(self, form: Form) -> tuple[Tensor, Tensor]:
        """form as of_query - of_key."""
        of_query = torch.full((1, 1, 1), form.offset, device=self.device)
        of_key: Tensor | None = None
        room, is_far = abs(form.offset), 0
        # Positions first: their sum is the same for all contents of captured tensors.
        given = set(self.forms.mod.inputs.values())
        for atom, coefficient in sorted(form.terms.items(), key=lambda t: t[0] not in given):
            depends = self.forms.depends_on(atom)
            if depends >= {"q", "k"}:
                raise _NoSpan
            low, high = self.forms.range_of(atom)
            value = self._number(atom).to(self.device)  # a captured scalar may be on the CPU
            reach = max(abs(low), abs(high)) * abs(coefficient)
            if reach > _MODERATE:  # of two numbers, a larger one decides
                value, is_far = value.clamp(-_FAR, _FAR), is_far + 1
                reach = 0 if abs(coefficient) < HUGE // _FAR // 4 else _FAR
            room += reach
            if "k" not in depends:
                of_query = of_query + (value if coefficient == 1 else coefficient * value)
                continue
            part = -coefficient * value
            of_key = part if of_key is None else of_key + part
        if room > _MODERATE or is_far > 1:
            raise _NoSpan
        if of_key is None:
            of_key = torch.zeros_like(of_query[..., :1])
        return of_query, of_key

    def _compared(self, packet: Any, form: Form) -> Span:
        """Keys for which form >= 0, or form == 0."""
        key = self.forms.mod.inputs["k"]
        slope = form.terms.get(key, 0)
        rest = form.plus(Form({key: 1}, 0), -slope)
        if packet is aten.ge and slope and "k" not in self.forms.of_all(rest.terms):
            return self._divided(self._sides(rest)[0], slope)
        sign = self._growth(form)
        return self._search(packet, *self._sides(form), sign)

    def _growth(self, form: Form) -> int:
        """How the key's side of a form grows."""
        signs = (self.forms.grows(atom, "k") for atom in form.terms)
        grows = [
            s and (-s if c > 0 else s) for s, c in zip(signs, form.terms.values(), strict=True)
        ]
        sign = agreed(grows)
        if sign is None:
            raise _NoSpan
        return sign

    def _divided(self, of_query: Tensor, slope: int) -> Span:
        """Keys for which of_query + slope * key >= 0: from a quotient on, or up to one."""
        lead = broadcast(of_query.shape, (1, 1, self.queries))
        quotient = of_query.expand(lead)
        if abs(slope) > 1:
            quotient = torch.div(quotient, abs(slope), rounding_mode="floor")
        if slope < 0:
            found = (quotient + 1).clamp(0, self.keys)
            return Span(torch.zeros_like(found), found, starts=True)
        found = (-quotient).clamp(0, self.keys)
        return Span(found, torch.full_like(found, self.keys), stops=True)

    def _search(self, packet: Any, of_query: Tensor, of_key: Tensor, sign: int | None) -> Span:
        """Keys for which of_query <packet> of_key. sign: how of_key grows."""
        if sign is None or packet is aten.ne:
            raise _NoSpan
        lead = broadcast(of_query.shape[:-1], of_key.shape[:-1])
        of_query = of_query.expand(*lead, self.queries).contiguous()
        of_key = of_key.expand(*lead, self.keys)
        ordered = (of_key.flip(-1) if sign < 0 else of_key).contiguous()

        def place(right: bool) -> Tensor:
            """Number of keys below a query's number; right: or equal to it."""
            found = torch.searchsorted(ordered, of_query, right=right)
            return self.keys - found if sign < 0 else found

        below = (packet in (aten.gt, aten.ge)) == (sign >= 0)  # the lower keys are seen
        if packet is aten.eq:
            low, high = place(False), place(True)
            return Span(high, low) if sign < 0 else Span(low, high)
        found = place(packet in (aten.ge, aten.lt))
        if below:
            return Span(torch.zeros_like(found), found, starts=True)
        return Span(found, torch.full_like(found, self.keys), stops=True)

    def _constant(self, truth: Tensor) -> Span:
        """All keys or none, per query."""
        end = truth.long() * self.keys
        end = end.expand(broadcast(end.shape, (1, 1, self.queries)))
        return Span(torch.zeros_like(end), end, starts=True)


def _all_places(sizes: Mapping[str, int], device: torch.device) -> dict[str, Tensor]:
    return {n: torch.arange(sizes[n], device=device, dtype=torch.int32) for n in "bhqk"}


def _meet(a: Span, b: Span) -> Span:
    first, end = torch.maximum(a.first, b.first), torch.minimum(a.end, b.end)
    starts, stops = a.starts and b.starts, a.stops and b.stops
    return Span(first, end if starts or stops else torch.maximum(first, end), starts, stops)


def _join(a: Span, b: Span) -> Span:
    if not (a.starts and b.starts) and not (a.stops and b.stops):
        raise _NoSpan
    first, end = torch.minimum(a.first, b.first), torch.maximum(a.end, b.end)
    return Span(first, end, a.starts and b.starts, a.stops and b.stops)


_FLIPPED = {
    aten.lt: aten.gt,
    aten.gt: aten.lt,
    aten.le: aten.ge,
    aten.ge: aten.le,
    aten.eq: aten.eq,
    aten.ne: aten.ne,
}
_NEGATED = {
    aten.lt: aten.ge,
    aten.ge: aten.lt,
    aten.le: aten.gt,
    aten.gt: aten.le,
    aten.eq: aten.ne,
    aten.ne: aten.eq,
}
