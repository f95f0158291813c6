"""Trained functions of the distance: kernels read tables of them, and sum by distance."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import flexhop
from flexhop.offline.interpret import interpret
from flexhop.offline.memory import Memory

HEADS, LENGTH, BATCH = 2, 80, 3


def behind(s, b, h, q, k, scales, rates):
    """NaN for keys behind a query, which a mask hides."""
    return s - scales[h, 0] * torch.log(1.0 + rates[h, 0] * (q - k))


def power(s, b, h, q, k, scales, rates):
    return s - scales[h, 0] * (q - k) ** rates[h, 0]


def decays(s, b, h, q, k, scales, rates):
    return s + (scales[h] * torch.exp(-0.1 * rates[h] * (q - k).abs())).sum()


def bumps(s, b, h, q, k, scales, rates):
    return s + (scales[0] * torch.exp(-(((q - k) * 0.1 - rates[1]) ** 2))).sum()


def factor(s, b, h, q, k, scales, rates):
    return s * torch.exp(-0.01 * rates[h, 0] * (q - k).abs()) - torch.sin(scales[h, 1] * (q - k))


MODS: list[Callable[..., Tensor]] = [behind, power, decays, bumps, factor]


def operands() -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    dense = [torch.randn(BATCH, HEADS, LENGTH, 16, generator=generator) for _ in range(3)]
    return [*dense, *(torch.rand(HEADS, 4, generator=generator) + 0.2 for _ in range(2))]


def expected(mod: Callable[..., Tensor]) -> list[Tensor]:
    """The result and the gradients, in fp64; of a hidden score, the mod sees none."""
    q, k, v, *learned = leaves = [x.double().requires_grad_() for x in operands()]
    sizes = (BATCH, HEADS, LENGTH, LENGTH)
    index = torch.meshgrid(*map(torch.arange, sizes), indexing="ij")
    seen = index[2] >= index[3]
    of_one = lambda s, *index: mod(s, *index, *learned)  # noqa: E731
    scores = torch.full(sizes, -torch.inf, dtype=torch.float64)
    made = torch.vmap(of_one)((q @ k.mT * 0.25)[seen], *(i[seen] for i in index))
    out = scores.masked_scatter(seen, made).softmax(-1) @ v
    return [out, *torch.autograd.grad(out.square().sum(), leaves)]


@pytest.mark.parametrize(
    ("mod", "is_deterministic"), [*((mod, False) for mod in MODS), (behind, True), (decays, True)]
)
def test_gradients_through_tables(mod: Any, is_deterministic: bool, monkeypatch):
    monkeypatch.setenv("FLEXHOP_STRICT", "1")
    leaves = [x.requires_grad_() for x in operands()]
    causal = lambda b, h, q, k: q >= k  # noqa: E731
    mask = flexhop.create_block_mask(causal, None, None, LENGTH, LENGTH, "cpu", BLOCK_SIZE=16)

    def call(q, k, v, scales, rates):
        score_mod = lambda *scores: mod(*scores, scales, rates)  # noqa: E731
        return flexhop.flex_attention(q, k, v, score_mod, mask)

    torch.use_deterministic_algorithms(is_deterministic)
    try:
        found = interpret(
            call, *leaves, grad=lambda out: out.square().sum(),
            memory=Memory(poison=True, check_bounds=True),
        )  # fmt: skip
    finally:
        torch.use_deterministic_algorithms(False)
    for made, wanted in zip([found.result, *(x.grad for x in leaves)], expected(mod), strict=True):
        size = float(wanted.detach().abs().max())
        torch.testing.assert_close(made.double(), wanted, rtol=1e-5, atol=4e-6 * size)
