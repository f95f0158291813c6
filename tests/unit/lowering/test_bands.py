"""mask_mods that keep the keys near a query: which they are, and how far they reach."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flexhop import masks
from flexhop.lowering.mods.bands import Band, key_band
from flexhop.lowering.mods.lower import is_all_true
from flexhop.lowering.problem import MaskBlocks
from flexhop.ops.graphs.subgraphs import trace_mask
from tests.problems import problem
from tests.spellings import WIDTH, WINDOWS

QUERY = torch.zeros(1, 1, 2, 64, dtype=torch.bfloat16)
IDS = torch.arange(64) // 10


def band_of(mod: Any) -> Band | None:
    return key_band(trace_mask(mod, QUERY, ()))


BANDS = {
    "window": (lambda b, h, q, k: (q >= k) & (q - k < 16), Band(-15, 1)),
    "by_key": (lambda b, h, q, k: (k <= q) & (k > q - 16), Band(-15, 1)),
    "masks": (masks.sliding_window(16), Band(-15, 1)),
    "both_directions": (masks.sliding_window(16, bidirectional=True), Band(-15, 16)),
    "magnitude": (lambda b, h, q, k: (q - k).abs() <= 9, Band(-9, 10)),
    "small_magnitude": (lambda b, h, q, k: (k - q + 2).abs() < 3, Band(-4, 1)),
    "number_first": (lambda b, h, q, k: torch.logical_and(k - q + 3 >= 0, 8 > k - q), Band(-3, 8)),
    "from_a_number": (lambda b, h, q, k: (5 - (q - k) >= 0) & (-(q - k) < 4), Band(-5, 4)),
    "moved": (lambda b, h, q, k: (q + 7 >= k) & (k + 3 > q + 1), Band(-1, 8)),
    "floats": (lambda b, h, q, k: (q >= k) & (q.float() - k < 15.5), Band(-15, 1)),
    "three_sides": (lambda b, h, q, k: (q >= k) & (q - k < 16) & (q - k < 12), Band(-11, 1)),
    "nothing": (lambda b, h, q, k: (q > k) & (k > q), Band(1, 0)),
}


@pytest.mark.parametrize("name", BANDS)
def test_a_band_is_what_the_mask_keeps(name):
    mod, expected = BANDS[name]
    band = band_of(mod)
    assert band == expected
    place = torch.arange(64, dtype=torch.int32)
    q, k = place[:, None], place[None, :]
    assert mod(0, 0, q, k).equal((k >= q + band.first) & (k < q + band.end))


@pytest.mark.parametrize(
    "mod",
    [
        lambda b, h, q, k: q >= k,
        lambda b, h, q, k: (q >= k) & (k >= 4),
        lambda b, h, q, k: (q >= k) | (q - k < 16),
        lambda b, h, q, k: (q >= k) & (q + k < 16),
        lambda b, h, q, k: (q >= k) & (2 * q - k < 16),
        lambda b, h, q, k: (q >= k) & (q - k < 2 * h),
        lambda b, h, q, k: (q >= k) & (IDS[q] == IDS[k]),
        lambda b, h, q, k: (q >= k) & (q.half() - k < 16),
        lambda b, h, q, k: (q >= k) & (q.float() * 0.3 - k < 16),
        lambda b, h, q, k: (q >= k) & (torch.sub(q, k, alpha=2) < 16),
        lambda b, h, q, k: (q >= k) & (q - k < 2**31 - 9),
        lambda b, h, q, k: (q - k).abs() >= 9,
        masks.dilated_sliding_window(16, 2),
    ],
    ids=[
        "one_side", "from_a_key_on", "either", "sum", "twice", "by_head", "table", "halves",
        "fractions", "alpha", "far", "outside", "dilated",
    ],
)  # fmt: skip
def test_other_masks_have_none(mod):
    assert band_of(mod) is None


def test_bands_are_the_mask_of_lists_alone():
    band = {"mask_band": Band(-15, 1), "has_mask_mod": True}
    lists, ranges = MaskBlocks(128, 128, True), MaskBlocks(128, 128, False, has_ranges=True)
    for blocks, is_band in ((lists, True), (ranges, False), (None, False)):
        call = problem(blocks=blocks, **band)
        assert (call.has_band, call.has_spans) == (is_band, is_band)
    packed = problem(blocks=MaskBlocks(128, 128, True, has_ranges=True))
    assert (packed.has_band, packed.has_spans) == (False, True)


@pytest.mark.parametrize("mod", WINDOWS.values(), ids=WINDOWS)
def test_the_spelling_of_a_window_does_not_matter(mod):
    assert band_of(mod) == Band(1 - WIDTH, 1)


ALWAYS_TRUE = {
    "or": (lambda b, h, q, k: (q >= k) | (q < k), True),
    "not": (lambda b, h, q, k: ~((q - k > 3) & (k > q)), True),
    "constant": (lambda b, h, q, k: torch.ones_like(q, dtype=torch.bool), True),
    "gap": (lambda b, h, q, k: (q > k) | (q < k), False),
}


@pytest.mark.parametrize("name", ALWAYS_TRUE)
def test_a_mask_that_hides_nothing_is_none(name):
    mod, expected = ALWAYS_TRUE[name]
    assert is_all_true(trace_mask(mod, QUERY, ())) == expected
