"""Kernels whose sizes and strides are sums of symbols, such as 2 * length - 1."""

import re

import pytest
import torch

import flexhop
from flexhop.offline import generate_code
from flexhop.offline.interpret import Memory, interpret
from tests.needs import needs_hopper

HEADS = 2


def attend(query, key, value, slopes, table):
    """The batch is a sum, and each part of the score is a table of distances."""
    query, key, value = (torch.cat([x, x[:1]]) for x in (query, key, value))

    def score_mod(s, b, h, q, k):
        far = torch.sigmoid(slopes[h] * torch.sin((q - k) * 0.3))
        return s + far + table[h, (q // 8 - k // 8).clamp(-3, 3) + 3] * torch.cos((q - k) * 0.1)

    return flexhop.flex_attention(query, key, value, score_mod)


def inputs(length):
    generator = torch.Generator().manual_seed(0)
    sizes = [(2, HEADS, length, 16)] * 3 + [(HEADS,), (HEADS, 7)]
    return [torch.randn(size, generator=generator).requires_grad_() for size in sizes]


@pytest.mark.filterwarnings("ignore::flexhop.errors.EagerWarning")
def test_results_and_gradients():
    """Gradients of a table were added at `h * -1 + 2 * length`."""
    leaves, copies = inputs(130), inputs(130)
    expected = attend(*leaves)
    wanted = torch.autograd.grad(expected.square().sum(), leaves)
    memory = Memory(poison=True, check_bounds=True)
    found = interpret(
        attend, *copies, capability=(8, 0), grad=lambda out: out.square().sum(), dynamic=True,
        memory=memory,
    )  # fmt: skip
    torch.testing.assert_close(found.result, expected, rtol=1e-4, atol=1e-4)
    for copy, grad in zip(copies, wanted, strict=True):
        torch.testing.assert_close(copy.grad, grad, rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore::flexhop.errors.EagerWarning")
@pytest.mark.parametrize("is_trained", [False, True])
def test_rows_of_symbolic_length_are_summed(is_trained):
    """A row's length is symbolic until its sum is lowered, or its gradient is traced."""

    def near(query, key, value, points):
        def score_mod(s, b, h, q, k):
            return s - (points[q] - points[k]).square().sum(-1)

        return flexhop.flex_attention(query, key, value, score_mod)

    leaves = [torch.randn(2, HEADS, 37, 16, requires_grad=True) for _ in range(3)]
    leaves.append(torch.randn(37, 3, requires_grad=is_trained))
    copies = [leaf.detach().clone().requires_grad_(leaf.requires_grad) for leaf in leaves]
    expected = near(*leaves)
    expected.square().sum().backward()
    memory = Memory(poison=True, check_bounds=True)
    found = interpret(
        near, *copies, grad=lambda out: out.square().sum(), dynamic=True, memory=memory
    )
    assert len(found.templates) == 3, "kernels, not the definition in chunks"
    assert all("ks0" in kernel.parameters for kernel in found.templates), "of any length"
    torch.testing.assert_close(found.result, expected, rtol=1e-4, atol=1e-4)
    for copy, leaf in zip(copies, leaves, strict=True):
        if leaf.requires_grad:
            torch.testing.assert_close(copy.grad, leaf.grad, rtol=1e-4, atol=1e-4)


@needs_hopper
def test_factors_of_hopper_kernels():
    """A sum is a factor in parentheses."""

    def call(query, key, value, slopes):
        def score_mod(s, b, h, q, k):
            return s + torch.sigmoid(slopes[h] * torch.sin((q - k) * 0.3))

        return flexhop.flex_attention(query, key, value, score_mod)

    operands = [torch.zeros(4, 8, 2000, 128, dtype=torch.bfloat16) for _ in range(3)]
    leaves = [x.requires_grad_() for x in (*operands, torch.zeros(8))]
    found = generate_code(call, *leaves, dynamic=True, grad=True)
    kernel = found.kernel_with("flexhop_hopper_backward_captured")
    factors = re.findall(r"index_0_0[\w.()]* \* (.{7})", kernel.text())
    assert len(factors) > 1 and set(factors) == {"((-1) +"}
