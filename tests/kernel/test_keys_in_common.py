"""Hopper forward kernels compute what a score_mod makes of keys once for those that share it."""

from __future__ import annotations

import pytest
import torch

import flexhop
from flexhop.offline import generate_code
from flexhop.offline.cubin import compile_kernel
from tests.needs import needs_hopper

pytestmark = [pytest.mark.slow, needs_hopper]
LENGTH, SCORES = 512, 64  # of a thread, in a step of 64 x 128
PLAIN = {64: 440, 128: 500}  # instructions of a step without a score_mod, at most
MODS = {
    "remainder": (lambda s, b, h, q, k: torch.where(k % 4 == 1, s - 1, s), 2.5),
    "parity": (lambda s, b, h, q, k: s * (k % 2 + 1), 2.0),
    "parities": (lambda s, b, h, q, k: torch.where((q ^ k) & 1 == 0, s, s - 1), 2.5),
}


def instructions(score_mod, width: int) -> int:
    """Of the shortest step with products."""
    inputs = [torch.zeros(1, 2, LENGTH, width, dtype=torch.bfloat16) for _ in range(3)]
    options = flexhop.KernelOptions(backend="hopper")
    generated = generate_code(
        lambda q, k, v: flexhop.flex_attention(q, k, v, score_mod, kernel_options=options),
        *inputs,
    )
    loops = compile_kernel(generated.kernel_with("consume"), 90).loops()
    steps = [loop for loop in loops if loop.count("HGMMA") == 8 + width // 16]
    return min(sum(";" in line for line in step.splitlines()) for step in steps)


@pytest.mark.parametrize("width", PLAIN)
@pytest.mark.parametrize("name", MODS)
def test_remainders_of_keys_are_few(name, width):
    score_mod, most = MODS[name]
    assert instructions(score_mod, width) <= PLAIN[width] + most * SCORES
