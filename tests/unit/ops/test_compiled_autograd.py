"""Compiled autograd: Dynamo meets the backward operator, in the form of a graph."""

import torch
from torch._dynamo import compiled_autograd

from flexhop import create_block_mask, flex_attention
from tests.unit.ops.support import quiet

pytestmark = quiet


def test_gradients():
    torch.manual_seed(0)
    tensors = [torch.randn(1, 2, 40, 16, requires_grad=True) for _ in range(3)]
    slopes = torch.rand(2, requires_grad=True)
    blocks = create_block_mask(lambda b, h, i, j: i >= j, None, None, 40, 40, device="cpu")

    def attend(q, k, v, slopes):
        return flex_attention(
            q, k, v, score_mod=lambda s, b, h, i, j: s * slopes[h], block_mask=blocks
        )

    leaves = [*tensors, slopes]
    expected = torch.autograd.grad(attend(*leaves).sum(), leaves)
    out = torch.compile(attend, backend="aot_eager", fullgraph=True)(*leaves)
    seen = []

    def compile_backward(graph):
        seen.append(graph)
        return torch.compile(graph, backend="aot_eager", fullgraph=True)

    with compiled_autograd._enable(compile_backward):
        out.sum().backward()
    assert len(seen) == 1
    for leaf, gradient in zip(leaves, expected, strict=True):
        torch.testing.assert_close(leaf.grad, gradient)
