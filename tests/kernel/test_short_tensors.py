"""Short tensors that a mod puts together of scores and positions, under vmap."""

import pytest
import torch

import flexhop
from flexhop.compat.operators import vmapped
from flexhop.offline import generate_code


@pytest.mark.parametrize("symbolic", [False, True])
def test_short_tensors_that_a_mod_puts_together(symbolic, monkeypatch):
    """Under symbolic sizes, PyTorch's batching rules fail; what replaces them means the same."""
    monkeypatch.setattr(vmapped, "_has_symbols", lambda tensor: symbolic)
    x, y = torch.randn(5, 4, 3), torch.arange(5)

    def put(x, y):
        both = vmapped.concatenate([x, y.expand(4, 1), -x[:, :1]], -1)
        again = vmapped.concatenate([both[:1], both])
        return vmapped.flip(vmapped.select_scatter(again, x.sum() * torch.ones(5), 1, -2), (0, 1))

    def plain(x, y):
        both = torch.cat([x, y.expand(4, 1), -x[:, :1]], -1)
        again = torch.cat([both[:1], both])
        return torch.select_scatter(again, x.sum() * torch.ones(5), 1, -2).flip(0, 1)

    found, expected = torch.vmap(put)(x, y), torch.vmap(plain)(x, y)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_short_tensors_in_a_mod_under_symbolic_sizes():
    """The definition is compiled in fp64, with its symbols."""
    inputs = [torch.zeros(2, 2, 37, 16, dtype=torch.float64, requires_grad=True)] * 3

    def mod(s, b, h, q_idx, kv_idx):
        pair = torch.stack([s, s * 2, kv_idx * 0.1])
        return pair.sum(0) + pair.flatten()[0]

    generate_code(lambda q, k, v: flexhop.flex_attention(q, k, v, mod), *inputs, grad=True,
                  dynamic=True)  # fmt: skip
