"""The tools of flexhop.offline on flexhop's own kernels; small, one problem."""

import torch

import flexhop
from flexhop.offline import generate
from flexhop.offline.cubin import compile_kernel
from flexhop.offline.interpret import Memory, interpret


def _attention(query, key, value, bias):
    def score_mod(score, b, h, q_idx, kv_idx):
        return score + bias[h, q_idx - kv_idx + bias.size(1) // 2]

    return flexhop.flex_attention(query, key, value, score_mod)


def _inputs(dtype=torch.float32, length=70):
    torch.manual_seed(0)
    tensors = [torch.randn(1, 2, length, 32, dtype=dtype) for _ in range(3)]
    tensors.append(torch.randn(2, 2 * length - 1))
    return [tensor.requires_grad_() for tensor in tensors]


def test_interpreted_kernels_agree_and_stay_inside_their_tensors():
    ours, reference = _inputs(), _inputs()
    memory = Memory(poison=True, check_bounds=True)
    out = interpret(_attention, *ours, grad=True, memory=memory).result
    expected = generate(_attention, *reference, grad=True).result
    torch.testing.assert_close(out, expected)
    for got, want in zip(ours, reference, strict=True):
        torch.testing.assert_close(got.grad, want.grad)


def test_generated_kernels_compile():
    generated = generate(_attention, *_inputs(torch.bfloat16, length=150), grad=True)
    kernels = [generated.kernel_with(f"grad_{part}_blocks") for part in ("query", "key_value")]
    for kernel in (generated.templates[0], *kernels):
        assert "score_mod" in kernel.functions
        assert kernel.constants["QK_HEAD_DIM"] == 32
        assert compile_kernel(kernel, 90).wgmma > 0
