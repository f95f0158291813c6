"""Hopper's kernels for sliding windows compile to steps that are not much longer than without."""

from __future__ import annotations

import pytest
import torch

import flexhop
from flexhop.masks import sliding_window
from flexhop.offline import generate_code
from flexhop.offline.cubin import Cubin, compile_kernel, local_accesses, product_notes
from tests.needs import needs_hopper

pytestmark = [
    pytest.mark.slow,
    needs_hopper,
]


def build(length: int, width: int, *, grad: bool) -> Cubin:
    """The forward kernel of a window of 256 keys, or the backward kernel."""
    inputs = [
        torch.zeros(1, 2, length, width, dtype=torch.bfloat16, requires_grad=grad)
        for _ in range(3)
    ]
    mask = flexhop.create_block_mask(sliding_window(256), None, None, length, length, "cpu")
    options = flexhop.KernelOptions(backend="hopper")
    generated = generate_code(
        lambda q, k, v: flexhop.flex_attention(q, k, v, block_mask=mask, kernel_options=options),
        *inputs, grad=grad,
    )  # fmt: skip
    kernel = generated.kernel_with("differentiate" if grad else "consume")
    assert kernel.constants["HAS_BAND"]
    return compile_kernel(kernel, 90)


@pytest.mark.parametrize("length", [1024, 1000])
@pytest.mark.parametrize(
    ("grad", "products", "limit"), [(False, 16, 640), (True, 32, 520)], ids=["forward", "backward"]
)
def test_a_masked_step_of_128_columns_is_short(grad, products, limit, length):
    """460 and 420 instructions without a mask; two comparisons of a score are 1030 and 640."""
    cubin = build(length, 128, grad=grad)
    assert product_notes(cubin) == []
    steps = sorted((x for x in cubin.loops() if x.count("HGMMA") == products), key=len)[:4]
    masked = [step for step in steps if "R2P" in step]
    assert len(masked) == 2, "one of each consumer"
    overhangs = length % 128 != 0  # keys behind the end are masked as well
    for step in masked:
        assert len(step.splitlines()) < limit + 150 * overhangs
    assert all(local_accesses(step) == 0 for step in steps)


def test_the_forward_kernel_of_64_columns_has_no_spills():
    cubin = build(1024, 64, grad=False)
    assert (cubin.spills, product_notes(cubin)) == (0, [])
