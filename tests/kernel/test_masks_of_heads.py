"""Masks that heads do not share, as tables by distance: kernels read them in place of asking."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import flexhop
from flexhop.offline.interpret import interpret
from flexhop.offline.memory import Memory

HEADS, LENGTH = 3, 80
WIDTHS = torch.tensor([3, 9, 20])


def dilated(b, h, q, k):
    """Arithmetic alone, of no captured tensor."""
    return (q >= k) & ((q - k) % (h + 2) == 0)


def powers(b, h, q, k):
    return (((q - k) & (q - k - 1)) == 0) | ((q - k).abs() < WIDTHS[h])


def chosen(b, h, q, k):
    """A distance alone, and the head with a key."""
    return torch.isin(q - k, WIDTHS) | (h == k % HEADS) | (q == k)


def attend(mask: Any) -> Any:
    blocks = flexhop.create_block_mask(mask, None, HEADS, LENGTH, LENGTH, "cpu", BLOCK_SIZE=16)
    return lambda q, k, v: flexhop.flex_attention(q, k, v, block_mask=blocks)


@pytest.mark.filterwarnings("ignore::flexhop.errors.EagerWarning")
@pytest.mark.parametrize("mask", [dilated, powers, chosen])
def test_masks_of_heads(mask: Any, monkeypatch):
    monkeypatch.setenv("FLEXHOP_STRICT", "1")
    generator = torch.Generator().manual_seed(5)
    operands = [torch.randn(3, HEADS, LENGTH, 16, generator=generator).half() for _ in range(3)]
    exact = [x.double().requires_grad_() for x in operands]
    wanted = attend(mask)(*exact)
    grads = torch.autograd.grad(wanted.square().sum(), exact)
    leaves = [x.requires_grad_() for x in operands]
    found = interpret(
        attend(mask), *leaves, grad=lambda out: out.float().square().sum(),
        memory=Memory(poison=True, check_bounds=True), capability=(9, 0),
    )  # fmt: skip
    forward = found.templates[0].source
    question = forward[forward.index("def mask_mod") :]
    question = question[: question.index("return")]
    assert question.count("tl.load") == 1
    assert "%" not in question or mask is chosen
    for made, exactly in zip(
        [found.result, *(x.grad for x in leaves)], (wanted, *grads), strict=True
    ):
        torch.testing.assert_close(made.double(), exactly.detach(), rtol=4e-3, atol=4e-3)
