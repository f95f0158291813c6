"""Heads in pieces and latent attention on a GPU."""

from __future__ import annotations

import pytest
import torch

import flexhop
from tests.budgets import assert_within_budget, dense_attention

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("is_view", [True, False])
@pytest.mark.parametrize(
    ("heads", "queries", "keys"), [(128, 1, 5000), (16, 3, 777), (4, 300, 300)]
)
def test_latent_attention(heads, queries, keys, is_view):
    query = torch.randn(2, heads, queries, 576, device="cuda", dtype=torch.bfloat16)
    latent = torch.randn(2, 1, keys, 576, device="cuda", dtype=torch.bfloat16)

    def attend(query, latent, value):
        value = latent[..., :512] if is_view else value
        return flexhop.flex_attention(
            query, latent, value, scale=192**-0.5, enable_gqa=True,
            return_aux=flexhop.AuxRequest(lse=True),
        )  # fmt: skip

    out, aux = torch.compile(attend, fullgraph=True)(query, latent, latent[..., :512].clone())
    visible = torch.ones(1, 1, dtype=torch.bool, device="cuda")
    gold, reference = (
        dense_attention(q, k, k[..., :512], None, visible, 192**-0.5)
        for q, k in ((query.double(), latent.double()), (query, latent))
    )
    assert_within_budget(out, gold.out, reference.out, name="out")
    assert_within_budget(aux.lse, gold.lse, reference.lse, name="lse")


def test_the_example():
    import sys
    from pathlib import Path

    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
    import latent_attention as example

    sizes = example.Sizes(width=512, heads=16, batch=2, length=200, steps=5)
    layer = example.LatentAttention(sizes).to("cuda", torch.bfloat16)
    losses = example.train(layer, "cuda", compiled=True)
    assert losses[-1] < losses[0]
    assert example.compare(layer, "cuda", compiled=True) < 3e-2
