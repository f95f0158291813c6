"""Compiled score_mods with a torch.autograd.Function that brings its own backward, on a GPU.

pytest tests/gpu/test_own_backward.py -q -n 8
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import flexhop
from flexhop.masks import causal
from tests.budgets import assert_within_budget, dense_attention, dense_backward
from tests.own_backwards import Tanh

pytestmark = pytest.mark.gpu
HEADS = 4


class Bounded(torch.autograd.Function):
    """A clamp whose gradient passes straight through."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x, bound):
        return torch.minimum(x, bound)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, grad):
        return grad, 0.25 * grad


MODS: dict[str, Callable[[Tensor], Any]] = {
    "softcap": lambda t: lambda s, b, h, q, k: 20 * Tanh.apply(s / 20),
    "straight_through": lambda t: lambda s, b, h, q, k: Bounded.apply(s, t[h, 0]),
    "of_learned_keys": lambda t: lambda s, b, h, q, k: s + Tanh.apply(t[h, k]),
    "by_distance": lambda t: lambda s, b, h, q, k: Tanh.apply(s) - 0.05 * (q - k).abs(),
}
LEARNED = ("straight_through", "of_learned_keys")


def operands(length: int, width: int) -> list[Tensor]:
    """Query, key, value, what the mods learn, and the gradient of the output."""
    generator = torch.Generator("cuda").manual_seed(width + length)
    made = [
        torch.randn(2, heads, length, width, generator=generator, device="cuda").bfloat16()
        for heads in (HEADS, 2, 2, HEADS)
    ]
    learned = torch.randn(HEADS, length, generator=generator, device="cuda")
    return [t.requires_grad_() for t in (*made[:3], learned)] + made[3:]


def expected(dtype: torch.dtype, name: str, tensors: list[Tensor]) -> dict[str, Tensor]:
    """Plain attention and its gradients, with query, key and value in `dtype`."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    leaves = [t.detach().to(dtype).requires_grad_() for t in tensors[:3]]
    learned = tensors[3].detach().to(wide).requires_grad_()
    length, width = tensors[0].shape[2:]
    place = torch.arange(length, device="cuda")
    visible = place[:, None] >= place
    dense = dense_attention(*leaves, MODS[name](learned), visible, width**-0.5)
    dense_backward(dense, tensors[4].to(dtype), None)
    grads = {n: t.grad for n, t in zip("qkv", leaves, strict=True)}
    if name in LEARNED:
        grads["learned"] = learned.grad
    return {"out": dense.out, **grads}  # type: ignore[dict-item]


@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("length", [1024, 499])
@pytest.mark.parametrize("name", MODS)
def test_gradients_are_those_of_its_backward(name, length, width):
    tensors = operands(length, width)
    score_mod = MODS[name](tensors[3])
    mask = flexhop.create_block_mask(causal, None, None, length, length, "cuda")

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return flexhop.flex_attention(query, key, value, score_mod, mask, enable_gqa=True)

    out = torch.compile(attend, fullgraph=True)(*tensors[:3])
    leaves = tensors[: 4 if name in LEARNED else 3]
    grads = torch.autograd.grad(out, leaves, tensors[4])
    found = dict(zip(("out", "q", "k", "v", "learned"), (out.detach(), *grads), strict=False))
    gold, reference = (expected(dtype, name, tensors) for dtype in (torch.float64, torch.bfloat16))
    assert found.keys() == gold.keys()
    for part, actual in found.items():
        assert_within_budget(actual, gold[part], reference[part], name=part)
