"""score_mods that add a line over keys, as machine code: what they cost a step without a mask."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import flexhop
from flexhop.compat import gluon_versions
from flexhop.masks import causal
from flexhop.offline import generate
from flexhop.offline.cubin import Cubin, compile_kernel, product_notes

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(gluon_versions.obstacle() != "", reason=gluon_versions.obstacle()),
]
SLOPES = torch.tensor([0.5, 0.25])
SCORES = 64  # of a thread in a step of 64 x 128


def alibi(score, b, h, q_idx, kv_idx):
    return score + SLOPES[h] * (kv_idx - q_idx)


def distance(score, b, h, q_idx, kv_idx):
    return score - SLOPES[h] * (q_idx - kv_idx).abs()


def build(score_mod: Any, width: int) -> Cubin:
    """The causal Hopper kernel with a score_mod."""
    inputs = [torch.zeros(1, 2, 512, width, dtype=torch.bfloat16) for _ in range(3)]
    mask = flexhop.create_block_mask(causal, None, None, 512, 512, "cpu")
    options = flexhop.KernelOptions(backend="hopper")
    generated = generate(
        lambda q, k, v: flexhop.flex_attention(q, k, v, score_mod, mask, kernel_options=options),
        *inputs,
    )
    return compile_kernel(generated.kernel_with("consume"), 90)


def full_steps(cubin: Cubin, width: int) -> list[list[str]]:
    """Instructions of the loops without a mask, one of each consumer."""
    loops = [loop for loop in cubin.loops() if loop.count("HGMMA") == 8 + width // 16]
    lines = [[line for line in loop.splitlines() if ";" in line] for loop in loops]
    return sorted(lines, key=len)[:2]


@pytest.mark.parametrize("width", [64, 128])
def test_a_line_takes_one_instruction_for_each_score(width):
    plain, line = (full_steps(build(mod, width), width) for mod in (None, alibi))
    for without, having in zip(plain, line, strict=True):
        # Besides: which block is next, the mod at the first key, and the row's numbers.
        assert SCORES <= len(having) - len(without) <= SCORES + 45
        assert sum("I2F" in x for x in having) <= 1, "the first key alone becomes a float"


@pytest.mark.parametrize("width", [64, 128])
def test_nothing_is_waited_for_before_the_products(width):
    cubin = build(alibi, width)
    assert (cubin.spills, product_notes(cubin)) == (0, [])
    for step in full_steps(cubin, width):
        loads = [n for n, x in enumerate(step) if "LDG" in x]
        products = [n for n, x in enumerate(step) if "HGMMA" in x]
        assert loads
        assert loads[0] > products[0]


def test_distances_are_subtracted_as_floats():
    for step in full_steps(build(distance, 128), 128):
        # A pair of rows shares the positions of 32 keys.
        assert sum("I2F" in x for x in step) <= SCORES // 2
        assert not [x for x in step if "IABS" in x]
