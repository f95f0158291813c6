"""Masks that hide some scores of every block by one position alone."""

import pytest
import torch

from flexhop.lowering.mods.lower import read_mods
from flexhop.ops.graphs.subgraphs import trace_mask, trace_score

QUERY = torch.zeros(2, 2, 512, 16, dtype=torch.bfloat16)


def is_scattered(mask_mod) -> bool:
    score = trace_score(lambda s, b, h, q, k: s, QUERY, ())
    return read_mods(score, trace_mask(mask_mod, QUERY, ())).mask_is_scattered


@pytest.mark.parametrize(
    "mask_mod",
    [
        lambda b, h, q, k: (q % 3 != 1) & (q // 11 >= k // 11),
        lambda b, h, q, k: (q >= k) & (k % 2 == 0),
        lambda b, h, q, k: ~((q < k) | (q % 64 < 3)),
        lambda b, h, q, k: ((q + h) % 5 < 3) & (q >= k),
        lambda b, h, q, k: (k % 5 != 2) & (k % 5 != 3),
    ],
)
def test_no_block_is_whole(mask_mod):
    place = torch.arange(512)
    seen = mask_mod(0, torch.tensor(1), place[:, None], place[None])
    blocks = seen.expand(512, 512).reshape(4, 128, 4, 128)
    assert not blocks.all(3).all(1).any()
    assert is_scattered(mask_mod)


@pytest.mark.parametrize(
    "mask_mod",
    [
        lambda b, h, q, k: q >= k,
        lambda b, h, q, k: (q % 3 < 3) & (q >= k),  # always true
        lambda b, h, q, k: (q % 3 != 1) | (q >= k),
        lambda b, h, q, k: (q % 4096 < 4000) & (q >= k),
        lambda b, h, q, k: (q // 1000 % 2 == 0) & (q >= k),
        lambda b, h, q, k: (q >= k) & ((q - k) % 4 == 0),  # of the distance
        lambda b, h, q, k: (h % 2 == 0) & (q >= k),
        lambda b, h, q, k: (q < 300) & (q >= k),
    ],
)
def test_others_may_have_full_blocks(mask_mod):
    assert not is_scattered(mask_mod)
