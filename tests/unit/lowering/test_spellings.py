"""Mods that are one mod have the same facts, so that they take the same kernel."""

import functools

import pytest
import torch

from flexhop.compat.graphs.inline import decompose
from flexhop.lowering.mods.captured import read_sites
from flexhop.lowering.mods.lower import read_joint, read_mods
from flexhop.mods.functions import noop_mask
from flexhop.ops.args import unpack_sites
from flexhop.ops.graphs.subgraphs import trace_joint, trace_mask, trace_score
from tests.spellings import DISTANCES, DOCUMENTS, LENGTH, LINES, MAGNITUDES, WINDOWS

QUERY = torch.zeros(1, 4, LENGTH, 64, dtype=torch.bfloat16)
SCORES = [*(("line", name) for name in LINES), *(("magnitude", name) for name in MAGNITUDES)]
MASKS = [*(("window", name) for name in WINDOWS), *(("document", name) for name in DOCUMENTS)]
KINDS = {
    "line": LINES, "magnitude": MAGNITUDES, "window": WINDOWS, "document": DOCUMENTS,
    "distance": DISTANCES,
}  # fmt: skip
TABLE = (torch.zeros(4, 2 * LENGTH - 1, requires_grad=True),)


def facts(score, mask, captures=()):
    """What kernels are chosen by; costs count operators and differ by one or two."""
    traced = (
        decompose(trace_score(score, QUERY, captures)),
        decompose(trace_mask(mask, QUERY, ())),
    )
    joint = trace_joint(score, QUERY, captures)
    lowered = decompose(joint.joint)
    found = read_mods(*traced)
    assert found.score_cost < 12
    return (
        found._replace(score_cost=0.0, mask_cost=0.0, asked_cost=0.0, asked_grad_cost=0.0),
        read_joint(lowered)._replace(grad_cost=0.0),
        read_sites(lowered, unpack_sites(joint.sites)),
    )


def identity(score, b, h, q, k):
    return score


def reading(distance):
    return lambda s, b, h, q, k, table: s + table[h, distance(q, k)]


@functools.cache
def facts_of_first(kind):
    """Of the spelling that the others of its kind are compared with."""
    first, *_ = KINDS[kind].values()
    if kind == "distance":
        return facts(reading(first), noop_mask, TABLE)
    return facts(identity, first) if kind in ("window", "document") else facts(first, noop_mask)


@pytest.mark.parametrize(("kind", "name"), SCORES)
def test_score_mods(kind, name):
    found = facts(KINDS[kind][name], noop_mask)
    assert found == facts_of_first(kind)
    assert found[0].has_key_slope and found[0].has_key_bend == (kind == "magnitude")


@pytest.mark.parametrize(("kind", "name"), MASKS)
def test_mask_mods(kind, name):
    found = facts(identity, KINDS[kind][name])
    assert found == facts_of_first(kind)
    assert (found[0].mask_band is not None) == (kind == "window")


@pytest.mark.parametrize("name", DISTANCES)
def test_tables_by_distance(name):
    found = facts(reading(DISTANCES[name]), noop_mask, TABLE)
    assert found == facts_of_first("distance") and found[2] == ("distance",)
