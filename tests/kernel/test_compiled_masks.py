"""Masks that kernels ask: instructions in a step of the Hopper forward kernel."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

import flexhop
from flexhop.offline import generate_code
from flexhop.offline.cubin import compile_kernel
from flexhop.options import KernelOptions
from tests.needs import needs_hopper

pytestmark = needs_hopper
PRODUCTS = 12  # of a step with 64 columns
SCORES = 64  # of a thread in a step


def count(loop: str) -> int:
    """Instructions of a loop."""
    return len(re.findall(r"/\*[0-9a-f]{4,}\*/", loop))


@pytest.mark.parametrize(
    ("mask_mod", "most"),
    [  # per score, beyond a step without a mask; in brackets what it was
        # when a comparison divided each key (7.4)
        (lambda b, h, q, k: q // 11 >= k // 11, 3.5),
        # when truths were packed into bits, and unpacked (7.4, 8.3, 8.9)
        (lambda b, h, q, k: q // 300 == k // 300, 5.0),
        (lambda b, h, q, k: (q - k).abs() >= 100, 6.0),
        (lambda b, h, q, k: (q >= k) & (q + k < 900), 6.5),
        # LLVM sees the remainder: multiplied, not divided (20 if it does not)
        (lambda b, h, q, k: (q >= k) & ((q - k) % 3 == 0), 15.0),
    ],
    ids=["chunks", "equal", "magnitude", "sum", "remainder"],
)
def test_steps_that_ask(mask_mod: Any, most: float) -> None:
    operands = [torch.zeros(1, 8, 1024, 64, dtype=torch.bfloat16) for _ in range(3)]
    mask = flexhop.create_block_mask(mask_mod, None, None, 1024, 1024, "cpu")
    options = KernelOptions(backend="hopper")
    code = generate_code(
        lambda q, k, v: flexhop.flex_attention(q, k, v, block_mask=mask, kernel_options=options),
        *operands,
    )
    cubin = compile_kernel(code.templates[-1], 90)
    steps = sorted(count(loop) for loop in cubin.loops() if loop.count("HGMMA") == PRODUCTS)
    without, masked = steps[0], steps[-1]
    assert masked > without and (masked - without) / SCORES < most
    assert not cubin.spills
