"""Kernels of small networks have tiles of their own, which leave registers to their rows."""

import pytest
import torch

import flexhop
from flexhop.offline import generate_code


@pytest.mark.parametrize(("hidden", "is_long"), [(16, False), (32, True)])
@pytest.mark.parametrize("width", [64, 128])
def test_tiles_of_networks(hidden, is_long, width):
    w1, w2 = torch.randn(hidden), torch.randn(4, hidden)

    def mod(score, b, h, q_idx, kv_idx):
        return score + (w2 @ torch.relu(w1 * score))[h]

    tensors = [torch.randn(1, 4, 512, width, dtype=torch.bfloat16) for _ in range(3)]
    code = generate_code(lambda q, k, v: flexhop.flex_attention(q, k, v, mod), *tensors)
    (kernel,) = code.templates
    tile = tuple(kernel.constants[name] for name in ("BLOCK_M", "BLOCK_N"))
    assert (tile == (64, 32)) == is_long
