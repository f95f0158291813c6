"""Which reads are in rows of keys, and which gradients of captured tensors are stored."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from flexhop.compat.graphs.inline import decompose
from flexhop.lowering.mods.analysed import INDICES, SCORE
from flexhop.lowering.mods.captured import site_facts
from flexhop.lowering.mods.lower import read_joint
from flexhop.lowering.mods.rows import head_row_bytes, mask_rows, row_bytes
from flexhop.lowering.problem import PairRows
from flexhop.ops.args import unpack_sites
from flexhop.ops.graphs.subgraphs import trace_joint, trace_mask, trace_score

SIZES = (2, 3, 16, 24)
QUERY = torch.zeros(*SIZES[:3], 8)
PAIRS = torch.zeros(SIZES, requires_grad=True)
HALVES = torch.zeros(SIZES, dtype=torch.bfloat16, requires_grad=True)
WIDE = torch.zeros(2, 3, 16, 25, requires_grad=True)
TURNED = torch.zeros(2, 3, 24, 16).transpose(2, 3).requires_grad_()
TURNED_BACK = torch.zeros(2, 3, 16, 24).transpose(2, 3).requires_grad_()
TABLE, PLACES = torch.zeros(3, 64), torch.arange(24)

# score_mod, its captured tensors, bytes that it reads in rows, whether gradients are sums.
MODS: dict[str, tuple[Callable[..., Any], tuple[Any, ...], int, bool]] = {
    "pairs": (lambda s, b, h, q, k, t: s + t[b, h, q, k], (PAIRS,), 4, False),
    "16 bits": (lambda s, b, h, q, k, t: s + 2 * t[b, h, q, k], (HALVES,), 2, False),
    "spelled": (lambda s, b, h, q, k, t: t[b, h, q][k + q - q] + s, (PAIRS,), 4, False),
    "all heads": (lambda s, b, h, q, k, t: s + t[b, 0, q, k], (PAIRS,), 4, True),
    "all batches": (lambda s, b, h, q, k, t: s + t[0, h, q, k], (PAIRS,), 4, True),
    "two queries": (lambda s, b, h, q, k, t: s + t[b, h, q // 2, k], (PAIRS,), 4, True),
    "twice": (lambda s, b, h, q, k, t: s * t[b, h, q, k] + t[b, h, k, 0], (PAIRS,), 4, True),
    "a table, too": (
        lambda s, b, h, q, k, t, u: s + t[b, h, q, k] + u[h, k - q + 16], (PAIRS, TABLE), 0, False,
    ),
    "distance": (lambda s, b, h, q, k, t: s + t[b, h, 0, k - q], (PAIRS,), 0, True),
    "next key": (lambda s, b, h, q, k, t: s + t[b, h, q, k + 1], (WIDE,), 0, True),
    "places": (lambda s, b, h, q, k, t, p: s + t[b, h, q, p[k]], (PAIRS, PLACES), 0, True),
    "turned": (lambda s, b, h, q, k, t: s + t[b, h, q, k], (TURNED,), 0, False),
    "turned back": (lambda s, b, h, q, k, t: s + t[b, h, k, q], (TURNED_BACK,), 4, False),
    "columns": (lambda s, b, h, q, k, t: s + t[b, h, k, q], (PAIRS.mT.contiguous(),), 0, False),
    "unaligned": (lambda s, b, h, q, k, t: s + t[b, h, q, k], (WIDE,), 0, False),
}  # fmt: skip


@pytest.mark.parametrize("name", MODS)
def test_rows_and_own_entries(name: str):
    score_mod, captures, size, is_sum = MODS[name]
    assert row_bytes(decompose(trace_score(score_mod, QUERY, captures))) == size
    traced = trace_joint(score_mod, QUERY, captures)
    facts = read_joint(decompose(traced.joint), unpack_sites(traced.sites), SIZES)
    assert facts.adds_captured == is_sum


@pytest.mark.parametrize(
    ("score_mod", "size"),
    [
        (lambda s, b, h, q, k, t: s + t[0, h, q, k], 4),
        (lambda s, b, h, q, k, t: s + t[0, h, k, q] * 2, 4),
        (lambda s, b, h, q, k, t: s + t[h // 2, 1, q, k] + t[1, h, q, k], 8),
        (lambda s, b, h, q, k, t: s + t[b, h, q, k], 0),
        (lambda s, b, h, q, k, t: s + t[0, 1, q, k], 0),
        (lambda s, b, h, q, k, t: s + t[0, h, q // 2, k], 0),
        (lambda s, b, h, q, k, t: s + t[0, h, 0, q - k + 3], 0),
    ],
)
def test_rows_of_heads_that_batches_share(score_mod, size):
    assert head_row_bytes(decompose(trace_score(score_mod, QUERY, (PAIRS,))), SCORE) == size


def test_masks_have_such_rows():
    mask = trace_mask(lambda b, h, q, k, t: t[h, q, k], QUERY, (torch.zeros(3, 16, 24) > 0,))
    assert head_row_bytes(decompose(mask), INDICES) == 1


def test_an_index_of_one_value_may_be_missing():
    one = torch.zeros(24, 16, requires_grad=True)
    traced = trace_joint(lambda s, b, h, q, k, t: s + t[k, q], QUERY, (one,))
    joint = decompose(traced.joint)
    assert not read_joint(joint, unpack_sites(traced.sites), (1, 1, 16, 24)).adds_captured
    assert read_joint(joint, unpack_sites(traced.sites), (2, 1, 16, 24)).adds_captured


def test_what_a_whole_column_adds_to_is_a_sum():
    keys = torch.zeros(2, 3, 24, requires_grad=True)
    traced = trace_joint(lambda s, b, h, q, k, t: s + t[b, h, k], QUERY, (keys,))
    joint = decompose(traced.joint)
    assert read_joint(joint, unpack_sites(traced.sites), (2, 3, 1, 24)).adds_captured
    assert not any(site_facts(joint, site).is_row for site in unpack_sites(traced.sites))


FLAGS, ODD_FLAGS = torch.zeros(16, 32, dtype=torch.bool), torch.zeros(16, 25, dtype=torch.bool)
NUMBERS, KINDS = torch.zeros(16, 25, dtype=torch.int32), torch.zeros(24, dtype=torch.int64)

# mask_mod, its captured tensors, in rows of what its pairs stand.
MASKS: dict[str, tuple[Callable[..., Any], tuple[Any, ...], PairRows | None]] = {
    "pairs": (lambda b, h, q, k, t: t[q, k] > 0, (NUMBERS,), "keys"),
    "flags": (lambda b, h, q, k, t: t[q, k], (FLAGS,), "keys"),
    "unaligned flags": (lambda b, h, q, k, t: t[q, k], (ODD_FLAGS,), "short keys"),
    "columns": (lambda b, h, q, k, t: t[k, q] > 0, (NUMBERS,), "queries"),
    "both": (lambda b, h, q, k, t: t[q, k] > t[k, q], (NUMBERS,), None),
    "with ids": (
        lambda b, h, q, k, t, u: (t[q, k] > 0) & (u[q] == u[k]),
        (NUMBERS, KINDS),
        "keys",
    ),
    "ids": (lambda b, h, q, k, u: u[q] == u[k], (KINDS,), None),
    "words": (lambda b, h, q, k, t: (t[q, k // 8] >> (k % 8)) & 1 == 1, (NUMBERS,), None),
    "blocks": (lambda b, h, q, k, t: t[q // 4, k // 4] > 0, (NUMBERS,), None),
    "kinds": (lambda b, h, q, k, t, u: t[u[q], u[k]] > 0, (NUMBERS, KINDS), None),
    "distance": (lambda b, h, q, k, t: t[0, q - k] > 0, (NUMBERS,), "distances"),
    "of a column": (lambda b, h, q, k, t: t[q - k, 0] > 0, (NUMBERS,), None),
    "buckets": (lambda b, h, q, k, t: t[0, (q - k) // 8] > 0, (NUMBERS,), None),
    "two kinds": (
        lambda b, h, q, k, t, f: f[q, k] & (t[q, k] > 0),
        (NUMBERS, ODD_FLAGS),
        "short keys",
    ),
}


@pytest.mark.parametrize("name", MASKS)
def test_rows_of_masks(name: str):
    mask_mod, captures, rows = MASKS[name]
    assert mask_rows(decompose(trace_mask(mask_mod, QUERY, captures))) == rows
