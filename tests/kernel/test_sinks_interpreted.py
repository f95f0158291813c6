"""Sinks with the generated kernels, prompts and single queries, in Triton's interpreter."""

import pytest
import torch

import flexhop
from flexhop.masks import causal_with_offset
from flexhop.offline.interpret import Memory, interpret
from tests.budgets import assert_within_budget, dense_attention, dense_backward

KEYS, WIDTH = 150, 64


def make(queries: int, dtype: torch.dtype):
    generator = torch.Generator().manual_seed(0)
    sizes = ((2, 4, queries, WIDTH), (2, 2, KEYS, WIDTH), (2, 2, KEYS, WIDTH))
    tensors = [torch.randn(size, generator=generator).to(dtype) for size in sizes]
    sinks = torch.randn(4, generator=generator) * 2
    grad = torch.randn(sizes[0], generator=generator).to(dtype)
    return [t.requires_grad_() for t in (*tensors, sinks)], grad


def expected(leaves, grad, mask, dtype):
    """Plain PyTorch: one more key, whose scores are the sinks and whose value is 0."""
    query, key, value, sinks = (t.detach().to(dtype).requires_grad_() for t in leaves)
    column = torch.zeros(2, 2, 1, WIDTH, dtype=dtype)
    visible = mask(0, 0, torch.arange(query.size(2))[:, None], torch.arange(KEYS + 1)[None, :])
    visible[:, KEYS] = True
    dense = dense_attention(
        query, torch.cat([key, column], 2), torch.cat([value, column], 2),
        lambda s, b, h, q, k: torch.where(k == KEYS, sinks[h].to(s.dtype), s),
        visible, WIDTH**-0.5,
    )  # fmt: skip
    dense_backward(dense, grad.to(dtype), None)
    grads = {
        n: t.grad for n, t in zip(("query", "key", "value"), (query, key, value), strict=True)
    }
    return {"out": dense.out, "lse": dense.lse, **grads, "sinks": sinks.grad}


@pytest.mark.parametrize("queries", [70, 1])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_sinks(queries, dtype):
    leaves, grad = make(queries, dtype)
    mask = causal_with_offset(KEYS - queries)
    blocks = flexhop.create_block_mask(mask, None, None, queries, KEYS, "cpu")
    generated = interpret(
        lambda q, k, v, sinks: flexhop.flex_attention(
            q, k, v, block_mask=blocks, enable_gqa=True, sinks=sinks,
            return_aux=flexhop.AuxRequest(lse=True),
            kernel_options=flexhop.KernelOptions(backend="triton"),
        ),
        *leaves, grad=lambda result: (result[0] * grad).sum(),
        memory=Memory(poison=True, check_bounds=True),
    )  # fmt: skip
    out, aux = generated.result
    names = ("query", "key", "value", "sinks")
    found = {"out": out, "lse": aux.lse}
    found |= {name: leaf.grad for name, leaf in zip(names, leaves, strict=True)}
    gold, reference = (expected(leaves, grad, mask, d) for d in (torch.float64, dtype))
    for name, actual in found.items():
        assert_within_budget(
            actual, gold[name], reference[name], name=name, captured=name == "sinks"
        )


@pytest.mark.filterwarnings("ignore::flexhop.errors.EagerWarning")
def test_long_rows_whose_gradients_lie_by_token():
    """Inductor pads rows of more than 1024 numbers, also those that it sums for the sinks."""
    torch.manual_seed(0)
    shapes = ((1, 1030, 2, 8), (1, 16, 2, 8), (1, 16, 2, 8))
    leaves = [torch.randn(shape).transpose(1, 2).requires_grad_() for shape in shapes]
    sinks = torch.randn(2, requires_grad=True)
    weight = torch.randn(1, 1030, 2, 8)

    def call(query, key, value, sinks):
        out = flexhop.flex_attention(query * 2.0, key, value, sinks=sinks)
        return (out * 2.0).transpose(1, 2).contiguous()

    def loss(out):
        return (out * weight).sum()

    memory = Memory(poison=True, check_bounds=True)
    interpret(call, *leaves, sinks, grad=loss, memory=memory)
    plain = [t.detach().double().requires_grad_() for t in (*leaves, sinks)]
    wanted = torch.autograd.grad(loss(call(*plain)), plain)
    for leaf, want in zip((*leaves, sinks), wanted, strict=True):
        torch.testing.assert_close(leaf.grad, want.float(), rtol=1e-4, atol=1e-4)
