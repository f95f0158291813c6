"""scaled_dot_product_attention of dense tensors: the same as PyTorch's, in fp64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import flexhop
from flexhop import errors

pytestmark = pytest.mark.filterwarnings("ignore::flexhop.errors.EagerWarning")
RUN = pytest.mark.parametrize("compiled", [False, True], ids=["eager", "fullgraph"])
SHAPE = ((2, 4, 37, 16), (2, 4, 50, 16), (2, 4, 50, 8))


def leaf(*size):
    return torch.randn(size, dtype=torch.float64, requires_grad=True)


def boolean(*size):
    mask = torch.rand(size) > 0.4
    mask[..., 0, :] = False  # a query that sees nothing
    return mask


def padding(*lengths):
    return torch.arange(max(lengths)) < torch.tensor(lengths)[:, None, None, None]


# Operands' shapes, and a function that makes the arguments.
CALLS = {
    "plain": (SHAPE, lambda: {}),
    "scale": (SHAPE, lambda: {"scale": 0.3}),
    "causal": (SHAPE, lambda: {"is_causal": True}),
    "causal_tall": (((1, 2, 300, 8), (1, 2, 140, 8), (1, 2, 140, 8)), lambda: {"is_causal": True}),
    "gqa": (((2, 6, 20, 8), (2, 2, 30, 8), (2, 2, 30, 8)), lambda: {"enable_gqa": True}),
    "one_head": (((2, 6, 20, 8), (2, 1, 30, 8), (2, 1, 30, 8)), lambda: {"is_causal": True}),
    "bool": (SHAPE, lambda: {"attn_mask": boolean(2, 4, 37, 50)}),
    "bool_rows": (SHAPE, lambda: {"attn_mask": boolean(37, 50)}),
    "bool_padding": (SHAPE, lambda: {"attn_mask": padding(50, 9)}),
    "bool_expanded": (SHAPE, lambda: {"attn_mask": boolean(2, 1, 37, 50).expand(2, 4, 37, 50)}),
    "one": (SHAPE, lambda: {"attn_mask": torch.ones(1, 1, dtype=torch.bool)}),
    "bias": (SHAPE, lambda: {"attn_mask": leaf(1, 4, 37, 50)}),
    "bias_keys": (SHAPE, lambda: {"attn_mask": leaf(1, 50)}),
    "batches": (((1, 4, 9, 8), (3, 4, 9, 8), (1, 4, 9, 8)), lambda: {}),
    "three": (((4, 9, 8), (4, 9, 8), (4, 9, 8)), lambda: {"attn_mask": boolean(4, 9, 9)}),
    "four": (
        ((2, 1, 4, 9, 8), (2, 3, 1, 7, 8), (1, 3, 4, 7, 8)),
        lambda: {"attn_mask": leaf(3, 1, 9, 7)},
    ),
    "five": (((2, 2, 2, 2, 9, 8),) * 3, lambda: {"attn_mask": boolean(2, 1, 2, 1, 9, 9)}),
    "two": (((9, 8), (7, 8), (7, 8)), lambda: {"attn_mask": boolean(9, 7)}),
}  # fmt: skip


@RUN
@pytest.mark.parametrize("name", CALLS)
def test_equals_that_of_torch(name, compiled):
    torch.manual_seed(0)
    shapes, make = CALLS[name]
    operands, arguments = [leaf(*shape) for shape in shapes], make()
    attention = flexhop.scaled_dot_product_attention
    if compiled:
        attention = torch.compile(attention, fullgraph=True, backend="aot_eager")
    out = attention(*operands, **arguments)
    with sdpa_kernel(SDPBackend.MATH):
        expected = F.scaled_dot_product_attention(*operands, **arguments)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
    grad = torch.randn_like(expected)
    mask = arguments.get("attn_mask")
    leaves = [*operands] if mask is None or not mask.requires_grad else [*operands, mask]
    pairs = zip(
        torch.autograd.grad(out, leaves, grad), torch.autograd.grad(expected, leaves, grad),
        strict=True,
    )  # fmt: skip
    for one, other in pairs:
        torch.testing.assert_close(one, other, rtol=0, atol=1e-11)


def test_compiled_by_inductor():
    operands = [torch.randn(2, 2, 40, 16) for _ in range(3)]
    mask = boolean(40, 40)
    attention = torch.compile(flexhop.scaled_dot_product_attention, fullgraph=True)
    expected = F.scaled_dot_product_attention(*operands, attn_mask=mask)
    torch.testing.assert_close(attention(*operands, attn_mask=mask), expected)


def test_a_broadcast_mask_is_not_expanded(monkeypatch):
    seen = []
    monkeypatch.setattr(
        "flexhop.sdpa.attend", lambda *args, **_: seen.append(args[3].__closure__) or args[0]
    )
    operands = [torch.randn(8, 4, 64, 8) for _ in range(3)]
    keys = torch.ones(1, 1, 1, 64, dtype=torch.bool).expand(8, 4, 64, 64)
    flexhop.scaled_dot_product_attention(*operands, attn_mask=keys)
    tables = [c.cell_contents for c in seen[0] if isinstance(c.cell_contents, torch.Tensor)]
    assert [t.untyped_storage().nbytes() for t in tables] == [64]


def test_autocast():
    operands = [torch.randn(1, 2, 20, 16) for _ in range(3)]
    with torch.autocast("cpu", torch.bfloat16):
        out = flexhop.scaled_dot_product_attention(*operands, is_causal=True)
        expected = F.scaled_dot_product_attention(*operands, is_causal=True)
    assert out.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(out, expected, rtol=2e-2, atol=2e-2)


@RUN
def test_autocast_leaves_fp64_alone(compiled):
    operands = [leaf(1, 2, 20, 16) for _ in range(3)]
    attention = flexhop.scaled_dot_product_attention
    if compiled:
        attention = torch.compile(attention, fullgraph=True, backend="aot_eager")
    with torch.autocast("cpu", torch.bfloat16):
        out = attention(*operands)
    torch.testing.assert_close(out, F.scaled_dot_product_attention(*operands))


def bad_calls():
    mask = torch.ones(37, 50, dtype=torch.bool)
    return {
        "dropout": ({"dropout_p": -0.5}, errors.OptionValueError, "dropout_p value -0.5"),
        "both": (
            {"attn_mask": mask, "is_causal": True}, errors.OptionConflictError,
            "attn_mask cannot be combined with is_causal=True",
        ),
        "dtype": ({"attn_mask": mask.int()}, errors.AttentionMaskError, "is torch.int32"),
        "device": ({"attn_mask": mask.to("meta")}, errors.AttentionMaskError, "is on meta"),
        "type": ({"attn_mask": "causal"}, errors.AttentionMaskError, "attn_mask is a str"),
        "shape": (
            {"attn_mask": mask.mT}, errors.AttentionMaskError,
            r"has shape \[50, 37\], but must broadcast to \[2, 4, 37, 50\]",
        ),
    }  # fmt: skip


@RUN
@pytest.mark.parametrize("name", bad_calls())
def test_what_it_refuses(name, compiled):
    arguments, kind, text = bad_calls()[name]
    attention = flexhop.scaled_dot_product_attention
    if compiled:
        attention = torch.compile(attention, fullgraph=True, backend="eager")
    with pytest.raises(kind, match=text):
        attention(*(torch.randn(shape) for shape in SHAPE), **arguments)


def test_other_operands_are_refused():
    attention = flexhop.scaled_dot_product_attention
    with pytest.raises(errors.HeadCountError):
        attention(torch.randn(1, 4, 8, 8), *(torch.randn(1, 2, 8, 8) for _ in range(2)))
    wide = torch.randn(2, 3, 2, 8, 8)
    with pytest.raises(errors.RankError, match="value must have 5 dimensions, but has 4"):
        attention(wide, wide, wide[0])
    with pytest.raises(errors.BatchError, match=r"query has \[2, 3\], key has \[2, 2\]"):
        attention(wide, wide[:, :2], wide)
    with pytest.raises(errors.OptionValueError, match="query value 'NoneType'"):
        attention(None, wide, wide)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_nested_operands_take_no_mask():
    nested = torch.nested.nested_tensor_from_jagged(
        torch.randn(9, 2, 8), torch.tensor([0, 4, 9])
    ).transpose(1, 2)
    mask = torch.ones(9, 9, dtype=torch.bool)
    with pytest.raises(errors.NestedOperandError, match="attn_mask is given with nested"):
        flexhop.scaled_dot_product_attention(nested, nested, nested, attn_mask=mask)
