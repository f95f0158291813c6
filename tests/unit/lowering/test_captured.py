"""Which scores read one entry of a captured tensor is read from the indices of the joint graph."""

from __future__ import annotations

import pytest
import torch

from flexhop.lowering.mods.captured import follow_score, read_sites, site_facts
from flexhop.ops.args import unpack_sites
from flexhop.ops.graphs.subgraphs import trace_joint
from tests.spellings import DISTANCES, LENGTH

READS = {
    "head": (
        lambda s, b, h, q, k, t, which: s + t[h, 0] * (k - q),
        lambda s, b, h, q, k, t, which: s * t[b, h],
        lambda s, b, h, q, k, t, which: s + t[0, 0],
    ),
    "key": (
        lambda s, b, h, q, k, t, which: s + t[h, k],
        lambda s, b, h, q, k, t, which: s * t[h, which[k]],
    ),
    "query": (
        lambda s, b, h, q, k, t, which: s + t[h, q],
        lambda s, b, h, q, k, t, which: s + t[q, 3],
    ),
    "distance": (
        lambda s, b, h, q, k, t, which: s + t[h, q - k + 63],
        lambda s, b, h, q, k, t, which: s * t[h, k - q],
        lambda s, b, h, q, k, t, which: s + t[h, (q - k).abs().clamp(0, 20) // 2],
        lambda s, b, h, q, k, t, which: s + t[h, 63 + q - k],
        lambda s, b, h, q, k, t, which: s + t[h, (q + 5) - (k - 3)],
        lambda s, b, h, q, k, t, which: s + t[(q - k) // 8, which[q - k]],
        lambda s, b, h, q, k, t, which: s + t[h, ((q - k).float().abs() + 1).log().long()],
        lambda s, b, h, q, k, t, which: s + t[h, torch.where(q > k, q - k, 0)],
    ),
    "score": (
        lambda s, b, h, q, k, t, which: s + t[q, k],
        lambda s, b, h, q, k, t, which: s + t[h, q + k],
        lambda s, b, h, q, k, t, which: s + t[h, 2 * q - k],
        lambda s, b, h, q, k, t, which: s + t[h, q // 8 - k // 8],
        lambda s, b, h, q, k, t, which: s + t[q - k, q],
        lambda s, b, h, q, k, t, which: s + t[h, which[q] - which[k]],
        lambda s, b, h, q, k, t, which: s + t[h, (s > 0).int()],
        lambda s, b, h, q, k, t, which: s + t[h, q.bfloat16().long() - k.bfloat16().long()],
    ),
}
CASES = [(by, mod) for by, mods in READS.items() for mod in mods]


@pytest.mark.parametrize(("by", "mod"), CASES, ids=[f"{by}{n}" for n, (by, _) in enumerate(CASES)])
def test_reads(by, mod):
    table = torch.zeros(64, 128, requires_grad=True)
    joint = trace_joint(mod, torch.zeros(1, 4, 64, 16), (table, torch.arange(64)))
    assert read_sites(joint.joint, unpack_sites(joint.sites)) == (by,)


REPEATED = [2, 5, 6, 7]  # of the mods that read by distance: those that clamp, divide or look up


@pytest.mark.parametrize("number", range(len(READS["distance"])))
def test_distances_that_share_an_entry(number):
    joint = trace_joint(
        READS["distance"][number], torch.zeros(1, 4, 64, 16),
        (torch.zeros(64, 128, requires_grad=True), torch.arange(64)),
    )  # fmt: skip
    (site,) = unpack_sites(joint.sites)
    assert site_facts(joint.joint, site).repeats == (number in REPEATED)


@pytest.mark.parametrize(
    ("mod", "shared"),
    [
        (lambda s, b, h, q, k, t, which: s + t[h, q], False),
        (lambda s, b, h, q, k, t, which: s + t[h, which[q]], True),
        (lambda s, b, h, q, k, t, which: s * t[h, q // 4], True),
    ],
)
def test_queries_that_share_entries(mod, shared):
    captures = (torch.zeros(64, 128, requires_grad=True), torch.arange(64))
    joint = trace_joint(mod, torch.zeros(1, 4, 64, 16), captures)
    (site,) = unpack_sites(joint.sites)
    assert read_sites(joint.joint, unpack_sites(joint.sites)) == ("query",)
    assert site_facts(joint.joint, site).repeats == shared


@pytest.mark.parametrize(
    ("mod", "follows"),
    [
        (lambda s, b, h, q, k, t, which: s + t[h, q], True),
        (lambda s, b, h, q, k, t, which: torch.tanh(s + t[h, k]), True),
        (lambda s, b, h, q, k, t, which: torch.tanh(s - t[h, k].bfloat16()), True),
        (lambda s, b, h, q, k, t, which: 9 * torch.tanh(s / 9) + t[h, q - k + 63], True),
        (lambda s, b, h, q, k, t, which: s * t[h, 0], False),
        (lambda s, b, h, q, k, t, which: torch.tanh(s * t[h, 0]), False),
        (lambda s, b, h, q, k, t, which: torch.tanh(s + t[h, k]) * t[h, q], False),
    ],
)
def test_gradients_that_are_those_of_scores(mod, follows):
    captures = (torch.zeros(64, 128, requires_grad=True), torch.arange(64))
    joint = trace_joint(mod, torch.zeros(1, 4, 64, 16), captures)
    assert follow_score(joint.joint, unpack_sites(joint.sites)) == follows


def test_every_site_is_read_by_itself():
    def score_mod(score, b, h, q_idx, kv_idx, table):
        return score * table[h] + table[q_idx] * table[kv_idx] + table[q_idx - kv_idx]

    table = torch.zeros(128, requires_grad=True)
    joint = trace_joint(score_mod, torch.zeros(1, 4, 64, 16), (table,))
    assert sorted(read_sites(joint.joint, unpack_sites(joint.sites))) == [
        "distance",
        "head",
        "key",
        "query",
    ]


def test_no_sites_without_gradients():
    table = torch.zeros(64)
    joint = trace_joint(
        lambda s, b, h, q, k, table: s + table[q], torch.zeros(1, 4, 64, 16), (table,)
    )
    assert read_sites(joint.joint, unpack_sites(joint.sites)) == ()


@pytest.mark.parametrize("distance", DISTANCES.values(), ids=DISTANCES)
def test_the_spelling_of_a_distance_does_not_matter(distance):
    table = torch.zeros(4, 2 * LENGTH - 1, requires_grad=True)
    joint = trace_joint(
        lambda s, b, h, q, k, t: s + t[h, distance(q, k)], torch.zeros(1, 4, 64, 16), (table,)
    )
    (site,) = unpack_sites(joint.sites)
    assert read_sites(joint.joint, unpack_sites(joint.sites)) == ("distance",)
    assert not site_facts(joint.joint, site).repeats
