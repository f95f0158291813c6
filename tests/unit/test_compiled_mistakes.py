"""Errors of compiled calls name sizes, also those that are dynamic."""

import pytest
import torch

import flexhop
from flexhop import flash
from flexhop.errors import FlexhopError

pytestmark = pytest.mark.filterwarnings("ignore::flexhop.errors.EagerWarning")
MASK = torch.ones(48, 47, dtype=torch.bool)


def with_cache(q, k, v, **others):
    """flash-attn's layout, of which sizes are batch, tokens, heads and columns."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return flash.flash_attn_with_kvcache(q, k, v, **others)


def paged(q, k, v, rows):
    pages = torch.zeros(rows, 3, dtype=torch.int32)
    table = flexhop.PageTable(pages, 16, torch.zeros(rows, dtype=torch.int32))
    key, value = (t.flatten(0, 1)[None] for t in (k, v))
    return flexhop.flex_attention(q, key, value, page_table=table)


MISTAKES = {
    "attn_mask": (
        lambda q, k, v: flexhop.scaled_dot_product_attention(q, k, v, attn_mask=MASK),
        "48, 47",
    ),
    "attn_mask of the call": (
        lambda q, k, v: flexhop.scaled_dot_product_attention(q, k, v, attn_mask=q[0, :, :, :5]),
        "3, 48, 5",
    ),
    "sinks": (lambda q, k, v: flexhop.flex_attention(q, k, v, sinks=q[0, :2, 0, 0]), "2"),
    "dropout_seed": (
        lambda q, k, v: flexhop.flex_attention(
            q, k, v, dropout_p=0.5, dropout_seed=q[:, 0, 0, 0].long()
        ),
        "dropout_seed",
    ),
    "alibi_slopes": (
        lambda q, k, v: flash.flash_attn_func(
            *(t.transpose(1, 2) for t in (q, k, v)), alibi_slopes=q[:, 0, :, 0].float()
        ),
        "4, 48",
    ),
    "v_cache": (lambda q, k, v: with_cache(q, k, v[:, :, :5]), "4, 5, 3, 16"),
    "cache_seqlens": (
        lambda q, k, v: with_cache(q, k, v, cache_seqlens=torch.zeros(7, dtype=torch.int32)),
        "7",
    ),
    "pages": (lambda q, k, v: paged(q, k, v, 3), "3, 3"),
    "scale of k_mod": (
        lambda q, k, v: flexhop.flex_attention(
            q, k, v, k_mod=flexhop.mods.dequantize(q[0, :, :5, 0])
        ),
        "3, 5",
    ),
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", MISTAKES)
def test_the_error_is_that_of_the_eager_call(name, dynamic):
    call, words = MISTAKES[name]
    torch._dynamo.reset()
    tensors = [torch.randn(4, 3, 48, 16) for _ in range(3)]
    with pytest.raises(FlexhopError, match=words) as eager:
        call(*tensors)
    with pytest.raises(type(eager.value), match=words):
        torch.compile(call, dynamic=dynamic, fullgraph=True)(*tensors)
