"""Masks that compare quotients of positions, forward and backward, on a GPU.

pytest tests/gpu/test_quotients.py -q -n 8
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import flexhop
from flexhop.options import KernelOptions

pytestmark = pytest.mark.gpu
MASKS = {
    "chunks": lambda b, h, q, k: q // 11 >= k // 11,
    "rows": lambda b, h, q, k: (q % 3 != 1) & (q // 11 >= k // 11),
    "equal": lambda b, h, q, k: q // 300 == k // 300,
    "near": lambda b, h, q, k: (q // 100 - k // 100).abs() <= 1,
    "near_of_heads": lambda b, h, q, k: (q // 64 - k // 64 <= h + 1) & (q >= k),
    "ahead_of_batches": lambda b, h, q, k: (k >> 5) >= (q >> 5) - 2 * b,
    "moved": lambda b, h, q, k: (q - 9) // 70 >= (k + 5) // 70,  # the first queries see nothing
}


@pytest.mark.parametrize("heads", [2, 16])  # few tiles; enough for masks that become bits
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("backend", ["hopper", "triton"])
@pytest.mark.parametrize("name", MASKS)
def test_masks(name, backend, width, heads):
    if backend == "hopper" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    batch, length = (2, 1000) if heads == 2 else (3, 1024)
    operands = [
        torch.randn(batch, heads, length, width, device="cuda").bfloat16().requires_grad_()
        for _ in range(3)
    ]
    per = batch if name == "ahead_of_batches" else None, heads if name == "near_of_heads" else None
    mask = flexhop.create_block_mask(MASKS[name], *per, length, length, "cuda")
    options = KernelOptions(backend=backend)

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return flexhop.flex_attention(query, key, value, block_mask=mask, kernel_options=options)

    checked = flexhop.verify(attend, *operands)
    assert checked.ok, str(checked)
