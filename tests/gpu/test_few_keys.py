"""One kernel for all gradients on a GPU, where a tile holds all keys of a head.

pytest tests/gpu/test_few_keys.py -q -n 8
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch._inductor.utils import run_and_get_code

import flexhop
from flexhop.masks import causal
from tests.case_inputs import make_inputs
from tests.few_key_cases import CASES
from tests.gpu.test_end_to_end import compiled_run
from tests.judging import assert_case

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="needs a Hopper GPU",
    ),
]
TOGETHER = "WRITES_QUERY : tl.constexpr = True"


def check(case, **options) -> None:
    inputs = make_inputs(case, device="cuda")
    outcome, codes = run_and_get_code(compiled_run, case, inputs, **options)
    assert any(TOGETHER in code for code in codes), "not the kernel of few keys"
    assert_case(case, inputs, outcome)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_gradients(case):
    check(case)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_many_batches(case):
    """Several programs on each multiprocessor; a batch of any size."""
    shape = dataclasses.replace(case.shape, batch=300)
    check(dataclasses.replace(case, shape=shape))


@pytest.mark.parametrize(
    ("width", "keys"),
    [(16, 17), (16, 100), (40, 64), (64, 17), (64, 100), (96, 17), (128, 64)],
)
def test_repeated_calls_are_equal(width, keys):
    """Nothing is added in an order that changes."""
    sizes = ((70, 4, keys, width),) * 3
    q, k, v = (torch.randn(s, device="cuda", dtype=torch.bfloat16) for s in sizes)
    leaves = [t.requires_grad_() for t in (q, k, v)]
    mask = flexhop.create_block_mask(causal, None, None, keys, keys, "cuda")
    call = torch.compile(flexhop.flex_attention, fullgraph=True)
    grad_out = torch.randn_like(q)
    runs = [
        torch.autograd.grad(call(*leaves, block_mask=mask), leaves, grad_out) for _ in range(20)
    ]
    for run in runs[1:]:
        assert all(map(torch.equal, run, runs[0]))
