"""Kernels of mods of many steps, in which each step uses the value before it several times."""

import pytest
import torch

import flexhop
from flexhop.offline.interpret import interpret
from tests.unit.analysis.test_long_mods import SHARED, repeated

EDGES = torch.arange(40.0) * 3


def score_mod(score, b, h, q_idx, kv_idx):
    """A chain of scores, one of distances, and a search among pairs."""
    score = repeated(lambda x: torch.where(x > 0, x * 0.9 + 0.1, x * 0.5), score)
    distance = repeated(lambda x: torch.where(x > 5, x - 2, x + 1), q_idx - kv_idx)
    bucket = torch.bucketize((q_idx * kv_idx).float(), EDGES)
    return score + distance * 0.01 + bucket * 0.02


@pytest.mark.filterwarnings("ignore::flexhop.errors.EagerWarning")
def test_long_mods_in_kernels():
    """Forward and backward; a kernel whose text grew with the paths would never be written."""
    torch.manual_seed(0)
    q, k, v, grad = torch.randn(4, 1, 2, 33, 16).unbind()
    inputs = [x.requires_grad_() for x in (q, k, v)]
    mask = flexhop.create_block_mask(SHARED["not"], None, None, 33, 33, "cpu")

    options = flexhop.KernelOptions(backend="triton")

    def call(q, k, v):
        return flexhop.flex_attention(q, k, v, score_mod, mask, kernel_options=options)

    expected = call(*inputs)
    expected_grads = torch.autograd.grad((expected * grad).sum(), inputs)
    found = interpret(call, *inputs, grad=lambda out: (out * grad).sum())
    torch.testing.assert_close(found.result, expected, rtol=1e-4, atol=1e-5)
    grads = [x.grad for x in inputs]
    torch.testing.assert_close(grads, list(expected_grads), rtol=1e-4, atol=1e-4)
