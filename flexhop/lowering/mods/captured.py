"""Gradients of captured tensors: which scores read the same entry, from the joint graph's
indices."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import sympy
import torch
from torch import fx

from flexhop.analysis import INDICES, Analysis, Coordinate, Form, quotient_of
from flexhop.compat.kernels import inductor
from flexhop.lowering.mods.analysed import JOINT, analysed, positions_of
from flexhop.lowering.problem import Axis, ReadBy
from flexhop.ops.args import Site

# By whether indices depend on the query, and on the key. From the most to the least that can be
# summed before it is added.
_BY: dict[tuple[bool, bool], ReadBy] = {
    (False, False): "head",
    (False, True): "key",
    (True, False): "query",
}


_TILE = 128  # most queries or keys of a tile

aten = torch.ops.aten
_QUOTIENTS = {aten.div.Tensor, aten.div.Scalar}
# What changes the sign of a number, or its dtype.
_SIGNS = {
    aten.neg.default, aten._to_copy.default, torch.ops.prims.convert_element_type.default,
}  # fmt: skip
# What multiplies one operand by a number: f(a x) = a f(x).
_SCALES = {*_QUOTIENTS, *_SIGNS, aten.mul.Tensor, aten.mul.Scalar}


class SiteFacts(NamedTuple):
    """What the indices of a site say about the entries that scores read there.

    by: which scores read the same entry. depends: the indices of a score that say which, by name.
    repeats: whether pairs at different distances may read the same entry: no index is a distance
    itself. Likewise for different queries, if reads depend only on the query. is_row: whether
    pairs have entries, those of neighbouring keys side by side. named: the indices of a score
    among those of the site, if all others are constants; else none.
    shared_axis: over which gradients may be summed before they are added, of tiles [queries,
    keys]; None: never. Then `shared_indices` of the site have to be the same throughout a tile.
    groups: how many neighbouring queries, and keys, probably have one index, at most a tile's;
    None: no more than one of either. sides: the axis along which each index of the site moves.
    """

    by: ReadBy
    depends: frozenset[str]
    repeats: bool
    is_row: bool
    named: frozenset[str]
    shared_axis: int | None
    shared_indices: tuple[int, ...]
    groups: tuple[int, int] | None
    sides: tuple[int | None, ...]


def site_facts(joint: Any, site: Site) -> SiteFacts:
    """The facts about a site of a joint graph."""
    found = analysed(joint, JOINT)
    indices = [found.mod.results[i] for i in site.indices]
    places = [positions_of(found, [index]) for index in indices]
    by = _BY.get(positions_of(found, indices))
    if by is None:
        is_distance = all(is_by_distance(found, index) for index in indices)
        by = "distance" if is_distance else "score"
    shared_axis, shared_indices = _shared(found, indices, places)
    return SiteFacts(
        by=by,
        depends=found.forms.of_all(indices) & frozenset(INDICES),
        repeats=not any(is_one_to_one(found, index) for index in indices),
        is_row=by in ("distance", "score") and ends_in(found, indices, "key"),
        named=_named(found, indices),
        shared_axis=shared_axis,
        shared_indices=shared_indices,
        groups=_groups(found, indices, places) if by == "score" else None,
        sides=tuple(None if uses == (False, False) else int(uses[1]) for uses in places),
    )


def read_sites(joint: Any, sites: Sequence[Site]) -> tuple[ReadBy, ...]:
    """For every site of a joint graph, which scores read the same entry."""
    return tuple(site_facts(joint, site).by for site in sites)


def queries_meet(joint: Any, sites: Sequence[Site]) -> bool:
    """Whether different queries of a head may read one entry that all keys of a query read."""
    facts = (site_facts(joint, site) for site in sites)
    return any(found.by == "query" and found.repeats for found in facts)


def follow_score(joint: Any, sites: Sequence[Site]) -> bool:
    """Whether sites take the gradient of the score or of the modified score, up to its sign."""
    found = analysed(joint, JOINT)
    known = (found.mod.result, found.mod.inputs["grad"])
    return all(_without_sign(found.mod.results[site.value]) in known for site in sites)


def _without_sign(value: Any) -> Any:
    """What a number is the negative of, in whatever dtype."""
    while isinstance(value, fx.Node) and value.target in _SIGNS:
        value = value.args[0]
    return value


def felt_sites(joint: Any, sites: Sequence[Site], *, moves_lse: bool) -> tuple[Site, ...]:
    """The sites whose gradients are not 0 whatever the operands are.

    A number that is added to all scores of a query cancels in the softmax. It moves lse alone.

    Args:
        joint, sites: of the gradient.
        moves_lse: whether anything depends on lse.
    """
    return tuple(s for s in sites if moves_lse or not _shifts_rows(joint, s))


def _shifts_rows(joint: Any, site: Site) -> bool:
    """Whether an entry is added to all scores of a query, times a number of the query's own."""
    found = analysed(joint, JOINT)
    reads_key = positions_of(found, [found.mod.results[i] for i in site.indices])[1]
    value, grad = found.mod.results[site.value], found.mod.inputs["grad"]
    while not reads_key and value is not grad:
        if not isinstance(value, fx.Node) or value.target not in _SCALES:
            return False
        moving = [x for x in value.all_input_nodes if "grad" in found.forms.of_all([x])]
        rest = [x for x in value.all_input_nodes if x not in moving]
        is_scaled = len(moving) == 1 and not positions_of(found, rest)[1]
        if not is_scaled or (value.args[0] is not moving[0] and value.target in _QUOTIENTS):
            return False
        value = moving[0]
    return not reads_key


def own_entries(joint: Any, sites: Sequence[Site], sizes: Sequence[Any]) -> frozenset[int]:
    """Captured tensors in which each score has an entry of its own, and pairs have entries.

    Args:
        joint, sites: of the gradient.
        sizes: [B, Hq, M, N].
    """
    named = zip(INDICES, sizes, strict=True)
    needed = {name for name, size in named if not inductor.is_known(sympy.Eq(size, 1))}
    needed |= {"q", "k"}
    counts = Counter(site.capture for site in sites)
    return frozenset(
        site.capture
        for site in sites
        if counts[site.capture] == 1 and needed <= site_facts(joint, site).named
    )


def ends_in(found: Analysis, indices: Sequence[Any], axis: Axis) -> bool:
    """Whether the last index is the key (or query), and no other depends on it."""
    *others, last = indices
    at = ("query", "key").index(axis)
    is_own = found.forms.affine(last) == (1 - at, at, Form({}, 0))
    return is_own and not positions_of(found, others)[at]


def is_by_distance(found: Analysis, index: Any) -> bool:
    """Whether an index stays the same if query and key both advance by one."""
    seen = found.forms.seen(index)
    forms = (isinstance(c, Coordinate) and c.form for c in seen.coordinates)
    return "score" not in seen.others and all(
        form and found.forms.distance(form) for form in forms
    )


def is_one_to_one(found: Analysis, index: Any) -> bool:
    """Whether an index grows or falls by exactly one from one query to the next."""
    place = found.forms.affine(index)
    if place is None or abs(place.q) != 1:
        return False
    return "q" not in found.forms.of_all(place.rest.terms)


def _named(found: Analysis, indices: Sequence[Any]) -> frozenset[str]:
    """The inputs among some indices, by name, if all others are constants; else none."""
    forms = [found.forms.form(index) for index in indices]
    moving = [form for form in forms if form is None or form.terms]
    given = {name: Form({node: 1}, 0) for name, node in found.mod.inputs.items()}
    are_given = all(form in given.values() for form in moving)
    return frozenset(name for name in given if are_given and given[name] in moving)


def _shared(
    found: Analysis, indices: Sequence[Any], places: Sequence[tuple[bool, bool]]
) -> tuple[int | None, tuple[int, ...]]:
    """Whether scores of a query read one entry if some function of their distance is the same.

    Most tiles are so far from the diagonal that a clamped distance, or a bucket, is.
    """
    pairs = [place for place, uses in enumerate(places) if all(uses)]
    sides = {uses_q_idx for uses_q_idx, uses_kv_idx in places if uses_q_idx != uses_kv_idx}
    repeats = (
        is_by_distance(found, indices[p]) and not is_one_to_one(found, indices[p]) for p in pairs
    )
    if not pairs or len(sides) != 1 or not all(repeats):
        return None, ()
    return int(sides.pop()), tuple(pairs)


def _groups(
    found: Analysis, indices: Sequence[Any], places: Sequence[tuple[bool, bool]]
) -> tuple[int, int] | None:
    """How many neighbouring queries, and keys, read the same entries; None if each reads its own.

    Such are tables by pairs of blocks, frames, or segments. Kernels check it for each tile.
    """
    if any(map(all, places)):
        return None
    sizes = [_TILE, _TILE]
    for index, (uses_q_idx, uses_kv_idx) in zip(indices, places, strict=True):
        if uses_q_idx or uses_kv_idx:
            axis = int(uses_kv_idx)
            sizes[axis] = min(sizes[axis], _repeats(found, index))
    return None if sizes == [1, 1] else (sizes[0], sizes[1])


def _repeats(found: Analysis, node: Any) -> int:
    """How many neighbouring positions probably have the same value, a power of two."""
    if positions_of(found, [node]) == (False, False):
        return _TILE
    place = found.forms.affine(node)
    if place is not None and (place.q or place.k):
        return 1
    quotient = quotient_of(found.forms, node)
    if quotient is not None and not quotient.is_remainder:
        divided = found.forms.affine(quotient.value)
        if divided is not None and abs(divided.q) + abs(divided.k) == 1:
            # Tiles start at multiples of their size.
            start = math.gcd(quotient.divisor, divided.rest.offset, _TILE)
            return _TILE if quotient.divisor >= _TILE else start
    if node.target is torch.ops.aten.index.Tensor:
        return _TILE  # ids of segments
    return min((_repeats(found, source) for source in node.all_input_nodes), default=1)
