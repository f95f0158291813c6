"""Dependence of a mod's nodes: inputs, linear forms, coordinates, growth.

Every integer node is a sum of coefficients times atoms, plus a constant; an atom is an input or a
node that is not such a sum. A *coordinate* is a node's dependence on the positions of query and
key: q alone, k alone, or one integer that adds a part of q and a part of k, such as the distance q
- k, or the row distance q // w - k // w. A node that depends on coordinates other than q and k
alone takes no more values than they do.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import fx

from flexhop.analysis.boxes import evaluate, plain_inputs
from flexhop.analysis.graph import Answers, Mod, constant_of, dtype_of, is_number
from flexhop.analysis.interval import Interval, extent, is_int
from flexhop.analysis.operators import Trait, packet_of, traits_of
from flexhop.analysis.parts import exact_sum_of

aten, prims = torch.ops.aten, torch.ops.prims
POSITIONS = frozenset("qk")
_CONVERSIONS = (aten._to_copy, prims.convert_element_type)
# Up to here, a floating-point dtype represents every integer.
_WHOLE = {torch.float32: 2**24, torch.float64: 2**53}
_LARGEST = 2**31  # most values of a coordinate


class Form(NamedTuple):
    """offset + the sum of coefficient * atom."""

    terms: Mapping[fx.Node, int]
    offset: int

    def plus(self, other: Form, factor: int = 1) -> Form:
        """The form of self + factor * other."""
        terms = dict(self.terms)
        for atom, coefficient in other.terms.items():
            terms[atom] = terms.get(atom, 0) + factor * coefficient
        kept = {atom: coefficient for atom, coefficient in terms.items() if coefficient}
        return Form(kept, self.offset + factor * other.offset)

    def times(self, factor: int) -> Form:
        """The form of factor * self."""
        return Form({}, 0).plus(self, factor)

    def of_product(self, other: Form) -> Form | None:
        """The form of self * other; None if both have terms."""
        if self.terms and other.terms:
            return None
        return other.times(self.offset) if not self.terms else self.times(other.offset)


class Affine(NamedTuple):
    """q * query + k * key + rest; atoms of the rest may depend on positions, too."""

    q: int
    k: int
    rest: Form

    @property
    def distance(self) -> int:
        """1 for the distance of the query from the key, -1 for the key's from the query; apart
        from the rest. 0 for others."""
        return self.q if abs(self.q) == 1 and self.k == -self.q else 0


class Coordinate(NamedTuple):
    """A sum over atoms that each depend on the query or on the key, but not on both.

    The first coefficient is positive, and the coefficients have no common divisor.

    Args:
        terms: atoms with coefficients, the query's first.
        first, last: bounds of the sum.
    """

    terms: tuple[tuple[fx.Node, int], ...]
    first: int
    last: int

    @property
    def form(self) -> Form:
        """The sum."""
        return Form(dict(self.terms), 0)

    @property
    def size(self) -> int:
        """Most values that it takes."""
        return self.last - self.first + 1


class Seen(NamedTuple):
    """Dependence of a node: coordinates, "q", "k" or a Coordinate, and other inputs by name."""

    coordinates: frozenset[Any]
    others: frozenset[str]


class Split(NamedTuple):
    """factor * coordinate + rest, where rest depends on neither position."""

    coordinate: Coordinate
    factor: int
    rest: Form


class Forms:
    """Dependence, forms and coordinates of the nodes of a mod.

    Args:
        mod: the mod; none of its captured tensors is read.
        sizes: bounds on b, h, q and k, by name: one more than the largest.
        held: operators that have the form of their first operand.
    """

    def __init__(self, mod: Mod, sizes: Mapping[str, int], held: Collection[Any] = ()) -> None:
        self.mod, self.sizes, self._held = mod, dict(sizes), frozenset(held)
        self.values = evaluate(mod, plain_inputs(mod, sizes))
        self.depends: dict[fx.Node, frozenset[str]] = {}
        self.depends |= {node: frozenset((name,)) for name, node in mod.inputs.items()}
        self.depends |= {node: frozenset() for node in mod.captures}
        for node in mod.operators:
            self.depends[node] = self.of_all(node.all_input_nodes)
        self.answers = Answers(len(mod.operators))
        self.most_parts = 64 + 4 * len(mod.operators)  # of a condition

    def of_all(self, values: Iterable[Any]) -> frozenset[str]:
        """The inputs that any of some nodes depends on."""
        return frozenset[str]().union(*(self.depends_on(value) for value in values))

    def depends_on(self, value: Any) -> frozenset[str]:
        """The inputs that a node, or a plain number, depends on, by name."""
        return self.depends.get(value, frozenset()) if isinstance(value, fx.Node) else frozenset()

    def range_of(self, value: Any) -> tuple[Any, Any]:
        """Plain bounds of a node, over all scores."""
        if not isinstance(value, fx.Node):
            return value, value
        found = self.values.get(value)
        return found.static if isinstance(found, Interval) else (-math.inf, math.inf)

    def bounds_of(self, value: Any) -> tuple[Any, Any]:
        """The same, tightened by its linear form: 2 * q - q is q."""
        low, high = self.range_of(value)
        form = self.form(value) if self.is_exact(value) else None
        if form is None or value in form.terms:
            return low, high
        found = self._bounds(form.terms.items())
        if found is None:
            return low, high
        return max(low, found[0] + form.offset), min(high, found[1] + form.offset)

    # Linear forms.

    def form(self, value: Any) -> Form | None:
        """The linear form of an integer node, or of a float that holds an integer; None for
        others.

        Sums and products are modulo 2^32 or 2^64, as they wrap around. A form gives a node's value
        modulo that; `is_exact` says whether it is the value itself.
        """
        if isinstance(value, int) and not isinstance(value, bool):
            return Form({}, value)
        if isinstance(value, float) and value.is_integer():
            return Form({}, int(value))
        if not isinstance(value, fx.Node) or not is_number(value):
            return None
        if (number := self.form(constant_of(value))) is not None:
            return number
        return self.answers.of("form", value, self._form)

    def _float_form(self, node: fx.Node) -> Form | None:
        """The linear form of a float, if it and its parts are integers that its dtype
        represents."""
        limit = _WHOLE.get(dtype_of(node), 0)  # type: ignore[arg-type]
        if node.op == "call_function" and packet_of(node.target) in _CONVERSIONS:
            is_whole = self.is_exact(node.args[0]) or not self._is_integer_node(node.args[0])
            found = self.form(node.args[0]) if is_whole else None
        else:
            found = self._sum_form(node)
        reach = found and self._reach(found)
        return found if reach is not None and reach <= limit else None

    def _is_integer_node(self, value: Any) -> bool:
        return isinstance(value, fx.Node) and self.is_integer(value)

    def _form(self, node: fx.Node) -> Form | None:
        if not is_number(node):
            return None
        if not self.is_integer(node):
            return self._float_form(node)
        return self._integer_form(node) or Form({node: 1}, 0)

    def _integer_form(self, node: fx.Node) -> Form | None:
        packet = packet_of(node.target)
        if packet in self._held or node.target in self._held:
            return self.form(node.args[0])
        if packet in _CONVERSIONS and not self._is_integer_node(node.args[0]):
            return self.form(node.args[0])  # a float that is an integer
        if packet in _CONVERSIONS and not self.is_exact(node.args[0]):
            return None  # a change of width
        if packet in _CONVERSIONS:
            return self.form(node.args[0])
        if packet is aten.bitwise_not:  # ~x is -1 - x
            inner = self.form(node.args[0])
            return inner and Form({}, -1).plus(inner, -1)
        return self._sum_form(node)

    def _sum_form(self, node: fx.Node) -> Form | None:
        """The linear form of a sum, or of a product of which one part moves at most."""
        products, total = exact_sum_of(node), Form({}, 0)
        if products is None:
            return None
        for factors in products:
            product: Form | None = Form({}, 1)
            for part in map(self.form, factors):
                product = product and part and product.of_product(part)
            if product is None:
                return None
            total = total.plus(product)
        return total

    def affine(self, value: Any) -> Affine | None:
        """A form, or that of a node, by its multiples of both positions."""
        form = value if isinstance(value, Form) else self.form(value)
        if form is None:
            return None
        terms = dict(form.terms)
        q, k = (terms.pop(self.mod.inputs[name], 0) for name in "qk")
        return Affine(q, k, Form(terms, form.offset))

    def distance(self, value: Any) -> tuple[int, int] | None:
        """The sign and the number of sign * (query - key) + number; None for other forms."""
        place = self.affine(value)
        is_distance = place is not None and place.distance and not place.rest.terms
        return (place.distance, place.rest.offset) if place and is_distance else None

    def is_integer(self, node: fx.Node) -> bool:
        """Whether a node is a 0-d integer."""
        dtype = dtype_of(node)
        return dtype is not None and is_number(node) and is_int(dtype)

    def is_exact(self, value: Any) -> bool:
        """Whether an integer has the exact value of its operators, without ever wrapping
        around."""
        if not isinstance(value, fx.Node):
            return isinstance(value, int)
        dtype = dtype_of(value)
        if dtype is None or not self.is_integer(value):
            return False
        low, high = self.range_of(value)
        first, last = extent(dtype)
        is_given = value.op == "placeholder" or packet_of(value.target) is aten.index
        return is_given or (first < low and high < last)

    def is_whole(self, value: Any) -> bool:
        """Whether a value is the integer that its form says, exactly; perhaps as a float."""
        is_float = isinstance(value, float) or not self._is_integer_node(value)
        return self.is_exact(value) or (is_float and self.form(value) is not None)

    def can_hold(self, node: fx.Node, form: Form) -> bool:
        """Whether the dtype of a node represents all values of a form."""
        dtype, reach = dtype_of(node), self._reach(form)
        if dtype is None or reach is None:
            return False
        return reach <= (extent(dtype)[1] if is_int(dtype) else _WHOLE.get(dtype, 0))

    def _reach(self, form: Form) -> int | None:
        """A bound on the absolute value of a form; None if there is none."""
        bounds = self._bounds(form.terms.items())
        return None if bounds is None else max(map(abs, bounds)) + abs(form.offset)

    # Coordinates.

    def seen(self, node: Any) -> Seen:
        """The coordinates and other inputs that a node depends on."""
        if not isinstance(node, fx.Node):
            return Seen(frozenset(), frozenset())
        return self.answers.of("seen", node, self._find_seen)

    def _find_seen(self, node: fx.Node) -> Seen:
        depends = self.depends_on(node)
        if not depends >= POSITIONS:
            return Seen(depends & POSITIONS, depends - POSITIONS)
        split = self.split(node)
        if split is not None:
            return Seen(frozenset((split.coordinate,)), self.of_all(split.rest.terms))
        found = [self.seen(source) for source in node.all_input_nodes]
        coordinates = frozenset[Any]().union(*(seen.coordinates for seen in found))
        return Seen(coordinates, frozenset[str]().union(*(seen.others for seen in found)))

    def split(self, node: Any) -> Split | None:
        """A node as a multiple of a coordinate of query and key, plus a rest independent of
        both."""
        form = self._compared(node) or self.form(node)
        if form is None:
            return None
        moving = {a: c for a, c in form.terms.items() if self.depends_on(a) & POSITIONS}
        if any(self.depends_on(a) >= POSITIONS for a in moving):
            return None
        if not self.of_all(moving) >= POSITIONS or "score" in self.of_all(moving):
            return None
        order = sorted(moving.items(), key=self._order)
        factor = math.gcd(*moving.values()) * (1 if order[0][1] > 0 else -1)
        terms = tuple((atom, coefficient // factor) for atom, coefficient in order)
        bounds = self._bounds(terms)
        if bounds is None:
            return None
        rest = {a: c for a, c in form.terms.items() if a not in moving}
        return Split(Coordinate(terms, *bounds), factor, Form(rest, form.offset))

    def _compared(self, node: Any) -> Form | None:
        """The difference of the compared values: a comparison depends on no more than that."""
        if not isinstance(node, fx.Node) or Trait.COMPARISON not in traits_of(node.target):
            return None
        forms = [self.form(a) for a in node.args[:2]]
        is_exact = all(self.is_exact(a) or not self._is_integer_node(a) for a in node.args[:2])
        if not is_exact or forms[0] is None or forms[1] is None:
            return None
        return forms[0].plus(forms[1], -1)

    def _order(self, term: tuple[fx.Node, int]) -> tuple[bool, str]:
        return "q" not in self.depends_on(term[0]), term[0].name

    def _bounds(self, terms: Iterable[tuple[fx.Node, int]]) -> tuple[int, int] | None:
        low, high = 0, 0
        for atom, coefficient in terms:
            found = [coefficient * end for end in self.range_of(atom)]
            low, high = low + min(found), high + max(found)
        if not (math.isfinite(low) and math.isfinite(high)) or high - low >= _LARGEST:
            return None
        return int(low), int(high)

    # Growth.

    def grows(self, value: Any, position: str) -> int | None:
        """1 if a value is non-decreasing along a position, -1 if non-increasing, 0 if constant.

        Judged by the operators alone, not by the contents of captured tensors; None if unknown.
        """
        if position not in self.depends_on(value):
            return 0
        if value is self.mod.inputs[position]:
            return 1
        return self.answers.of(
            ("grows", position), value, lambda node: self._grows(node, position)
        )

    def _grows(self, value: fx.Node, position: str) -> int | None:
        if self.is_integer(value) and not self.is_exact(value):
            return None
        form = self.form(value)
        if form is not None and set(form.terms) != {value}:
            signs = [_signed(self.grows(a, position), c) for a, c in form.terms.items()]
            return agreed(signs)
        return self._grows_by_operator(value, position)

    def _grows_by_operator(self, value: fx.Node, position: str) -> int | None:
        packet = packet_of(value.target)
        signs = [
            self.grows(a, position) for a in value.args if isinstance(a, (fx.Node, int, float))
        ]
        if Trait.GROWS in traits_of(packet) and set(value.kwargs) <= {"dtype", "min", "max"}:
            return agreed(signs) if not _has_node(value.kwargs) else None
        if packet in (aten.sub, aten.neg) and not value.kwargs:
            return agreed([*signs[:-1], _signed(signs[-1], -1)])
        if packet in (aten.floor_divide, aten.div, aten.mul) and len(signs) == 2 and signs[1] == 0:
            low, high = self.range_of(value.args[1])
            return signs[0] if low >= 0 else _signed(signs[0], -1) if high <= 0 else None
        return None


def _has_node(values: Mapping[str, Any]) -> bool:
    return any(isinstance(value, fx.Node) for value in values.values())


def _signed(sign: int | None, factor: int) -> int | None:
    """Growth of factor * x, if x grows as `sign` says."""
    return sign and (sign if factor > 0 else -sign)


def agreed(signs: Iterable[int | None]) -> int | None:
    """Growth of a sum whose parts grow as `signs` say."""
    moving = {sign for sign in signs if sign != 0}
    return 0 if not moving else moving.pop() if len(moving) == 1 else None
