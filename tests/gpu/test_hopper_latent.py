"""The Hopper kernel of latent attention, demanded, against the dense formula in fp64."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch

import flexhop
from flexhop import KernelOptions
from flexhop.flash import flash_attn_varlen_func
from tests.budgets import assert_within_budget, dense_attention, evaluate_mask_mod

is_hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not is_hopper, reason="the kernel is for sm_90"),
]


class Call(NamedTuple):
    """Sizes of a call. block: of the mask. splits: as in KernelOptions.

    value: whether it is a view of key's columns that the compiled function makes ("inside"), one
    that its caller makes ("outside"), or a tensor of its own ("apart").
    """

    batch: int = 2
    heads: int = 64
    kv_heads: int = 1
    queries: int = 1
    keys: int = 777
    width: int = 576
    value_width: int = 512
    dtype: torch.dtype = torch.bfloat16
    block: int = 128
    splits: int | None = None
    scale: float = 192**-0.5
    value: str = "inside"


def draw(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """Random query, and keys whose first columns are values."""
    torch.manual_seed(call.keys)
    query = (call.batch, call.heads, call.queries, call.width)
    latent = (call.batch, call.kv_heads, call.keys, call.width)
    return tuple(torch.randn(s, device="cuda", dtype=call.dtype) for s in (query, latent))


def check(call: Call, query, latent, score_mod=None, mask_mod=None) -> Any:
    """Run a call with the kernel demanded, and judge out, lse and max_scores."""
    block_mask = None
    visible = torch.ones(1, 1, dtype=torch.bool, device="cuda")
    if mask_mod is not None:
        sizes = (call.batch, call.heads, call.queries, call.keys)
        visible = evaluate_mask_mod(mask_mod, torch.empty(sizes, device="cuda"))
        block_mask = flexhop.create_block_mask(mask_mod, *sizes, "cuda", BLOCK_SIZE=call.block)
    options = KernelOptions(backend="hopper", splits=call.splits)
    value = latent[..., : call.value_width]
    if call.value == "apart":
        value = torch.randn_like(value)

    def attend(query, latent, value):
        if call.value == "inside":
            value = latent[..., : call.value_width]
        return flexhop.flex_attention(
            query, latent, value, score_mod, block_mask, call.scale,
            enable_gqa=True, return_aux=flexhop.AuxRequest(lse=True, max_scores=True),
            kernel_options=options,
        )  # fmt: skip

    out, aux = torch.compile(attend, fullgraph=True)(query, latent, value)
    gold, reference = (
        dense_attention(*operands, score_mod, visible, call.scale)
        for operands in (
            [tensor.double() for tensor in (query, latent, value)], (query, latent, value),
        )
    )  # fmt: skip
    assert_within_budget(out, gold.out, reference.out, name="out")
    assert_within_budget(aux.lse, gold.lse, reference.lse, name="lse")
    assert_within_budget(aux.max_scores, gold.largest, reference.largest, name="max_scores")
    return out


@pytest.mark.parametrize(
    "call",
    [
        Call(heads=128, keys=5000),
        Call(heads=128, keys=4096, splits=1),
        Call(heads=16, queries=3),
        Call(heads=200, kv_heads=2, keys=64),
        Call(batch=1, heads=5, keys=1),
        Call(batch=1, heads=64, keys=65, splits=7),
        Call(batch=1, heads=16, queries=300, keys=300),
        Call(heads=48, width=544, value_width=512, dtype=torch.float16),
        Call(width=576, value_width=448),
        Call(width=520, value_width=264, keys=130),
        Call(scale=-0.05),
        Call(heads=128, keys=5000, value="outside"),
        Call(heads=128, keys=5000, value="apart"),
        Call(heads=16, queries=3, value="outside", splits=1),
        Call(heads=16, queries=3, value="apart", splits=1),
        Call(batch=1, heads=64, keys=65, splits=7, value="apart"),
        Call(batch=1, heads=96, width=576, value_width=328, keys=1, value="apart"),
        Call(batch=1, heads=16, queries=300, keys=300, dtype=torch.float16, value="apart"),
    ],
    ids=str,
)
def test_sizes(call):
    check(call, *draw(call))


@pytest.mark.parametrize("splits", [1, 5])
@pytest.mark.parametrize("block", [64, 128])
@pytest.mark.parametrize("mask", ["causal", "window", "documents", "nothing", "heads", "late"])
def test_masks(mask, block, splits):
    call = Call(heads=32, queries=40, keys=1000, block=block, splits=splits)
    ids = torch.randint(0, 4, (call.batch, call.keys), device="cuda").sort().values
    masks = {
        "causal": lambda b, h, q_idx, kv_idx: kv_idx <= q_idx + 960,
        "window": lambda b, h, q_idx, kv_idx: (q_idx + 500 - kv_idx).abs() < 150,
        "documents": lambda b, h, q_idx, kv_idx: ids[b, q_idx * 25] == ids[b, kv_idx],
        "nothing": lambda b, h, q_idx, kv_idx: (q_idx % 3 > 0) & (kv_idx < 200),
        "heads": lambda b, h, q_idx, kv_idx: kv_idx % 7 != h % 7,
        "late": lambda b, h, q_idx, kv_idx: kv_idx >= 990,
    }
    out = check(call, *draw(call), mask_mod=masks[mask])
    if mask == "nothing":
        assert not out[:, :, ::3].any()


@pytest.mark.parametrize("score", ["alibi", "softcap", "table", "position"])
def test_score_mods(score):
    call = Call(heads=32, queries=2, keys=900)
    slopes = torch.rand(call.heads, device="cuda")
    table = torch.randn(call.heads, call.keys, device="cuda")
    mods = {
        "alibi": lambda s, b, h, q_idx, kv_idx: s - slopes[h] * (q_idx + 898 - kv_idx),
        "softcap": lambda s, b, h, q_idx, kv_idx: 20 * torch.tanh(s / 20),
        "table": lambda s, b, h, q_idx, kv_idx: s + table[h, kv_idx],
        "position": lambda s, b, h, q_idx, kv_idx: torch.where(kv_idx % 2 == b, s, s * 0.5),
    }
    causal = lambda b, h, q_idx, kv_idx: kv_idx <= q_idx + 898  # noqa: E731
    check(call, *draw(call), score_mod=mods[score], mask_mod=causal)


@pytest.mark.parametrize("layout", ["by position", "part of a cache", "one for a batch"])
def test_layouts(layout):
    """Queries whose heads are neighbours, a part of a longer cache, and one cache for a batch."""
    call = Call(heads=96, queries=2, keys=500, value="outside")
    query, latent = draw(call)
    if layout == "by position":
        query = query.transpose(1, 2).contiguous().transpose(1, 2)
    elif layout == "part of a cache":
        latent = torch.cat([latent, torch.full_like(latent, torch.nan)], 2)[:, :, : call.keys]
    else:
        latent = latent[:1]
    check(call, query, latent)


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("page", [64, 192])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("is_view", [False, True])
def test_pages(is_view, masked, page, splits):
    """Sequences of several lengths, an empty one among them; rows behind the last key are NaN."""
    call = Call(batch=4, heads=32, queries=2, keys=page * 8)
    query, latent = draw(call)
    lengths = [page * 8, 300, 1, 0]
    order = torch.randperm(4 * 8, device="cuda").to(torch.int32)
    pages = torch.empty(4 * 8, 1, page, call.width, device="cuda", dtype=call.dtype)
    pages[order.long()] = latent.reshape(-1, 1, page, call.width)
    table = order.reshape(4, 8)
    for b, length in enumerate(lengths):
        for i in range(8):
            pages[table[b, i].long(), :, max(0, length - i * page) :] = torch.nan
    count = torch.tensor(lengths, device="cuda", dtype=torch.int32)
    mask_mod = (lambda b, h, q_idx, kv_idx: (kv_idx + q_idx) % 5 > 0) if masked else None
    block_mask = mask_mod and flexhop.create_block_mask(
        mask_mod, None, None, call.queries, call.keys, "cuda"
    )
    attend = torch.compile(
        lambda q, kv, v, pages, lengths: flexhop.flex_attention(
            q, kv, kv[..., :512] if is_view else v, None, block_mask, call.scale, enable_gqa=True,
            page_table=flexhop.PageTable(pages, page, lengths),
            return_aux=flexhop.AuxRequest(lse=True),
            kernel_options=KernelOptions(backend="hopper", splits=splits),
        ),
        fullgraph=True,
    )  # fmt: skip
    out, aux = attend(query, pages, pages[..., :512].clone(), table, count)
    index = torch.arange(call.keys, device="cuda")
    visible = (index < count[:, None])[:, None, None]
    if mask_mod is not None:
        q_idx = torch.arange(call.queries, device="cuda")[:, None]
        visible = visible & mask_mod(0, 0, q_idx, index)
    gold, reference = (
        dense_attention(q, k, k[..., :512], None, visible, call.scale)
        for q, k in ((query.double(), latent.double()), (query, latent))
    )
    assert_within_budget(out, gold.out, reference.out, name="out")
    assert_within_budget(aux.lse, gold.lse, reference.lse, name="lse")


def test_packed_sequences():
    """Masks as ranges of keys, with a sequence that has no keys and one with more queries."""
    queries, keys = (0, 130, 135, 300), (0, 200, 200, 420)
    query = torch.randn(queries[-1], 16, 576, device="cuda", dtype=torch.bfloat16)
    latent = torch.randn(keys[-1], 1, 576, device="cuda", dtype=torch.bfloat16)
    cu_q, cu_k = (torch.tensor(c, device="cuda", dtype=torch.int32) for c in (queries, keys))
    call = torch.compile(
        lambda q, kv: flash_attn_varlen_func(
            q, kv, kv[..., :512], cu_q, cu_k, 165, 220, causal=True, softmax_scale=0.05
        ),
        fullgraph=True,
    )
    out = call(query, latent)
    for q_from, q_to, k_from, k_to in zip(queries, queries[1:], keys, keys[1:], strict=False):
        q = query[None, q_from:q_to].transpose(1, 2)
        k = latent[None, k_from:k_to].transpose(1, 2)
        q_idx = torch.arange(q.size(2), device="cuda")[:, None]
        visible = torch.arange(k.size(2), device="cuda") <= q_idx + k.size(2) - q.size(2)
        if k.size(2) == 0:
            assert not out[q_from:q_to].any()
            continue
        gold, reference = (
            dense_attention(a, b, b[..., :512], None, visible, 0.05).out
            for a, b in ((q.double(), k.double()), (q, k))
        )
        found = out[None, q_from:q_to].transpose(1, 2)
        assert_within_budget(found, gold, reference, name="out")


def test_a_growing_cache():
    attend = torch.compile(
        lambda q, kv: flexhop.flex_attention(
            q, kv, kv[..., :512], enable_gqa=True, kernel_options={"backend": "hopper"}
        ),
        fullgraph=True, dynamic=True,
    )  # fmt: skip
    visible = torch.ones(1, 1, dtype=torch.bool, device="cuda")
    for keys in (100, 101, 1000, 3333):
        query, latent = draw(Call(keys=keys))
        gold, reference = (
            dense_attention(q, k, k[..., :512], None, visible, 576**-0.5).out
            for q, k in ((query.double(), latent.double()), (query, latent))
        )
        assert_within_budget(attend(query, latent), gold, reference, name="out")


def test_results_repeat():
    query, latent = draw(Call(heads=128, keys=3000))
    attend = torch.compile(
        lambda q, kv: flexhop.flex_attention(q, kv, kv[..., :512], enable_gqa=True)
    )
    first = attend(query, latent)
    assert all(torch.equal(first, attend(query, latent)) for _ in range(20))
