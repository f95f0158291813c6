"""Sliding windows, which Hopper's kernels know as two numbers per query, on a GPU.

pytest tests/gpu -q -n 8
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import flexhop
from flexhop.options import KernelOptions
from tests.budgets import assert_within_budget, dense_attention, dense_backward

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="needs a Hopper GPU",
    ),
]
HOPPER = KernelOptions(backend="hopper")
BANDS = {
    "causal": lambda b, h, q, k: (q >= k) & (q - k < 200),
    "both_directions": lambda b, h, q, k: (q - k).abs() <= 70,
    "behind": lambda b, h, q, k: (k >= q + 30) & (k < q + 333),  # the last queries see nothing
    "narrow": lambda b, h, q, k: (k > q - 3) & (k <= q),
}


def operands(width: int, length: int, kv_heads: int) -> list[Tensor]:
    """Query, key, value and the gradient of the output; two batches of four heads."""
    generator = torch.Generator("cuda").manual_seed(width + length)
    sizes = [(2, heads, length, width) for heads in (4, kv_heads, kv_heads, 4)]
    made = [torch.randn(size, generator=generator, device="cuda").bfloat16() for size in sizes]
    return [t.requires_grad_() for t in made[:3]] + made[3:]


def results(mask: Any, score: Any, tensors: list[Tensor]) -> dict[str, Tensor]:
    """What the compiled kernels give, forward and backward."""

    def call(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return flexhop.flex_attention(
            query, key, value, score, mask, enable_gqa=True, kernel_options=HOPPER
        )

    out = torch.compile(call, fullgraph=True)(*tensors[:3])
    grads = torch.autograd.grad(out, tensors[:3], tensors[3])
    return dict(zip(("out", "q", "k", "v"), (out.detach(), *grads), strict=True))


def expected(
    dtype: torch.dtype, score: Any, visible: Tensor, tensors: list[Tensor]
) -> dict[str, Tensor]:
    leaves = [t.detach().to(dtype).requires_grad_() for t in tensors[:3]]
    dense = dense_attention(*leaves, score, visible, tensors[0].size(-1) ** -0.5)
    dense_backward(dense, tensors[3].to(dtype), None)
    return {"out": dense.out, **{n: t.grad for n, t in zip("qkv", leaves, strict=True)}}  # type: ignore[dict-item]


def check(mod: Any, length: int, width: int, score: Any = None, kv_heads: int = 4) -> None:
    """Every result against fp64, in units of the error of plain PyTorch."""
    tensors = operands(width, length, kv_heads)
    mask = flexhop.create_block_mask(mod, None, None, length, length, "cuda")
    found = results(mask, score, tensors)
    place = torch.arange(length, device="cuda")
    visible = mod(0, 0, place[:, None], place)
    gold, reference = (
        expected(dtype, score, visible, tensors) for dtype in (torch.float64, torch.bfloat16)
    )
    for name, actual in found.items():
        assert_within_budget(actual, gold[name], reference[name], name=name)


@pytest.mark.parametrize("width", [64, 128, 256])
@pytest.mark.parametrize("length", [1024, 1000])
@pytest.mark.parametrize("name", BANDS)
def test_windows(name, length, width):
    check(BANDS[name], length, width)


@pytest.mark.parametrize("width", [64, 128])
def test_heads_that_share_keys(width):
    check(BANDS["causal"], 900, width, kv_heads=2)


@pytest.mark.parametrize("bend", [False, True])
def test_a_line_over_keys_beside_it(bend):
    def alibi(score, b, h, q, k):
        distance = k - q
        return score - 0.05 * (h + 1) * (distance.abs() if bend else -distance)

    check(BANDS["both_directions"], 1000, 128, alibi)
