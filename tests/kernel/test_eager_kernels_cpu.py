"""Kernels from eager code that Inductor compiled, on the CPU."""

import torch
from torch._dynamo.utils import counters

from flexhop import eager_kernels, flex_attention
from tests.unit.ops.support import causal_mask, operands, quiet

pytestmark = quiet


def attend(query, key, value, table):
    mask = causal_mask(query.size(2))
    return flex_attention(query, key, value, lambda s, b, h, q, k: s + table[h] * s, mask)


def orders(*x):
    """Result, gradients, and gradients of these."""
    out = attend(*x)
    grads = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    second = torch.autograd.grad(sum(g.square().sum() for g in grads), x)
    return out, *grads, *second


def test_every_order():
    x = [*operands(length=40, grad=True), torch.randn(2, requires_grad=True)]
    expected = orders(*x)
    with eager_kernels():
        found = orders(*x)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-3)


def test_changing_lengths():
    """The second length compiles for all; a call like one before compiles nothing."""
    compiled = []
    for length in (24, 50, 70, 50, 70, 90):
        x = [*operands(length=length), torch.randn(2)]
        counters.clear()
        with eager_kernels():
            found = attend(*x)
        compiled.append(counters["stats"]["unique_graphs"])
        torch.testing.assert_close(found, attend(*x), rtol=1e-4, atol=1e-4)
    assert compiled[0] and not any(compiled[2:])
