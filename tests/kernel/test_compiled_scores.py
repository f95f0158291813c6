"""score_mods as machine code: what they cost a step without a mask."""

from __future__ import annotations

import functools
import re
from typing import Any

import pytest
import torch

import flexhop
from benchmarks.ways import Ways, ways
from flexhop.masks import causal
from flexhop.offline import generate_code
from flexhop.offline.cubin import Cubin, compile_kernel, local_accesses, product_notes
from tests.compiler_stages import steps_of
from tests.needs import needs_hopper

pytestmark = [
    pytest.mark.slow,
    needs_hopper,
]
SLOPES = torch.tensor([0.5, 0.25])
SCORES = 64  # of a thread in a step of 64 x 128


def alibi(score, b, h, q_idx, kv_idx):
    return score + SLOPES[h] * (kv_idx - q_idx)


def distance(score, b, h, q_idx, kv_idx):
    return score - SLOPES[h] * (q_idx - kv_idx).abs()


def step(score, b, h, q_idx, kv_idx):
    return torch.where(q_idx - kv_idx < 128, score, score - 4.0)


def relu(score, b, h, q_idx, kv_idx):
    return torch.relu(score)


def clamp(score, b, h, q_idx, kv_idx):
    return score.clamp(-20, 20)


PAIRS = torch.zeros(512, 514, dtype=torch.bfloat16)  # no rows at multiples of 16 bytes: read
DISTANCES = torch.zeros(2, 1023)


def pair_bias(score, b, h, q_idx, kv_idx):
    return score + PAIRS[q_idx, kv_idx]


def relative(score, b, h, q_idx, kv_idx):
    return score + DISTANCES[h, q_idx - kv_idx + 511]


def opposite(score, b, h, q_idx, kv_idx):
    return score + DISTANCES[h, -kv_idx + 511 + q_idx]


def remainder(score, b, h, q_idx, kv_idx):
    return torch.where(kv_idx % 4 == 1, score - 1, score)


def parity(score, b, h, q_idx, kv_idx):
    return score * (kv_idx % 2 + 1)


def parities(score, b, h, q_idx, kv_idx):
    return torch.where((q_idx ^ kv_idx) & 1 == 0, score, score - 1)


def decay(score, b, h, q_idx, kv_idx):
    return score * torch.exp((kv_idx - q_idx) * 0.01)


def wave(score, b, h, q_idx, kv_idx):
    return score + torch.cos((q_idx - kv_idx) * 0.01)


cap = flexhop.mods.softcap(30.0)


@functools.cache
def build(score_mod: Any, width: int, is_causal: bool = True, length: int = 512) -> Cubin:
    """The Hopper kernel with a score_mod."""
    inputs = [torch.zeros(1, 2, length, width, dtype=torch.bfloat16) for _ in range(3)]
    mask = None
    if is_causal:
        mask = flexhop.create_block_mask(causal, None, None, length, length, "cpu")
    options = flexhop.KernelOptions(backend="hopper")
    generated = generate_code(
        lambda q, k, v: flexhop.flex_attention(q, k, v, score_mod, mask, kernel_options=options),
        *inputs,
    )
    return compile_kernel(generated.kernel_with("consume"), 90)


def full_steps(cubin: Cubin, width: int) -> list[str]:
    """The steps without a mask, one of each consumer."""
    return [step.shortest for step in steps_of(cubin, products=8 + width // 16)]


def instructions(loop: str) -> list[str]:
    """One a line, without labels."""
    return [line for line in loop.splitlines() if ";" in line]


def longer(way: Ways) -> int:
    """How many instructions the branches of a loop have."""
    return len(instructions(way.longest)) - len(instructions(way.shortest))


@pytest.mark.parametrize("width", [64, 128])
def test_a_line_takes_one_instruction_for_each_score(width):
    plain, line = (
        [instructions(x) for x in full_steps(build(mod, width), width)] for mod in (None, alibi)
    )
    for without, having in zip(plain, line, strict=True):
        # Besides: which block is next, the mod at the first key, and the row's numbers.
        assert SCORES <= len(having) - len(without) <= SCORES + 45
        assert sum("I2F" in x for x in having) <= 1, "the first key alone becomes a float"


@pytest.mark.parametrize("width", [64, 128])
def test_nothing_is_waited_for_before_the_products(width):
    cubin = build(alibi, width)
    assert (cubin.spills, product_notes(cubin)) == (0, [])
    for step in map(instructions, full_steps(cubin, width)):
        loads = [(n, m[1]) for n, x in enumerate(step) if (m := re.search(r"LDG\S* (R\d+),", x))]
        first_product = next(n for n, x in enumerate(step) if "HGMMA" in x)
        assert loads
        for load, target in loads:
            used = (n for n, x in enumerate(step) if n > load and re.search(rf"\b{target}\b", x))
            assert next(used, len(step)) > first_product


@pytest.mark.parametrize(("mod", "width"), [(distance, 64), (distance, 128), (step, 128)])
def test_a_tile_without_the_bend_leaves_out_what_a_bend_needs(mod, width):
    plain = full_steps(build(None, width), width)
    products = 8 + width // 16
    loops = sorted((x for x in build(mod, width).loops() if x.count("HGMMA") == products), key=len)
    # The mod is asked about each key under a branch.
    bent = [way for way in map(ways, loops) if longer(way) > 4 * SCORES][:2]
    for without, (straight, longest) in zip(plain, bent, strict=True):
        assert "IABS" not in longest, "distances are subtracted as floats"
        more = len(instructions(straight)) - len(instructions(without))
        # Besides what a line needs: the corners of the tile, and two branches.
        assert SCORES <= more <= SCORES + 90


@pytest.mark.parametrize(
    ("mod", "most"),
    [
        (relu, 2),  # with the scale
        (clamp, 3),
        (cap, 5),  # with the scale and the change to base 2
    ],
)
def test_order_takes_one_instruction_and_a_cap_five(mod, most):
    plain, changed = (len(instructions(full_steps(build(m, 128), 128)[0])) for m in (None, mod))
    assert changed - plain <= most * SCORES + 8
    assert build(mod, 128).spills == 0


@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize(("mod", "most"), [(remainder, 2.2), (parity, 2.0), (parities, 2.2)])
def test_what_keys_have_in_common_is_computed_once(mod, most, width):
    plain, changed = (
        len(instructions(full_steps(build(m, width, False), width)[0])) for m in (None, mod)
    )
    assert changed - plain <= most * SCORES


@pytest.mark.parametrize(
    ("mod", "is_causal", "most", "loads"),
    [
        (pair_bias, False, 3.2, SCORES // 2),
        (pair_bias, True, 4.0, SCORES // 2),
        (relative, False, 2.2, SCORES // 2),
    ],
)
def test_neighbours_are_read_from_one_address(mod, is_causal, most, loads):
    """Two 16-bit entries by one load, and few instructions for addresses."""
    plain, changed = (full_steps(build(m, 128, is_causal), 128)[0] for m in (None, mod))
    # Besides: the next block of the list.
    assert loads <= changed.count("LDG") - plain.count("LDG") <= loads + 4
    assert len(instructions(changed)) - len(instructions(plain)) <= most * SCORES
    assert build(mod, 128, is_causal).spills == 0


@pytest.mark.parametrize("length", [512, 500])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    ("mod", "most", "reads"), [(wave, 3, 1), (decay, 6, 0), (relative, 3, 1), (opposite, 3, 1)]
)
def test_a_function_of_the_distance_is_computed_once_for_a_diagonal(
    mod, most, reads, is_causal, length
):
    """A thread has rows that are 8 apart, and columns that are 8 apart."""
    if length % 128:
        most += 2 * reads  # indices are clamped, so no constants are part of addresses
    cubin = build(mod, 128, is_causal, length)
    plain = full_steps(build(None, 128, is_causal, length), 128)[0]
    for loop in full_steps(cubin, 128):
        # 18 instructions of a wave otherwise, and 6.5 of a table in a causal kernel.
        assert len(instructions(loop)) - len(instructions(plain)) <= most * SCORES
        # Besides: the next block of the list.
        assert loop.count("LDG") - plain.count("LDG") <= SCORES // 2 * reads + 4


STARTS, REACH = torch.zeros(1, 512, dtype=torch.int64), torch.tensor([100, 300])


def within_documents(score, b, h, q_idx, kv_idx):
    distance = (q_idx - STARTS[b, q_idx]) - (kv_idx - STARTS[b, kv_idx])
    return score - SLOPES[h] * distance.abs()


def near(b, h, q_idx, kv_idx):
    return (q_idx >= kv_idx) & (q_idx - kv_idx < REACH[h])


def test_integers_of_64_bits_and_windows_of_heads():
    """A magnitude in 64 bits took seven instructions a score, and spilled; a window took nine."""
    inputs = [torch.zeros(1, 2, 512, 128, dtype=torch.bfloat16) for _ in range(3)]
    mask = flexhop.create_block_mask(near, None, 2, 512, 512, "cpu")
    options = flexhop.KernelOptions(backend="hopper")
    generated = generate_code(
        lambda q, k, v: flexhop.flex_attention(
            q, k, v, within_documents, mask, kernel_options=options
        ),
        *inputs,
    )
    cubin = compile_kernel(generated.kernel_with("consume"), 90)
    steps = steps_of(cubin, products=16)
    full, (masked, other) = ([len(instructions(step[i])) for step in steps] for i in range(2))
    assert max(full) < 990
    assert max(masked, other) - max(full) < 5 * SCORES
    assert local_accesses("\n".join(full_steps(cubin, 128))) < 16
