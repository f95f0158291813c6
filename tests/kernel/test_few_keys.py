"""Derivatives of rows that see few keys: sums of 16-bit kernels whose terms cancel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, jvp

import flexhop
from flexhop import KernelOptions
from flexhop.offline.interpret import Emulator, Memory, interpret

pytestmark = pytest.mark.filterwarnings("ignore::flexhop.errors.EagerWarning")
HALVES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
OPTIONS = KernelOptions(backend="triton")
LENGTH = 160  # several tiles of keys


def few(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    """One key; two neighbours; two keys of different tiles; all; none."""
    is_near = (j == i) | ((j == i - 1) & (i % 5 == 1))
    is_far = ((j == i % 32) | (j == i % 32 + 128)) & (i % 5 == 2)
    return (is_near & (i % 5 < 2)) | is_far | (i % 5 == 3)


def one(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return i == j


def faint(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    """The first keys weigh nothing beside later ones."""
    return s - torch.where(j < 32, 24.0, 0.0)


def mask_of(mask_mod: Callable[..., Tensor]) -> Any:
    return flexhop.create_block_mask(mask_mod, None, None, LENGTH, LENGTH, "cpu", BLOCK_SIZE=32)


@HALVES
@pytest.mark.parametrize("listed", [True, False], ids=["mask", "score"])
def test_tangents_with_a_common_part(dtype: torch.dtype, listed: bool):
    """What is common to the tangents of a row's scores does not reach its out. The kernel rounded
    it with them, and subtracted it later. `listed`: hidden by the mask, or by the score alone."""
    mask = mask_of(few) if listed else None

    def score(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        s = faint(s, b, h, i, j)
        return s if listed else torch.where(few(b, h, i, j), s, -torch.inf)

    def push(*x: Tensor) -> Tensor:
        def attend(query: Tensor, key: Tensor) -> Any:
            return flexhop.flex_attention(query, key, x[2], score, mask, kernel_options=OPTIONS)

        return jvp(attend, x[:2], x[3:])[1]

    torch.manual_seed(0)
    query, key, value, moved_query, moved_key = torch.randn(5, 1, 2, LENGTH, 16)
    inputs = [query, key, value, moved_query / 8, moved_key / 8 + 30 * torch.randn(16)]
    inputs = [t.to(dtype) for t in inputs]
    found = interpret(push, *inputs, memory=Memory(poison=True, check_bounds=True))
    assert any("push_blocks" in kernel.functions for kernel in found.templates)

    query, key, value, moved_query, moved_key = (t.double() for t in inputs)
    at = torch.arange(LENGTH)
    seen = few(at, at, at[:, None], at)
    scores = faint(query @ key.mT / 4, at, at, at, at).where(seen, -torch.inf)
    weights = scores.softmax(-1).nan_to_num()
    moved = (moved_query @ key.mT + query @ moved_key.mT) / 4
    means = (weights * moved).sum(-1, keepdim=True)
    exact = (weights * (moved - means)) @ value
    spread = (weights * (moved - means).abs()).sum(-1, keepdim=True)
    unit = torch.finfo(dtype).eps
    bound = unit * (spread * value.abs().amax(-2, keepdim=True) + exact.abs()) + 1e-6
    worst = ((found.result.double() - exact).abs() / bound).amax(-1)
    assert worst.max() <= 1, worst.max()
    assert not found.result[..., at % 5 == 4, :].any()


@HALVES
def test_weights_that_grow_along_the_keys(dtype: torch.dtype):
    """As those of ALiBi, whose tangents along the slope are distances: those of the first keys are
    far from the mean. The kernel subtracted the mean of the first keys before it rounded."""
    length = 512

    def push(*x: Tensor) -> Tensor:
        def attend(slopes: Tensor) -> Any:
            def score(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
                return s + slopes[h] * (j - i)

            return flexhop.flex_attention(*x[:3], score, kernel_options=OPTIONS)

        return jvp(attend, x[3:4], x[4:])[1]

    torch.manual_seed(0)
    inputs = [
        *torch.randn(3, 1, 2, length, 16).to(dtype),
        torch.tensor([0.06, 0.1]),
        torch.ones(2),
    ]
    found = interpret(push, *inputs, memory=Memory(poison=True, check_bounds=True))
    assert any("push_blocks" in kernel.functions for kernel in found.templates)

    query, key, value, slopes, _ = (t.double() for t in inputs)
    at = torch.arange(length)
    moved = (at - at[:, None]).double()
    weights = (query @ key.mT / 4 + slopes[:, None, None] * moved).softmax(-1)
    distances = moved - (weights * moved).sum(-1, keepdim=True)
    exact = (weights * distances) @ value
    spread = (weights * distances.abs()).sum(-1, keepdim=True)
    error = (found.result - exact).abs()
    assert bool((error <= 4 * torch.finfo(dtype).eps * spread).all())


@HALVES
def test_infinite_tangents_stay_in_their_rows(dtype: torch.dtype):
    """Those of keys that the mask hides reach nothing, whatever is subtracted from the others."""
    mask = mask_of(one)

    def push(query: Tensor, slopes: Tensor, moved: Tensor) -> Tensor:
        def attend(slopes: Tensor) -> Any:
            def steep(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
                return s + slopes[j]

            return flexhop.flex_attention(query, query, query, steep, mask, kernel_options=OPTIONS)

        return jvp(attend, (slopes,), (moved,))[1]

    query, slopes, moved = torch.randn(1, 1, LENGTH, 16), torch.zeros(LENGTH), torch.ones(LENGTH)
    moved[7], moved[100] = torch.inf, torch.nan
    found = interpret(push, query.to(dtype), slopes, moved).result
    is_exact = torch.isfinite(moved)
    assert found[0, 0, ~is_exact].isnan().all()
    assert not found[0, 0, is_exact].any()


def twice(mask: Any, options: KernelOptions) -> Callable[..., tuple[Tensor, ...]]:
    """Gradients of a product of gradients, of query, key and value."""

    def attend(*x: Tensor) -> Any:
        return flexhop.flex_attention(*x, block_mask=mask, kernel_options=options)

    def run(*x: Tensor) -> tuple[Tensor, ...]:
        def product(*y: Tensor) -> Tensor:
            first = grad(lambda *z: (attend(*z).float() * x[6]).sum(), (0, 1, 2))(*y)
            return sum((a.float() * b).sum() for a, b in zip(first, x[3:6], strict=True))

        return grad(product, (0, 1, 2))(*x[:3])

    return run


@HALVES
def test_second_orders_of_one_key(dtype: torch.dtype):
    """Gradients of query and key are 0. Kernels took rowsum(out * grad_out) from a rounded out."""
    torch.manual_seed(0)
    inputs = [*torch.randn(6, 1, 2, LENGTH, 16).to(dtype), torch.randn(1, 2, LENGTH, 16)]
    found = interpret(twice(mask_of(one), OPTIONS), *inputs)
    assert len([k for k in found.templates if "push_grad_tile" in k.functions]) == 3
    of_query, of_key, _ = found.result
    assert max(float(of_query.abs().max()), float(of_key.abs().max())) < 1e-4


@HALVES
def test_second_orders_weigh_as_forward_mode_does(dtype: torch.dtype):
    """They rounded a scaled query, which forward mode does not: weights did not sum to 1."""
    torch.manual_seed(0)
    inputs = [*torch.randn(6, 1, 2, LENGTH, 24).to(dtype), torch.randn(1, 2, LENGTH, 24)]
    prescaled = KernelOptions(backend="triton", prescale_qk=True)
    results = [
        interpret(twice(mask_of(few), options), *inputs).result for options in (OPTIONS, prescaled)
    ]
    for expected, found in zip(*results, strict=True):
        assert torch.equal(found, expected)


@HALVES
def test_tangents_of_one_key_beside_hidden_tiles(dtype: torch.dtype):
    """They are 0. Machine code rounded the mean of a row's tangents for one use, and not for the
    other, where a subtraction followed: every tile of keys added the difference."""

    def score(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return torch.where(j == 0, s, -torch.inf)

    def push(query: Tensor, key: Tensor, value: Tensor, moved: Tensor) -> Tensor:
        def attend(key: Tensor) -> Any:
            return flexhop.flex_attention(query, key, value, score, kernel_options=OPTIONS)

        return jvp(attend, (key,), (moved,))[1]

    torch.manual_seed(0)
    inputs = [torch.randn(1, 1, n, 16).to(dtype) for n in (64, 2048, 2048, 2048)]
    inputs[0] *= 8  # in base 2, the largest weight of large scores is off by the last bits of 1
    found = interpret(
        push, *inputs, memory=Memory(poison=True), emulator=Emulator(80, True)
    ).result
    query, _, value, moved = (t.double() for t in inputs)
    sizes = (query @ moved[..., :1, :].mT / 4).abs() * value[..., :1, :].abs()
    # The mean is a product and a quotient, and each is rounded.
    assert (found.double().abs() <= 2.0**-23 * sizes).all()
