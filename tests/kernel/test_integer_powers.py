"""Powers of integers in mods, for which Inductor has no code."""

from __future__ import annotations

import pytest
import torch

import flexhop
from flexhop.offline import generate_code
from tests.learned import check_kernels

pytestmark = pytest.mark.filterwarnings("ignore::flexhop.errors.EagerWarning")
WIDE = torch.arange(40, dtype=torch.int64) * 3 - 40
BYTES = (torch.arange(40) % 7).to(torch.uint8)

POWERS = {
    "two": lambda q, k: 2 ** (q - k),
    "eight": lambda q, k: 8 ** (q // 2),
    "three": lambda q, k: 3 ** (q - k),
    "negative": lambda q, k: (-2) ** (k + q),
    "units": lambda q, k: (-1) ** (q - k) + 1 ** (k - q) + 0**k,
    "tensors": lambda q, k: (q - 9) ** (k - 5),
    "unit bases": lambda q, k: (q % 3 - 1) ** (k - 8),
    "int64": lambda q, k: 5 ** WIDE[q] + WIDE[q] ** k,
    "uint8": lambda q, k: BYTES[q] ** BYTES[k],
}


@pytest.mark.parametrize("power", POWERS.values(), ids=POWERS)
def test_powers_of_integers_are_those_of_eager_calls(power):
    """Products wrap, and negative exponents give 0, but for bases of 1 and -1."""
    torch.manual_seed(0)
    tensors = [torch.randn(1, 2, 40, 16).requires_grad_() for _ in range(3)]

    def mod(s, b, h, q, k):
        return s + (power(q, k) % 11) * 0.1

    check_kernels(tensors, [], mod)


def test_a_mask_of_powers_is_lowered():
    """Radial attention: distances beyond each power of two keep every second key."""

    def radial(b, h, q, k):
        step = 2 ** ((q - k).abs() // 32).clamp(max=5)
        return (q - k) % step == 0

    mask = flexhop.create_block_mask(radial, None, None, 512, 512, "cpu")
    tensors = [torch.randn(1, 1, 512, 64, dtype=torch.bfloat16) for _ in range(3)]
    found = generate_code(
        lambda *x: flexhop.flex_attention(*x, block_mask=mask), *tensors, capability=(9, 0)
    )
    assert found.templates
