"""Latent attention in Triton's interpreter: value is the first columns of key, read once."""

import pytest
import torch

import flexhop
from flexhop.masks import causal_with_offset
from flexhop.offline.interpret import Memory, interpret
from tests.budgets import assert_within_budget, dense_attention

SCALE = 192**-0.5
KEYS = 70


def attend(query, latent, table=None, mask=None, width=512, **options):
    return flexhop.flex_attention(
        query, latent, latent[..., :width], scale=SCALE, enable_gqa=True, page_table=table,
        block_mask=mask, return_aux=flexhop.AuxRequest(lse=True),
        kernel_options={"backend": "triton", **options},
    )  # fmt: skip


def check(generated, query, latent, visible, width=512):
    """Judge out and lse against the dense formula."""
    (kernel,) = [k for k in generated.templates if "attend_share" in k.functions]
    assert kernel.constants["VALUE_IS_KEY"]
    out, aux = generated.result
    gold, reference = (
        dense_attention(q, k, k[..., :width], None, visible, SCALE)
        for q, k in ((query.double(), latent.double()), (query, latent))
    )
    assert_within_budget(out, gold.out, reference.out, name="out")
    assert_within_budget(aux.lse, gold.lse, reference.lse, name="lse")


@pytest.mark.parametrize(("width", "heads", "queries"), [(512, 20, 2), (576, 3, 1)])
def test_keys_of_a_step(width, heads, queries):
    torch.manual_seed(0)
    query = torch.randn(2, heads, queries, 576).bfloat16()
    # Rows of a longer buffer: strides that are not those of a tensor of its own.
    latent = torch.randn(2, 1, 2 * KEYS, 640).bfloat16()[:, :, :KEYS, :576]
    offset = torch.tensor([KEYS - queries, 30])
    mask = flexhop.create_block_mask(causal_with_offset(offset), 2, None, queries, KEYS, "cpu")
    generated = interpret(
        lambda q, kv: attend(q, kv, None, mask, width, splits=2), query, latent,
        memory=Memory(poison=True, check_bounds=True),
    )  # fmt: skip
    keys = torch.arange(KEYS)
    visible = keys <= (offset[:, None] + torch.arange(queries))[:, None, :, None]
    check(generated, query, latent, visible, width)


@pytest.mark.parametrize("page", [16, 64])
def test_pages(page):
    torch.manual_seed(0)
    query = torch.randn(2, 20, 1, 576).bfloat16()
    lengths = torch.tensor([KEYS, 19], dtype=torch.int32)
    columns = -(-KEYS // page)
    places = torch.randperm(2 * columns)
    pages = torch.randn(2 * columns, 1, page, 576).bfloat16()
    table = flexhop.PageTable(places.view(2, columns).int(), page, lengths)
    generated = interpret(
        lambda q, kv, pages, used: attend(q, kv, flexhop.PageTable(pages, page, used)),
        query, pages, table.pages, lengths, memory=Memory(poison=True, check_bounds=True),
    )  # fmt: skip
    latent = pages[places.view(2, columns)].flatten(1, 3)[:, None]
    visible = (torch.arange(latent.size(2)) < lengths[:, None])[:, None, None]
    check(generated, query, latent, visible)
