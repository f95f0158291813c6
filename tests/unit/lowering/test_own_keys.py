"""Whether each query sees the key at its own position, as far as a mask_mod tells."""

import pytest
import torch

from flexhop import masks
from flexhop.lowering.mods.lower import read_mods
from flexhop.ops.graphs.subgraphs import trace_mask, trace_score

QUERY = torch.zeros(2, 2, 64, 16, dtype=torch.bfloat16)
CAPTURES = torch.zeros(2, 64, dtype=torch.int32), torch.full((2,), 40)  # ids, lengths


def plain(mask_mod):
    return lambda b, h, q, k, ids, lengths: mask_mod(b, h, q, k)


def keeps_own(mask_mod) -> bool:
    score = trace_score(lambda s, b, h, q, k: s, QUERY, ())
    return read_mods(score, trace_mask(mask_mod, QUERY, CAPTURES)).mask_keeps_own


@pytest.mark.parametrize(
    "mask_mod",
    [
        plain(masks.causal),
        plain(masks.sliding_window(16)),
        lambda b, h, q, k, ids, lengths: (q - k).abs() <= 5,
        lambda b, h, q, k, ids, lengths: ~((q < k) | (q - k > 8)),
        lambda b, h, q, k, ids, lengths: (ids[b, q] == ids[b, k]) & (q >= k),
        lambda b, h, q, k, ids, lengths: (k < lengths[b]) | (q >= k),
        lambda b, h, q, k, ids, lengths: (
            ((q // 8 - k // 8).abs() <= 1) & ((q % 8 - k % 8).abs() <= 1)
        ),
        lambda b, h, q, k, ids, lengths: torch.maximum(q - k, k - q) < 3,
    ],
)
def test_most_masks_keep_it(mask_mod):
    own = torch.arange(64)
    assert all(
        bool(mask_mod(b, torch.tensor(1), own, own, *CAPTURES).all()) for b in torch.arange(2)
    )
    assert keeps_own(mask_mod)


@pytest.mark.parametrize(
    "mask_mod",
    [
        lambda b, h, q, k, ids, lengths: (q < lengths[b]) & (k < lengths[b]),
        lambda b, h, q, k, ids, lengths: k < lengths[b],
        lambda b, h, q, k, ids, lengths: q > k,
        lambda b, h, q, k, ids, lengths: (q >= k) & (ids[b, q] > 0),
        lambda b, h, q, k, ids, lengths: q < 0,
        lambda b, h, q, k, ids, lengths: q + 3 <= k,
    ],
)
def test_padding_and_shifted_masks_may_not(mask_mod):
    assert not keeps_own(mask_mod)
