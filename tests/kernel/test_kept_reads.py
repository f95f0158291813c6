"""Backward kernels of Hopper compute functions of what score_mod reads once for the weights."""

from __future__ import annotations

import pytest
import torch

import flexhop
from flexhop.offline import generate_code
from flexhop.offline.cubin import compile_kernel, local_accesses
from tests.needs import needs_hopper

pytestmark = [pytest.mark.slow, needs_hopper]
HEADS, LENGTH = 2, 256
SCORES = 32  # of a thread, in a step of 64 queries and 128 keys
MODS = {
    "key": lambda t: lambda s, b, h, q, k: torch.tanh(s + t[0, k]),
    "query": lambda t: lambda s, b, h, q, k: torch.tanh(s - t[0, q]),
    "cap": lambda t: lambda s, b, h, q, k: t[0, 0] * torch.tanh(s / t[0, 0]),
    "distance": lambda t: lambda s, b, h, q, k: torch.tanh(s + t[h, q - k + LENGTH - 1]),
}


def step(reads: str, width: int, *, learns: bool) -> str:
    """The machine code of a step of the kernel."""
    tensors = [
        torch.zeros(1, HEADS, LENGTH, width, dtype=torch.bfloat16, requires_grad=True)
        for _ in range(3)
    ]
    score_mod = MODS[reads](torch.zeros(HEADS, 2 * LENGTH, requires_grad=learns))
    options = flexhop.KernelOptions(backend="hopper")
    generated = generate_code(
        lambda q, k, v: flexhop.flex_attention(q, k, v, score_mod, kernel_options=options),
        *tensors, grad=True,
    )  # fmt: skip
    loops = compile_kernel(generated.kernel_with("grad_scores"), 90).loops()
    return min((loop for loop in loops if "HGMMA" in loop), key=len)


@pytest.mark.parametrize("learns", [False, True])
@pytest.mark.parametrize("reads", MODS)
def test_functions_are_computed_once(reads, learns):
    """tanh takes two of the units' operations, the weight takes one."""
    found = step(reads, 64, learns=learns)
    assert SCORES * 3 <= found.count("MUFU") <= SCORES * 3 + 2
    assert local_accesses(found) == 0


@pytest.mark.parametrize("reads", ["key", "query"])
def test_at_128_columns_too(reads):
    """Where registers are short: what does not fit waits in local memory."""
    found = step(reads, 128, learns=True)
    assert found.count("MUFU") == SCORES * 3
    assert local_accesses(found) < 100  # of 1000 instructions
