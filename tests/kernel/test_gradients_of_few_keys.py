"""One kernel for all gradients, where a tile holds all keys of a head."""

from __future__ import annotations

import itertools

import pytest
import torch

import flexhop
from flexhop.masks import causal
from flexhop.offline import generate_code
from flexhop.offline.cubin import compile_kernel
from tests.case_inputs import make_call, make_inputs, make_loss
from tests.few_key_cases import CASES
from tests.judging import assert_case
from tests.kernel.test_interpreted import interpreted
from tests.needs import needs_hopper

TOGETHER = "WRITES_QUERY : tl.constexpr = True"


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_gradients(case):
    inputs = make_inputs(case)
    assert_case(case, inputs, interpreted(case, inputs))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_it_is_one_kernel(case):
    inputs = make_inputs(case)
    tensors = (inputs.query, inputs.key, inputs.value)
    code = generate_code(make_call(case, inputs), *tensors, grad=make_loss(case, inputs))
    kinds = [TOGETHER in kernel.source for kernel in code.templates]
    assert kinds == [*[False] * (len(kinds) - 1), True]
    assert not any("def grad_query_blocks" in kernel.source for kernel in code.templates)


@needs_hopper
@pytest.mark.parametrize(
    ("length", "width", "kind"),
    [
        *itertools.product([64], [32, 64, 128], ["plain", "causal", "bias"]),
        *itertools.product([128], [32, 64], ["causal", "bias"]),
    ],
)
def test_it_fits_and_hardly_spills(length, width, kind):
    tensors = [
        torch.zeros(512, 8, length, width, dtype=torch.bfloat16, requires_grad=True)
        for _ in range(3)
    ]
    bias = torch.zeros(8, length, length, requires_grad=True)
    mask = flexhop.create_block_mask(causal, None, None, length, length, "cpu")

    def call(q, k, v):
        score_mod = (lambda s, b, h, i, j: s + bias[h, i, j]) if kind == "bias" else None
        return flexhop.flex_attention(q, k, v, score_mod, mask if kind == "causal" else None)

    kernels = generate_code(call, *tensors, grad=True).templates
    (kernel,) = (kernel for kernel in kernels if TOGETHER in kernel.source)
    cubin = compile_kernel(kernel, 90)
    assert cubin.shared <= 116_000  # two programs
    assert cubin.spills <= (128 if width == 128 else 16)
