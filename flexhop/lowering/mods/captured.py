"""Gradients of captured tensors: which scores read the same entry, from the joint graph's
indices."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import fx

from flexhop.analysis import INDICES, Analysis, Coordinate
from flexhop.lowering.mods.analysed import JOINT, analysed, positions_of
from flexhop.lowering.problem import ReadBy
from flexhop.ops.args import Site, unpack_sites


def read_sites(joint: Any, sites: tuple[int, ...]) -> tuple[ReadBy, ...]:
    """For every site of a joint graph, which scores read the same entry."""
    return tuple(read_by(joint, site) for site in unpack_sites(sites))


def read_by(joint: Any, site: Site) -> ReadBy:
    """Which scores read the same entry at a site."""
    found = analysed(joint, JOINT)
    indices = _indices(found, site)
    uses_q_idx, uses_kv_idx = positions_of(found, indices)
    # From the most to the least that can be summed before it is added.
    if not uses_q_idx:
        return "key" if uses_kv_idx else "head"
    if not uses_kv_idx:
        return "query"
    return "distance" if all(_is_by_distance(found, index) for index in indices) else "score"


def repeats(joint: Any, site: Site) -> bool:
    """Whether pairs at different distances may read the same entry: no index is a distance itself.

    Likewise for different queries, if reads depend only on the query: none is the query itself.
    """
    found = analysed(joint, JOINT)
    return not any(_is_one_to_one(found, index) for index in _indices(found, site))


def depends_on(joint: Any, site: Site) -> frozenset[str]:
    """The indices of a score that say which entry it reads, by name."""
    found = analysed(joint, JOINT)
    return found.forms.of_all(_indices(found, site)) & frozenset(INDICES)


class SharedEntries(NamedTuple):
    """Where all keys of a query may read one entry, or all queries of a key.

    axis: of tiles [queries, keys], over which their gradients are summed: 1, or 0; None: never.
    indices: which indices of the site have to be the same for it, throughout a tile.
    """

    axis: int | None
    indices: tuple[int, ...]


NOT_SHARED = SharedEntries(None, ())


def shared_entries(joint: Any, site: Site) -> SharedEntries:
    """Whether scores of a query read one entry if some function of their distance is the same.

    Most tiles are so far from the diagonal that a clamped distance, or a bucket, is.
    """
    found, by_distance, sides = analysed(joint, JOINT), [], set[bool]()
    for place, result in enumerate(site.indices):
        index = found.mod.results[result]
        if not isinstance(index, fx.Node):
            continue
        uses_q_idx, uses_kv_idx = positions_of(found, [index])
        if not (uses_q_idx and uses_kv_idx):
            sides |= {uses_q_idx} if uses_q_idx or uses_kv_idx else set()
        elif _is_by_distance(found, index) and not _is_one_to_one(found, index):
            by_distance.append(place)
        else:
            return NOT_SHARED
    if not by_distance or len(sides) != 1:
        return NOT_SHARED
    return SharedEntries(int(sides.pop()), tuple(by_distance))


def _indices(found: Analysis, site: Site) -> list[fx.Node]:
    """The computed indices of a site."""
    indices = (found.mod.results[i] for i in site.indices)
    return [index for index in indices if isinstance(index, fx.Node)]


def _is_by_distance(found: Analysis, index: fx.Node) -> bool:
    """Whether an index stays the same if query and key both advance by one."""
    seen = found.forms.seen(index)
    distance = ((found.mod.inputs["q"], 1), (found.mod.inputs["k"], -1))
    is_distance = (isinstance(c, Coordinate) and c.terms == distance for c in seen.coordinates)
    return "score" not in seen.others and all(is_distance)


def _is_one_to_one(found: Analysis, index: fx.Node) -> bool:
    """Whether an index grows or falls by exactly one from one query to the next."""
    form, q_idx = found.forms.form(index), found.mod.inputs["q"]
    if form is None or abs(form.terms.get(q_idx, 0)) != 1:
        return False
    others = [atom for atom in form.terms if atom is not q_idx]
    return "q" not in found.forms.of_all(others)
