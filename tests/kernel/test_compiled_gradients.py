"""The Hopper backward kernel compiles as it should where the block lists are ranges.

See test_compiled.py, which holds it against dense masks.
"""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

import flexhop
from flexhop.compat import gluon_versions
from flexhop.offline import generate
from flexhop.offline.cubin import compile_kernel, product_notes

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(gluon_versions.obstacle() != "", reason=gluon_versions.obstacle()),
]
# Instructions of the products of a step; tiles have 64 queries.
PRODUCTS = {64: 24, 128: 32, 256: 48}


class Compiled(NamedTuple):
    """ptxas's notes, and loads from and stores to local memory in each kind of step."""

    notes: list[str]
    local: list[int]


def build_packed(width: int, tokens: int) -> Compiled:
    """The kernel of packed sequences, causal."""
    inputs = [
        torch.zeros(tokens, 2, width, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)
    ]
    offsets = torch.tensor([0, 700, tokens], dtype=torch.int32)
    options = flexhop.KernelOptions(backend="hopper")
    generated = generate(
        lambda q, k, v, cut: flexhop.varlen_attention(
            q, k, v, cut, is_causal=True, kernel_options=options
        ),
        *inputs, offsets, grad=True,
    )  # fmt: skip
    kernel = generated.kernel_with("differentiate")
    assert kernel.constants["HAS_RANGES"]
    cubin = compile_kernel(kernel, 90)
    steps = [loop for loop in cubin.loops() if loop.count("HGMMA") == PRODUCTS[width]]
    # A loop that stores gradients of keys is the one over tiles.
    steps = [step for step in steps if "UTMASTG" not in step]
    return Compiled(product_notes(cubin), [s.count("LDL") + s.count("STL") for s in steps])


@pytest.mark.parametrize(
    ("width", "tokens", "most"),
    # Where the number of tokens is no multiple of the tiles, positions are clamped, and the
    # tables of the mask are read one by one.
    [(64, 2048, 0), (64, 2000, 0), (128, 2048, 0), (128, 2000, 14), (256, 2048, 0)],
)
def test_packed_sequences(width, tokens, most):
    notes, local = build_packed(width, tokens)
    assert notes == []
    assert len(local) == 4, "with and without the mask, for each consumer"
    assert max(local) <= most
