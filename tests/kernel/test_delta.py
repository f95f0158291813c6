"""Gradients where they cancel: delta counts the gradient of out as kernels read it."""

import pytest
import torch

import flexhop
from flexhop.offline.interpret import interpret

pytestmark = pytest.mark.filterwarnings("ignore::flexhop.errors.EagerWarning")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_key_that_is_seen_alone(dtype):
    """One weight of 1: the score has no gradient, whatever is fused into the backward pass."""
    generator = torch.Generator().manual_seed(0)
    query, key, value, factor = (
        torch.randn(1, 1, 37, 16, generator=generator).to(dtype) for _ in range(4)
    )
    leaves = [t.requires_grad_() for t in (query, key, value)]
    mask = flexhop.create_block_mask(lambda b, h, q, k: q == k, None, None, 37, 37, "cpu")

    def call(query, key, value):
        out = flexhop.flex_attention(query, key, value, block_mask=mask)
        return (out.float() * 0.731).to(dtype) * factor  # the gradient of out is computed, too

    interpret(call, *leaves, grad=True)
    assert query.grad is not None and key.grad is not None
    assert max(query.grad.abs().max(), key.grad.abs().max()) < 1e-5
