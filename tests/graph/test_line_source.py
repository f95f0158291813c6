"""Whether the Hopper forward kernel follows a line over keys, for mods whose numbers vary."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import flexhop
from flexhop.offline import Kernel, generate_code
from tests.needs import needs_hopper

pytestmark = needs_hopper
SLOPES = torch.tensor([0.5, 0.25])


def kernel_of(make: Callable[[Any], Any]) -> Kernel:
    """The kernel of a call whose length varies, which the mod captures."""
    inputs = [torch.zeros(1, 2, 300, 64, dtype=torch.bfloat16) for _ in range(3)]
    options = flexhop.KernelOptions(backend="hopper")
    generated = generate_code(
        lambda q, k, v: flexhop.flex_attention(q, k, v, make(q.size(2)), kernel_options=options),
        *inputs, dynamic=True,
    )  # fmt: skip
    return generated.kernel_with("consume")


@pytest.mark.parametrize(
    ("make", "is_line", "bends"),
    [
        (lambda n: lambda s, b, h, q, k: s + SLOPES[h] * (k - q - n), True, False),
        (lambda n: lambda s, b, h, q, k: s - SLOPES[h] * (q + n - k).abs(), True, True),
        (lambda n: lambda s, b, h, q, k: torch.where(q - k < n, s, s - 1), True, True),
        (lambda n: lambda s, b, h, q, k: s - SLOPES[h] * (q - k).clamp(max=n), True, True),
        (lambda n: lambda s, b, h, q, k: s + SLOPES.sum() * k, True, False),
        (lambda n: lambda s, b, h, q, k: s + k * n, False, False),
        (lambda n: lambda s, b, h, q, k: s + SLOPES[h] * (k - q) / n, False, False),
        (lambda n: lambda s, b, h, q, k: torch.add(s, k, alpha=n), False, False),
    ],
    ids=[
        "shifted",
        "distance",
        "step",
        "bounded",
        "one_number",
        "times_length",
        "over_length",
        "alpha",
    ],
)
def test_lengths_in_a_mod(make, is_line, bends):
    constants = kernel_of(make).constants
    assert (constants["HAS_SLOPE"], constants["HAS_BEND"]) == (is_line, bends)
