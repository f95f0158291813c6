"""The Hopper backward kernel with gradients of captured tensors: no spills, few atomic additions.

See test_compiled.py, which holds it without them.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

import flexhop
from flexhop.compat.offline.fake_gpu import GPUS
from flexhop.lowering.hopper import backward as hopper_grad
from flexhop.masks import causal
from flexhop.offline import generate_code
from flexhop.offline.cubin import compile_kernel, local_accesses, product_notes
from tests.needs import needs_hopper
from tests.problems import problem

pytestmark = [
    pytest.mark.slow,
    needs_hopper,
]
HEADS, LENGTH = 2, 256

# By what reads one entry: a score_mod for a table [HEADS, 2 * LENGTH].
MODS: dict[str, Callable[..., Any]] = {
    "head": lambda t: lambda s, b, h, q, k: s + t[h, 0] * (k - q),
    "key": lambda t: lambda s, b, h, q, k: s + t[h, k],
    "query": lambda t: lambda s, b, h, q, k: s + t[h, q] * (k + 1),
    "distance": lambda t: lambda s, b, h, q, k: s + t[h, q - k + LENGTH],
    "bucket": lambda t: lambda s, b, h, q, k: s + t[h, (q - k).clamp(0, 31)],
    "factor": lambda t: lambda s, b, h, q, k: s * t[h, q - k + LENGTH],
    "temperature": lambda t: lambda s, b, h, q, k: s * t[h, 0],
    "scaled": lambda t: lambda s, b, h, q, k: s * t[h, q],
    "cap": lambda t: lambda s, b, h, q, k: t[h, 0] * torch.tanh(s / t[h, 0]),
}


class Found(NamedTuple):
    """What the machine code of one kernel shows."""

    notes: list[str]  # of ptxas, about products that wait for each other
    local: list[int]  # by step: accesses to local memory
    additions: list[int]  # by step: atomic additions
    shared: int


def build(width: int, reads: str) -> Found:
    """Generate and compile the causal kernel."""
    tensors = [
        torch.zeros(1, heads, LENGTH, width, dtype=torch.bfloat16, requires_grad=True)
        for heads in (HEADS, 1, 1)
    ]
    score_mod = MODS[reads](torch.zeros(HEADS, 2 * LENGTH, requires_grad=True))
    mask = flexhop.create_block_mask(causal, None, None, LENGTH, LENGTH, "cpu")
    options = flexhop.KernelOptions(backend="hopper")
    generated = generate_code(
        lambda q, k, v: flexhop.flex_attention(
            q, k, v, score_mod, mask, enable_gqa=True, kernel_options=options
        ),
        *tensors, grad=True,
    )  # fmt: skip
    cubin = compile_kernel(generated.kernel_with("add_captured_grads"), 90)
    steps = [loop for loop in cubin.loops() if loop.count("HGMMA") in (24, 32, 48)]
    # With and without the mask, for each consumer; a loop over heads holds one of them.
    steps = sorted(steps, key=len)[:4]
    return Found(
        product_notes(cubin),
        [local_accesses(step) for step in steps],
        [len(re.findall(r"\b(?:RED|ATOMG)\b", step)) for step in steps],
        cubin.shared,
    )


class PackedSteps(NamedTuple):
    """Loads and accesses to local memory by step, of the kernels of packed sequences."""

    loads: list[int]
    local: list[int]


def build_packed(width: int) -> tuple[PackedSteps, PackedSteps]:
    """Forward and backward kernel of causal packed sequences with a learned slope per head."""
    tensors = [
        torch.zeros(4 * LENGTH, HEADS, width, dtype=torch.bfloat16, requires_grad=True)
        for _ in range(3)
    ]
    slopes, cut = torch.zeros(HEADS, requires_grad=True), torch.tensor([0, 300, 4 * LENGTH])
    options = flexhop.KernelOptions(backend="hopper")
    generated = generate_code(
        lambda q, k, v: flexhop.varlen_attention(
            q, k, v, cut, score_mod=lambda s, b, h, m, n: s + slopes[h] * (n - m), is_causal=True,
            kernel_options=options,
        ),
        *tensors, grad=True,
    )  # fmt: skip
    found: list[PackedSteps] = []
    for function, products in (
        ("consume", 8 + width // 16),
        ("add_captured_grads", 16 + width // 8),
    ):
        cubin = compile_kernel(generated.kernel_with(function), 90)
        assert product_notes(cubin) == []
        steps = [loop for loop in cubin.loops() if loop.count("HGMMA") == products]
        steps = sorted(steps, key=len)[:4]
        local = [local_accesses(step) for step in steps]
        found.append(PackedSteps([step.count("LDG") for step in steps], local))
    return found[0], found[1]


# Atomic additions of a thread in a step. Sums over queries are kept until a head is finished.
ADDITIONS = {"head": 0, "key": 0, "query": 2, "distance": 4, "bucket": 4, "factor": 4}
ADDITIONS |= {"temperature": 0, "scaled": 2, "cap": 0}
# Of tiles whose consumers share keys: a thread has half as many scores.
SHARED_ADDITIONS = {"head": 0, "key": 0, "query": 1, "distance": 3, "bucket": 3, "factor": 3}
# Accesses to local memory in a step where there are some: what does not change waits there while
# positions or scores are in registers. Triton 3.6, and 3.7 where it needs more.
LOCAL = {
    (64, "factor"): 49,  # of 1100 instructions
    (128, "head"): 86,  # 62 with 3.6; of 800, in one of four loops
    (128, "distance"): 2,  # 0 with 3.6
    (128, "bucket"): 3,
    (128, "temperature"): 4,  # 2 with 3.6; of 700
    (128, "scaled"): 50,  # of 900; choice takes the portable kernels
    (128, "cap"): 50,  # of 2100
    (256, "factor"): 1,
}
CASES = [
    *((64, reads) for reads in ("query", "distance", "factor")),
    *((128, reads) for reads in MODS),
    *((256, reads) for reads in ("distance", "factor")),
]


@pytest.mark.parametrize(("width", "reads"), CASES)
def test_steps_with_captured_gradients(width, reads):
    found = build(width, reads)
    by = "distance" if reads in ("distance", "bucket", "factor") else "head"
    needs_score = reads in ("factor", "temperature", "scaled", "cap")
    facts = {"has_score_grad": needs_score, "captured_reads": (by,)}
    call = problem(90, width, has_score_mod=True, **facts)
    tile = hopper_grad.table_tile(call)
    estimate = hopper_grad.shared_memory(call, tile)
    assert found.shared <= estimate <= GPUS[(9, 0)].shared_memory
    assert found.notes == []
    assert max(found.local) <= LOCAL.get((width, reads), 0)
    wanted = SHARED_ADDITIONS if tile.shares_keys else ADDITIONS
    assert set(found.additions) == {wanted[reads]}


@pytest.mark.parametrize(("width", "most"), [(64, 0), (128, 30)])
def test_slopes_of_packed_sequences_read_no_positions(width, most):
    """Loads are those of slopes; local memory: 26 of 850 instructions at 128 columns."""
    for steps, allowed in zip(build_packed(width), (0, most), strict=True):
        assert steps.loads, "no step was found"
        assert max(steps.loads) <= 1
        assert max(steps.local) <= allowed
