"""Without torch.compile, backward runs mods again, after names may have got other values."""

import types

import pytest
import torch
from torch import nn

import flexhop
from flexhop.mods.frozen import frozen

pytestmark = pytest.mark.filterwarnings("ignore::flexhop.errors.EagerWarning")
LAYERS, HEADS, LENGTH, WIDTH = 3, 2, 20, 8


def leaves():
    torch.manual_seed(3)
    operands = [torch.randn(1, HEADS, LENGTH, WIDTH, dtype=torch.float64) for _ in range(3)]
    return [t.requires_grad_() for t in (*operands, torch.rand(LAYERS, HEADS).double())]


def plain(q, k, v, scales):
    """The layers, in plain PyTorch."""
    distance = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)
    for i, scale in enumerate(scales):
        scores = q @ k.mT / WIDTH**0.5 * scale[:, None, None] - i * 0.1 * distance.abs()
        q = scores.masked_fill(distance.abs() > 3 + i, -torch.inf).softmax(-1) @ v
    return q


def names_of_a_loop(q, k, v, scales):
    for i, scale in enumerate(scales):
        mask = flexhop.create_block_mask(
            lambda b, h, m, n: (m - n).abs() <= 3 + i,  # noqa: B023
            None, None, LENGTH, LENGTH, "cpu", BLOCK_SIZE=16,
        )  # fmt: skip
        mod = lambda s, b, h, m, n: s * scale[h] - i * 0.1 * (m - n).abs()  # noqa: B023, E731
        q = flexhop.flex_attention(q, k, v, mod, mask)
    return q


PROGRAM = """
def helper(number):
    return scales[number]
def mod(s, b, h, m, n):
    return s * helper(i)[h] - i * 0.1 * (m - n).abs()
def visible(b, h, m, n):
    return (m - n).abs() <= 3 + i
for i in range(LAYERS):
    mask = create_block_mask(visible, None, None, LENGTH, LENGTH, "cpu", BLOCK_SIZE=16)
    q = flex_attention(q, k, v, mod, mask)
"""


def names_of_a_notebook(q, k, v, scales):
    """Cells of a notebook have no names but those of the module."""
    module = types.ModuleType("notebook")
    module.__dict__.update(
        q=q, k=k, v=v, scales=scales, LAYERS=LAYERS, LENGTH=LENGTH,
        create_block_mask=flexhop.create_block_mask, flex_attention=flexhop.flex_attention,
    )  # fmt: skip
    exec(PROGRAM, module.__dict__)
    return module.q


class Model(nn.Module):
    """Its attributes change from layer to layer."""

    def mod(self, s, b, h, m, n):
        return s * self.scale[h] - self.numbers["i"] * 0.1 * (m - n).abs()

    def visible(self, b, h, m, n):
        return (m - n).abs() <= 3 + self.numbers["i"]

    def forward(self, q, k, v, scales):
        self.numbers = {}
        for i, self.scale in enumerate(scales):
            self.numbers["i"] = i
            mask = flexhop.create_block_mask(
                self.visible, None, None, LENGTH, LENGTH, "cpu", BLOCK_SIZE=16
            )
            q = flexhop.flex_attention(q, k, v, self.mod, mask)
        return q


@pytest.mark.parametrize("layers", [names_of_a_loop, names_of_a_notebook, Model()])
def test_gradients_are_those_of_the_forward_pass(layers):
    found, wanted = (leaves() for _ in range(2))
    for function, of in ((layers, found), (plain, wanted)):
        function(*of).square().sum().backward()
    for got, expected in zip(found, wanted, strict=True):
        torch.testing.assert_close(got.grad, expected.grad)


def test_a_mod_runs_in_the_forward_pass_as_it_is():
    """Not as a copy: it may note what it saw."""
    seen = 0

    def mod(s, b, h, m, n):
        nonlocal seen
        seen += 1
        return s

    q, k, v, _ = leaves()
    flexhop.flex_attention(q, k, v, mod)
    assert seen == 1


def test_a_tensor_that_is_written_to_before_backward_is_an_error():
    """Backward would compute with other numbers. Compiled calls keep the old ones."""
    q, k, v, _ = leaves()
    bias = torch.zeros(LENGTH, dtype=torch.float64)
    out = flexhop.flex_attention(q, k, v, lambda s, b, h, m, n: s + bias[n])
    bias.add_(1)
    with pytest.raises(flexhop.errors.CaptureChangedError, match="Capture a clone"):
        out.sum().backward()


def test_a_frozen_function_shares_tensors_and_large_containers():
    table, large = torch.rand(3), list(range(1000))
    inner = [lambda: table[0]]

    def function():
        return inner[0](), large[0], table

    copy = frozen(function)
    inner[0] = None
    large[0] = 7
    value, first, same = copy()
    assert value == table[0] and first == 7 and same is table


def test_objects_that_cannot_be_copied_stay():
    class Slotted:
        __slots__ = ("__dict__", "own")

        def __call__(self):
            return self.own

    class Number(int):
        def __call__(self):
            return self + 1

    slotted, number = Slotted(), Number(3)
    slotted.own = 5
    assert frozen(slotted) is slotted and frozen(number) is number
