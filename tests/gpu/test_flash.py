"""The functions of flash-attn on a GPU, forward and backward, against the dense formula."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from flexhop import flash
from tests.budgets import assert_within_budget, dense_attention
from tests.flash_cases import CASES, Case
from tests.packed_dense import between, distances, judge, sequence_and_place
from tests.varlen_cases import offsets

pytestmark = pytest.mark.gpu

LENGTHS = {"long_keys": ((37,) * 2, (150,) * 2), "long_queries": ((300,) * 3, (140,) * 3)}
RAGGED = ((5, 0, 130, 1, 64), (7, 3, 100, 20, 90))


def limit(reach: int) -> int | None:
    return None if reach < 0 else reach


def make_leaves(case: Case, queries: int, keys: int, width: int) -> dict[str, torch.Tensor]:
    """Packed query, key and value, leaves in bfloat16."""
    sizes = ((queries, case.heads), (keys, case.kv_heads), (keys, case.kv_heads))
    tensors = [
        torch.randn(*size, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for size in sizes
    ]
    return dict(zip(("query", "key", "value"), tensors, strict=True))


def score_of(case: Case, queries, keys, slopes):
    """Soft-cap and slopes in packed positions."""
    if not case.softcap and slopes is None:
        return None
    ahead, _ = distances(queries, keys, sum(queries), "cuda", keys)
    sequence, _ = sequence_and_place(queries, sum(queries), "cuda")

    def score(s, b, h, q, k):
        if case.softcap:
            s = case.softcap * torch.tanh(s / case.softcap)
        if slopes is not None:
            slope = slopes[h] if slopes.dim() == 1 else slopes[sequence[q], h]
            s = s - slope * ahead[q, k].abs()
        return s

    return score


def check(case: Case, lengths, width: int, call) -> None:
    """Judge out, lse and gradients of call(leaves, slopes), all packed."""
    queries, keys = lengths
    leaves = make_leaves(case, sum(queries), sum(keys), width)
    slopes = case.make_slopes(len(queries), "cuda", torch.float32)
    out, lse = torch.compile(call, fullgraph=True)(*leaves.values(), slopes)
    grad = torch.randn_like(out)
    (out * grad).sum().backward()
    ahead, same = distances(queries, keys, sum(queries), "cuda", keys)
    left, right = map(limit, case.window)
    visible = between(ahead, same, left, 0 if case.causal else right)
    found = {"out": out, "lse": lse} | {name: leaf.grad for name, leaf in leaves.items()}
    scale = width**-0.5 if case.scale is None else case.scale
    judge(found, leaves, visible, lambda _: score_of(case, queries, keys, slopes), grad, scale)


@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("size", LENGTHS)
@pytest.mark.parametrize("name", CASES)
def test_dense(name, size, width):
    case, lengths = CASES[name], LENGTHS[size]

    def call(q, k, v, slopes):
        batch = len(lengths[0])
        out, lse, _ = flash.flash_attn_func(
            *(t.unflatten(0, (batch, -1)) for t in (q, k, v)), **case.options,
            alibi_slopes=slopes, return_attn_probs=True,
        )  # fmt: skip
        return out.flatten(0, 1), lse.transpose(1, 2).flatten(0, 1)

    check(case, lengths, width, call)


@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("name", CASES)
def test_sequences(name, width):
    case = CASES[name]
    cuts = [offsets(lengths, "cuda") for lengths in RAGGED]

    def call(q, k, v, slopes):
        out, lse, _ = flash.flash_attn_varlen_func(
            q, k, v, *cuts, max(RAGGED[0]), max(RAGGED[1]), **case.options,
            alibi_slopes=slopes, return_attn_probs=True,
        )  # fmt: skip
        return out, lse.mT

    check(case, RAGGED, width, call)


def test_one_tensor_for_all_three():
    case, lengths = dataclasses.replace(CASES["causal"]), ((256, 256), (256, 256))

    def call(q, k, v, slopes):
        packed = torch.stack([t.unflatten(0, (2, -1)) for t in (q, k, v)], 2)
        out, lse, _ = flash.flash_attn_qkvpacked_func(
            packed, **case.options, return_attn_probs=True
        )
        return out.flatten(0, 1), lse.transpose(1, 2).flatten(0, 1)

    check(case, lengths, 64, call)


@pytest.mark.parametrize("queries", [1, 4, 140])
@pytest.mark.parametrize("name", ["plain", "causal", "left"])
def test_a_cache(name, queries):
    """New keys are appended in place, then queries see what the cache holds."""
    case = CASES[name]
    before = torch.tensor([7, 130, 290], device="cuda", dtype=torch.int32)
    shapes = ((queries, case.heads), (512, case.kv_heads), (queries, case.kv_heads))
    q, cache_k, new_k = (
        torch.randn(3, *shape, 64, device="cuda", dtype=torch.bfloat16) for shape in shapes
    )
    cache_v, new_v = torch.randn_like(cache_k), torch.randn_like(new_k)
    call = torch.compile(
        lambda *tensors: flash.flash_attn_with_kvcache(
            *tensors, cache_seqlens=before, causal=case.causal, window_size=case.window
        )
    )
    with torch.no_grad():
        out = call(q, cache_k, cache_v, new_k, new_v)
    for number, held in enumerate(before.tolist()):
        count = held + queries
        key, value = cache_k[number, :count], cache_v[number, :count]
        assert torch.equal(key[held:], new_k[number])
        ahead, same = distances((queries,), (count,), queries, "cuda", (count,))
        left, right = map(limit, case.window)
        visible = between(ahead, same, left, 0 if case.causal else right)
        operands = [t.transpose(0, 1)[None] for t in (q[number], key, value)]
        gold, reference = (
            dense_attention(*(t.to(dtype) for t in operands), None, visible, 64**-0.5).out
            for dtype in (torch.float64, torch.bfloat16)
        )
        actual = out[number].transpose(0, 1)[None]
        assert_within_budget(actual, gold, reference, name=f"sequence {number}")
