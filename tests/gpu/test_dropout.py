"""Dropout and repeatable gradients on a GPU: the mask of the kernels, graphs, repetition."""

from __future__ import annotations

import math

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import flexhop
from flexhop.masks import causal
from tests.budgets import assert_within_budget
from tests.cuda_graphs import capture
from tests.dropout_cases import differentiate, double, dropped_attention

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore::flexhop.errors.EagerWarning"),
]

P = 0.2
DTYPES = [torch.bfloat16, torch.float32]


def operands(dtype=torch.bfloat16, length=500, width=64, heads=(4, 2)):
    generator = torch.Generator("cuda").manual_seed(0)
    sizes = ((2, heads[0], length, width), *[(2, heads[1], length, width)] * 2)
    return tuple(
        torch.randn(size, generator=generator, device="cuda").to(dtype).requires_grad_()
        for size in sizes
    )


@pytest.fixture(scope="module")
def mask():
    return flexhop.create_block_mask(causal, None, None, 500, 500, "cuda")


@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("dtype", DTYPES)
def test_results_and_gradients_follow_from_the_mask(dtype, width, mask):
    leaves, seed = operands(dtype, width=width), flexhop.dropout_seed("cuda")
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")

    def call(query, key, value):
        out, aux = flexhop.flex_attention(
            query, key, value, block_mask=mask, enable_gqa=True, dropout_p=P, dropout_seed=seed,
            return_aux=flexhop.AuxRequest(lse=True),
        )  # fmt: skip
        return out, aux.lse

    kept = flexhop.dropout_mask(seed, P, (2, 4, 500, 500))
    visible = torch.ones(500, 500, dtype=torch.bool, device="cuda").tril()
    found = torch.compile(call, fullgraph=True)(*leaves)
    grad = torch.randn_like(found[0])
    runs = [differentiate(found, leaves, grad)]
    for copies in (double(leaves), tuple(t.detach().requires_grad_() for t in leaves)):
        runs.append(
            differentiate(dropped_attention(copies, kept, P, visible=visible), copies, grad)
        )
    torch.set_float32_matmul_precision(before)
    for name, actual, gold, reference in zip(
        ("out", "lse", "query", "key", "value"),
        *((run.out, run.lse, *run.grads) for run in runs), strict=True,
    ):  # fmt: skip
        assert_within_budget(actual, gold, reference, name=name)


@pytest.mark.parametrize("queries", [1, 4])
def test_decode_keeps_what_the_mask_says(queries):
    keys = 512
    query = torch.zeros(2, 8, queries, 64, device="cuda")
    key = torch.zeros(2, 2, keys, 64, device="cuda")
    value = torch.eye(keys, device="cuda").expand(2, 2, keys, keys).contiguous()
    seed = flexhop.dropout_seed("cuda")
    call = torch.compile(flexhop.flex_attention, fullgraph=True)
    out = call(query, key, value, enable_gqa=True, dropout_p=P, dropout_seed=seed)
    expected = flexhop.dropout_mask(seed, P, (2, 8, queries, keys)).float()
    torch.testing.assert_close(out * keys * (1 - P), expected, atol=1e-4, rtol=0)


def test_manual_seed_and_checkpointing():
    query, key, value = operands(torch.float32)

    def layer(value):
        return flexhop.flex_attention(
            query.detach(), key.detach(), value, enable_gqa=True, dropout_p=P
        )

    for model in (layer, lambda v: checkpoint(layer, v, use_reentrant=False)):
        call = torch.compile(model, fullgraph=True)
        outs = []
        for _ in range(2):
            torch.manual_seed(3)
            out = call(value)
            # out is linear in value: its sum is value's product with the gradient.
            (grad,) = torch.autograd.grad(out.sum(), value)
            total = (grad.double() * value.double()).sum()
            assert abs(total - out.double().sum()) < 1e-4 * out.double().abs().sum()
            outs.append(out)
        assert torch.equal(*outs)
        assert not torch.equal(outs[0], call(value))


def test_each_replay_of_a_graph_has_its_mask_forward_and_backward():
    query, key, value = operands(torch.float32)
    call = torch.compile(
        lambda v: flexhop.flex_attention(
            query.detach(), key.detach(), v, enable_gqa=True, dropout_p=P
        ),
        fullgraph=True,
    )

    def step():
        out = call(value)
        return out, *torch.autograd.grad(out.sum(), value)

    graph, (out, grad) = capture(step)
    seen = []
    for _ in range(3):
        graph.replay()
        torch.cuda.synchronize()
        total = (grad.double() * value.double()).sum()
        assert abs(total - out.double().sum()) < 1e-4 * out.double().abs().sum()
        seen.append(out.clone())
    assert not torch.equal(seen[0], seen[1])
    assert not torch.equal(seen[1], seen[2])


def test_the_rate_of_long_sequences():
    query, key, _ = operands(length=2048, heads=(4, 4))
    value = torch.ones(2, 4, 2048, 64, device="cuda", dtype=torch.bfloat16)
    call = torch.compile(flexhop.flex_attention, fullgraph=True)
    # Equal weights: each output is the share of the weights that are kept.
    out = call(query.detach() * 0, key.detach(), value, dropout_p=P)[..., 0].float() * (1 - P)
    deviation = math.sqrt(P * (1 - P) / 2048)
    assert abs(out.mean() - (1 - P)) < 1e-3
    assert abs(out.std() / deviation - 1) < 0.1


MODS = {
    "head": ((4,), lambda t: lambda score, b, h, q, k: score + t[h] * (k - q)),
    "distance": ((4, 1000), lambda t: lambda score, b, h, q, k: score + t[h, q - k + 499]),
    "bucket": ((7,), lambda t: lambda score, b, h, q, k: score * t[(q * 5 + k) % 7]),
    "key": ((2, 500), lambda t: lambda score, b, h, q, k: score + t[b, k]),
}


@pytest.mark.parametrize("dropout_p", [0.0, P])
@pytest.mark.parametrize("name", MODS)
def test_every_gradient_repeats_bit_by_bit(name, dropout_p, mask):
    size, make_mod = MODS[name]
    leaves = (*operands(), torch.randn(size, device="cuda", requires_grad=True))
    seed = flexhop.dropout_seed("cuda")

    def call(query, key, value, table):
        return flexhop.flex_attention(
            query, key, value, make_mod(table), mask, enable_gqa=True, dropout_p=dropout_p,
            dropout_seed=seed,
        )  # fmt: skip

    torch.use_deterministic_algorithms(True)
    try:
        run = torch.compile(call, fullgraph=True)
        first, *others = (
            torch.autograd.grad(run(*leaves).square().sum(), leaves) for _ in range(20)
        )
        for other in others:
            assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))
    finally:
        torch.use_deterministic_algorithms(False)
    free = torch.autograd.grad(torch.compile(call)(*leaves).square().sum(), leaves)
    # The same numbers, added up in another way.
    assert (first[3] - free[3]).norm() <= 1e-4 * free[3].norm()
