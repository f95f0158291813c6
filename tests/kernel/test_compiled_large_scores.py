"""Scores that may be large as machine code: what backward kernels do again for every tile."""

from __future__ import annotations

import re

import pytest
import torch

import flexhop
from flexhop.offline import generate_code
from flexhop.offline.cubin import compile_kernel

pytestmark = pytest.mark.slow
KEYS = torch.zeros(2, 1024)
FP64 = re.compile(r"\b(?:D(?:ADD|FMA|MUL|SETP)|\S*RCP64H|F2F\S*F64)\b")


def offset(score, b, h, q_idx, kv_idx):
    return score + KEYS[h, kv_idx]


def growth(score, b, h, q_idx, kv_idx):
    return score * KEYS[h, kv_idx]


def attend(query, key, value, mod):
    options = flexhop.KernelOptions(backend="triton")
    return flexhop.flex_attention(query, key, value, mod, kernel_options=options)


@pytest.mark.parametrize(("mod", "dtype"), [
    (offset, torch.bfloat16), (growth, torch.bfloat16), (offset, torch.float32),
])  # fmt: skip
@pytest.mark.parametrize("architecture", [80, 90])
def test_no_loop_computes_in_fp64(architecture, mod, dtype):
    operands = [torch.zeros(1, 2, 1024, 32, dtype=dtype, requires_grad=True) for _ in range(3)]
    capability = divmod(architecture, 10)
    code = generate_code(attend, *operands, mod, grad=True, capability=capability)
    assert len(code.templates) == 3
    for kernel in code.templates:
        loops = compile_kernel(kernel, architecture).loops()
        assert loops
        assert not FP64.search("".join(loops)), kernel.name
