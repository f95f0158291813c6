"""Biases of pairs on a GPU: copied tiles, gradients that are stored or summed, orders of programs.

pytest tests/gpu/test_pair_rows.py -q -n 8
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import flexhop
from flexhop.masks import causal
from flexhop.options import KernelOptions
from tests.budgets import (
    Formula,
    assert_within_budget,
    dense_attention,
    dense_backward,
    kernel_formulas,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
NAMES = ("out", "query", "key", "value", "bias")
# By name: size of the bias, and the score_mod.
KINDS: dict[str, tuple[Any, Any]] = {
    "scores": (lambda b, h, m, n: (b, h, m, n), lambda t: lambda s, b, h, q, k: s + t[b, h, q, k]),
    "heads": (lambda b, h, m, n: (h, m, n), lambda t: lambda s, b, h, q, k: 1.5 * s - t[h, q, k]),
    "batches": (
        lambda b, h, m, n: (b, 1, m, n), lambda t: lambda s, b, h, q, k: s + t[b, 0, q, k] * 0.5,
    ),
    "all": (lambda b, h, m, n: (m + 3, n + 8), lambda t: lambda s, b, h, q, k: s + t[q, k].tanh()),
}  # fmt: skip


def check(
    kind: str, shape: tuple[int, ...], width: int, *, dtype: torch.dtype = torch.bfloat16,
    is_causal: bool = False, learned: bool = True, backend: str = "auto",
) -> None:  # fmt: skip
    """Results and gradients of one problem, [B, Hq, Hkv, M, N], against fp64, by batches."""
    batch, heads, kv_heads, queries, keys = shape
    size_of, make = KINDS[kind]
    sizes = [(batch, heads, queries, width), *[(batch, kv_heads, keys, width)] * 2]
    leaves = [torch.randn(size, device="cuda", dtype=torch.bfloat16) for size in sizes]
    leaves.append(torch.randn(size_of(batch, heads, queries, keys), device="cuda").to(dtype))
    grad_out = torch.randn(sizes[0], device="cuda", dtype=torch.bfloat16)
    wanted = leaves if learned else leaves[:3]
    for leaf in wanted:
        leaf.requires_grad_()
    mask = flexhop.create_block_mask(causal, None, None, queries, keys, "cuda")

    @torch.compile(fullgraph=True)
    def call(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Any:
        return flexhop.flex_attention(
            q, k, v, make(bias), mask if is_causal else None, enable_gqa=True,
            kernel_options=KernelOptions(backend=backend),
        )  # fmt: skip

    out = call(*leaves)
    found = [out, *torch.autograd.grad(out, wanted, grad_out)]
    seen = torch.ones(queries, keys, dtype=torch.bool, device="cuda")
    seen = seen.tril() if is_causal else seen
    gold = _dense(make, leaves, wanted, grad_out, seen, torch.float64)
    # Rows of few keys: where delta's terms cancel, one formula can be nearly exact by luck.
    formulas: list[Formula] = ["plain", *kernel_formulas(torch.bfloat16, truncates=False)]
    rounded = [
        _dense(make, leaves, wanted, grad_out, seen, torch.bfloat16, formula)
        for formula in formulas
    ]
    for name, result, exact, *references in zip(NAMES, found, gold, *rounded, strict=False):
        references = [reference.to(result.dtype) for reference in references]
        assert_within_budget(result, exact, *references, name=name, captured=name == "bias")


def _dense(
    make: Any, leaves: list[Tensor], wanted: list[Tensor], grad_out: Tensor, seen: Tensor,
    dtype: torch.dtype, formula: Formula = "plain",
) -> list[Tensor]:  # fmt: skip
    """The same in one dtype; the bias in fp64, or as it is."""
    mine = [leaf.detach().to(dtype) for leaf in leaves[:3]]
    bias = leaves[3].detach()
    mine.append(bias.to(dtype) if dtype == torch.float64 else bias.clone())
    for leaf in mine[: len(wanted)]:
        leaf.requires_grad_()
    scale = leaves[0].size(3) ** -0.5
    dense = dense_attention(*mine[:3], make(mine[3]), seen, scale, formula=formula)
    dense_backward(dense, grad_out.to(dtype), None)
    return [dense.out, *(leaf.grad for leaf in mine[: len(wanted)])]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", [32, 64, 80, 128, 192, 256])
@pytest.mark.parametrize("is_causal", [False, True])
def test_kinds(kind, width, is_causal):
    torch.manual_seed(width)
    check(kind, (2, 4, 2, 392, 520), width, is_causal=is_causal)


@pytest.mark.parametrize("kind", ["scores", "heads"])
@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("length", [77, 1000, 1003])
def test_lengths(kind, learned, length):
    torch.manual_seed(length)
    check(kind, (3, 2, 2, length, length), 64, learned=learned)


@pytest.mark.parametrize("kind", ["scores", "heads"])
@pytest.mark.parametrize("width", [64, 128, 192, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_dtypes(kind, width, dtype):
    torch.manual_seed(width)
    check(kind, (2, 4, 4, 640, 512), width, dtype=dtype)


@pytest.mark.parametrize("backend", ["auto", "triton"])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("learned", [False, True])
def test_batches_of_a_head_together(backend, is_causal, learned):
    """The bias is larger than half of an H200's L2 cache."""
    torch.manual_seed(0)
    shape = (3, 4, 4, 2048, 2048) if learned else (3, 8, 8, 2048, 2048)
    check("heads", shape, 64, is_causal=is_causal, learned=learned, backend=backend)
