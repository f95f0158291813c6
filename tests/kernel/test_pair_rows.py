"""Biases of pairs that batches share: the order of programs."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import flexhop
from flexhop.lowering.hopper import constants as hopper_constants
from flexhop.lowering.portable import shared
from flexhop.offline import generate_code
from flexhop.options import KernelOptions
from tests.case_inputs import Case, Shape, make_inputs
from tests.judging import assert_case
from tests.kernel.test_emulated import emulated
from tests.kernel.test_interpreted import interpreted
from tests.needs import needs_hopper

pytestmark = pytest.mark.filterwarnings("ignore::flexhop.errors.EagerWarning")
SHARED = Case(
    "shared", score=lambda c: lambda s, b, h, q, k: s + c.bias[h, q, k], learned=("bias",),
    captures=lambda s, r: {"bias": r.normal(s.heads, s.q_len, s.kv_len)}, lse=True,
    shape=Shape(3, 4, 2, 40, 72, 16, 24),
)  # fmt: skip
MASKED = dataclasses.replace(SHARED, name="masked", mask=lambda c: flexhop.masks.causal)


@pytest.fixture
def batch_inner(monkeypatch):
    """As if the bias did not fit the L2 cache."""
    for module in (shared, hopper_constants):
        monkeypatch.setattr(module, "is_batch_inner", lambda problem: problem.batch > 1)


@pytest.mark.usefixtures("batch_inner")
@pytest.mark.parametrize("case", [SHARED, MASKED], ids=lambda case: case.name)
def test_batches_of_a_head_come_one_after_the_other(case):
    inputs = make_inputs(case)
    assert_case(case, inputs, interpreted(case, inputs))


@needs_hopper
@pytest.mark.usefixtures("batch_inner")
def test_they_do_in_hopper_kernels():
    emulated(
        dataclasses.replace(
            MASKED, learned=(), shape=Shape(3, 4, 2, 100, 136, 64, 64), dtype=torch.bfloat16,
            options=KernelOptions(backend="hopper"),
        ),
        "random",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("batch", "length", "expected"), [(2, 4096, True), (2, 256, False), (1, 4096, False)]
)
@pytest.mark.parametrize("backend", ["triton", "hopper"])
def test_only_a_bias_that_exceeds_the_cache_orders_programs(batch, length, expected, backend):
    bias = torch.zeros(8, length, length, dtype=torch.bfloat16)
    tensors = [torch.zeros(batch, 8, length, 64, dtype=torch.bfloat16) for _ in range(3)]
    code = generate_code(
        lambda q, k, v: flexhop.flex_attention(
            q, k, v, lambda s, b, h, i, j: s + bias[h, i, j], kernel_options={"backend": backend}
        ),
        *tensors,
    )
    text = {"triton": f": tl.constexpr = {expected}", "hopper": f" = gl.constexpr({expected})"}
    assert "BATCH_INNER" + text[backend] in code.templates[0].source.replace("R :", "R:")
