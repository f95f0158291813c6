"""Mods that write to what they are given, or to what they made, mean what plain PyTorch means."""

from __future__ import annotations

import pytest
import torch

import flexhop
from flexhop import errors
from flexhop.offline import generate_code
from tests.unit.ops.support import SHAPE, compiled, operands, quiet

pytestmark = quiet
BIAS = torch.randn(2, 24, dtype=torch.float64).requires_grad_()
FLAGS = torch.arange(24) % 3 > 0


def added(s, b, h, q, k):
    s += BIAS[h, k]
    s *= 1.5
    return s


def methods(s, b, h, q, k):
    kept = s * s
    s.mul_(BIAS[h, k]).sub_(0.1 * q)
    s.masked_fill_(q < k - 9, -5).clamp_(-4, max=3)
    s.tanh_()
    s /= 2
    return kept + s


def filled(s, b, h, q, k):
    s[...] = s * 2 + BIAS[h, k]
    s[q < k] = -3.0
    other = s
    other.copy_(other.sin())
    torch.add(s, 0.1 * k, out=s)
    return torch.nn.functional.leaky_relu(s, 0.2, inplace=True)


def indices(s, b, h, q, k):
    q -= k
    k.abs_().remainder_(5)
    q //= 3
    return s + q * 0.1 + k * BIAS[h, 0]


def rows(s, b, h, q, k):
    row = s.new_zeros(3)
    row[0] = s
    row[1] += BIAS[h, k]
    row[k % 3] = row[0] * 2
    row.view(3, 1)[2, 0].sub_(1)
    return row[0] - row.mul_(row.flip(0)).sum()


def views(s, b, h, q, k):
    line = s.view(1)
    line *= 2
    square = line.unsqueeze(0)
    square[0, 0] = square[0, 0] + BIAS[h, k]
    return s + line[0] * square.squeeze()


PLAIN = {
    added: lambda s, b, h, q, k: (s + BIAS[h, k]) * 1.5,
    methods: lambda s, b, h, q, k: (
        s * s
        + torch.where(q < k - 9, -5, s * BIAS[h, k] - 0.1 * q).clamp(-4, 3).tanh() / 2
    ),
    filled: lambda s, b, h, q, k: torch.nn.functional.leaky_relu(
        torch.where(q < k, -3.0, s * 2 + BIAS[h, k]).sin() + 0.1 * k, 0.2
    ),
    indices: lambda s, b, h, q, k: (
        s + (q - k).div(3, rounding_mode="floor") * 0.1 + (k % 5) * BIAS[h, 0]
    ),
    rows: lambda s, b, h, q, k: _row(s, BIAS[h, k], k),
    views: lambda s, b, h, q, k: (2 * s + BIAS[h, k]) * (1 + 2 * s + BIAS[h, k]),
}  # fmt: skip


def _row(s, bias, k):
    first = torch.where(k % 3 == 0, 2 * s, s)
    second = torch.where(k % 3 == 1, 2 * s, bias)
    third = torch.where(k % 3 == 2, 2 * s, 0) - 1
    return -first * third - second * second  # `row[0]` is a view of what mul_ changes


def narrows(b, h, q, k):
    keep = q >= k
    keep &= q - k < 9
    keep |= FLAGS[k]
    keep.logical_xor_(k == 3)
    return keep


def moves(b, h, q, k):
    k -= 2
    keep = FLAGS[k]
    keep &= q >= k
    return keep.logical_or_(q == k + 2)


MASKS = {
    narrows: lambda b, h, q, k: (((q >= k) & (q - k < 9)) | FLAGS[k]) ^ (k == 3),
    moves: lambda b, h, q, k: (FLAGS[k - 2] & (q >= k - 2)) | (q == k),
}


def results(call, inputs, mod, mask=None):
    out = call(*inputs, mod, mask)
    leaves = [*inputs, BIAS]
    found = torch.autograd.grad(out.square().sum(), leaves, allow_unused=True)
    return [out, *(g for g in found if g is not None)]


@pytest.mark.parametrize("mod", PLAIN, ids=lambda mod: mod.__name__)
def test_a_score_mod_may_write(mod):
    torch.manual_seed(0)
    inputs = operands(dtype=torch.float64, grad=True)
    expected = results(flexhop.flex_attention, inputs, PLAIN[mod])
    for call in (flexhop.flex_attention, compiled(flexhop.flex_attention)):
        found = results(call, inputs, mod)
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("mask", MASKS, ids=lambda mask: mask.__name__)
def test_a_mask_mod_may_write(mask):
    """It has no part in the indices that score_mod gets."""
    torch.manual_seed(0)
    inputs = operands(dtype=torch.float64, grad=True)

    def attend(query, key, value, mod, mask):
        mask = flexhop.create_block_mask(mask, *SHAPE, "cpu", BLOCK_SIZE=16)
        return flexhop.flex_attention(query, key, value, mod, mask)

    expected = results(attend, inputs, PLAIN[added], MASKS[mask])
    for call in (attend, compiled(attend), compiled(attend, dynamic=True)):
        found = results(call, inputs, added, mask)
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def scaled(weight):
    def mod(s, b, h, q, k):
        s *= weight
        return s

    return mod


def test_a_number_that_changes_between_calls_is_written():
    inputs, call = operands(grad=True), compiled(flexhop.flex_attention, dynamic=True)
    for weight in (0.5, 0.25, 0.125):
        expected = flexhop.flex_attention(*inputs, lambda s, *_: s * weight)  # noqa: B023
        torch.testing.assert_close(call(*inputs, scaled(weight)), expected)


@pytest.mark.parametrize("backend", ["triton", "hopper"])
def test_kernels_of_mods_that_write(backend):
    inputs = [
        torch.randn(1, 2, 128, 64, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)
    ]
    options = flexhop.KernelOptions(backend=backend)
    generated = generate_code(
        lambda *x: flexhop.flex_attention(*x, methods, kernel_options=options), *inputs, grad=True
    )
    assert len(generated.templates) >= 2


def test_parts_that_cannot_be_followed_are_refused():
    def mod(s, b, h, q, k):
        pair = torch.stack([s, s])
        pair.expand(2, 2)[0, 1].add_(1)
        pair.t()[0] = 3
        return pair.sum()

    for call in (flexhop.flex_attention, compiled(flexhop.flex_attention)):
        with pytest.raises(errors.ModLoweringError, match=r"in-place operation.*test_writes"):
            call(*operands(), mod)


def test_dtypes_that_writes_do_not_take_are_errors_of_pytorch():
    def mod(s, b, h, q, k):
        q += 0.5
        return s + q

    with pytest.raises(RuntimeError, match="can't be cast"):
        flexhop.flex_attention(*operands(), mod)
