"""Complex tensors and numbers in mods: no kernel computes them, but everything else is right."""

from __future__ import annotations

import pytest
import torch

import flexhop
from flexhop.errors import ModLoweringError

LENGTH, SIDE = 40, 16
# A tensor: Inductor of 2.11 does not compile the gradient of `(c * (0.5 + 2j)).imag` by itself.
NUMBER = torch.tensor(0.5 + 2j, dtype=torch.complex128)
pytestmark = [
    pytest.mark.filterwarnings("ignore:Torchinductor does not support"),
    pytest.mark.filterwarnings("ignore::flexhop.errors.EagerWarning"),
]
SCORES = {
    "products of a query and a key": lambda c: (
        lambda s, b, h, q, k: s + (c[h, q] * c[h, k].conj()).real
    ),
    "a number": lambda c: lambda s, b, h, q, k: s + (c[h, k] * NUMBER).imag,
    "parts": lambda c: lambda s, b, h, q, k: s + c[h, q].real * c[h, k].imag,
    "magnitudes": lambda c: lambda s, b, h, q, k: s * torch.exp(-c[h, (q - k).abs()].abs()),
}
MASKS = {
    "a number": lambda c: lambda b, h, q, k: c[q] * 1j == c[k] * 1j,
    "magnitudes": lambda c: lambda b, h, q, k: (c[q] - c[k]).abs() < 1.0,
    "angles": lambda c: lambda b, h, q, k: torch.angle(c[q] * 2j) > torch.angle(c[k]),
    "magnitudes of NaN": lambda c: lambda b, h, q, k: (c[q] * torch.inf * c[k]).abs() >= 0,
}


def operands() -> list[torch.Tensor]:
    torch.manual_seed(0)
    made = [torch.randn(1, 2, LENGTH, 16, dtype=torch.float64) for _ in range(3)]
    return [*made, torch.randn(2, LENGTH, dtype=torch.complex128)]


def gradients(attend, backend: str) -> tuple[torch.Tensor, ...]:
    leaves = [tensor.requires_grad_() for tensor in operands()]
    call = attend if backend == "plain" else torch.compile(attend, backend=backend)
    return torch.autograd.grad(call(*leaves).sin().sum(), leaves)


def both(name: str):
    """A call, and the same in plain PyTorch."""
    make = SCORES[name]

    def dense(query, key, value, learned):
        heads, *places = (torch.arange(n) for n in (2, LENGTH, LENGTH))
        index = (heads.view(2, 1, 1), places[0].view(-1, 1), places[1])
        weights = torch.softmax(make(learned)(query @ key.mT / 4, 0, *index), -1)
        return weights @ value

    def attend(query, key, value, learned):
        return flexhop.flex_attention(query, key, value, make(learned))

    return attend, dense


@pytest.mark.parametrize("name", SCORES)
@pytest.mark.parametrize("backend", ["plain", "aot_eager", "inductor"])
def test_gradients_have_imaginary_parts(name, backend):
    attend, dense = both(name)
    for found, wanted in zip(gradients(attend, backend), gradients(dense, "plain"), strict=True):
        torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("name", SCORES)
def test_tangents_have_imaginary_parts(name):
    attend, dense = both(name)
    *inputs, learned = operands()

    def push(function):
        return lambda c, dot: torch.func.jvp(lambda c: function(*inputs, c), (c,), (dot,))[1]

    dot = learned.flip(0) * 1j
    found = torch.compile(push(attend), backend="aot_eager")(learned, dot)
    torch.testing.assert_close(found, push(dense)(learned, dot))


@pytest.mark.parametrize("name", MASKS)
def test_blocks_are_those_that_the_mask_sees(name):
    """Complex numbers have no order, so nothing is known of them before they are asked."""
    mod = MASKS[name](operands()[3][0])
    place = torch.arange(32)
    seen = mod(0, 0, place[:, None], place).view(2, SIDE, 2, SIDE).transpose(1, 2).flatten(2)
    mask = flexhop.create_block_mask(mod, None, None, 32, 32, "cpu", BLOCK_SIZE=SIDE)
    assert mask.to_dense()[0, 0].bool().equal(seen.any(-1))
    full = torch.zeros(2, 2, dtype=torch.bool)
    for row, (count, keys) in enumerate(
        zip(mask.full_kv_num_blocks[0, 0], mask.full_kv_indices[0, 0], strict=True)
    ):
        full[row, keys[:count].long()] = True
    assert full.equal(seen.all(-1))


def test_a_gpu_refuses_products_of_a_query_and_a_key():
    tensors = [torch.zeros(1, 2, LENGTH, 16)] * 3
    mod = SCORES["products of a query and a key"](operands()[3])
    with pytest.raises(ModLoweringError, match="score_mod cannot be compiled"):
        flexhop.explain(*tensors, mod, capability=(9, 0))
