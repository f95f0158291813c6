"""torch.vmap of compiled calls, in Triton's interpreter: operands that are mapped, and shared."""

import pytest
import torch

import flexhop
from flexhop.offline.interpret import Memory, interpret
from tests.budgets import assert_within_budget

pytestmark = pytest.mark.filterwarnings("ignore::flexhop.errors.EagerWarning")
SHAPE = (1, 2, 37, 16)  # one batch: operands of one batch may be broadcast


PARTS = {name: name.split() for name in ("q", "k v", "v", "q v", "table")}


@pytest.mark.parametrize("mapped", PARTS)
def test_mapped_operands(mapped):
    """Key and value keep one batch size if one of them is shared."""
    generator = torch.Generator().manual_seed(0)
    names = {"q": SHAPE, "k": SHAPE, "v": SHAPE, "table": SHAPE[2:3]}
    operands = {
        name: torch.randn((2, *shape) if name in PARTS[mapped] else shape, generator=generator)
        for name, shape in names.items()
    }

    def attend(q, k, v, table):
        return flexhop.flex_attention(q, k, v, lambda s, b, h, i, j: s + table[j])

    def call(*tensors):
        return torch.vmap(attend, in_dims=tuple(0 if n in PARTS[mapped] else None for n in names))(
            *tensors
        )

    inputs = [t.requires_grad_() for t in operands.values()]
    out = interpret(
        call, *inputs, grad=True, memory=Memory(poison=True, check_bounds=True)
    ).result  # fmt: skip
    exact, plain = (
        [t.detach().to(dtype).requires_grad_() for t in inputs]
        for dtype in (torch.float64, torch.float32)
    )
    gold, reference = call(*exact), call(*plain)
    assert_within_budget(out, gold, reference, name="out")
    gold.sum().backward()
    reference.sum().backward()
    for name, tensor, wide, narrow in zip(names, inputs, exact, plain, strict=True):
        assert_within_budget(tensor.grad, wide.grad, narrow.grad, name=name, captured=True)
