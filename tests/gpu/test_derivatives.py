"""Forward mode, second orders, and kernels from eager code on a GPU, against dense fp64."""

from __future__ import annotations

import math

import pytest
import torch
from torch.func import grad, jvp
from torch.testing._internal.common_utils import DeterministicGuard

import flexhop
from flexhop import AuxRequest, create_block_mask, flex_attention
from flexhop.masks import causal

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore::flexhop.errors.EagerWarning"),
]
B, HQ, HKV, M, N = 2, 4, 2, 300, 413
SLOPES = (0.5, 0.25, 0.125, 0.0625)


def flexible(query, key, value, slopes=None):
    slopes = torch.tensor(SLOPES, device="cuda") if slopes is None else slopes
    mask = create_block_mask(causal, None, None, M, N, "cuda")
    out, aux = flex_attention(
        query, key, value, lambda s, b, h, i, j: 3 * (s / 3).tanh() + slopes[h] * (j - i), mask,
        enable_gqa=True, return_aux=AuxRequest(lse=True),
    )  # fmt: skip
    return out, aux.lse


def dense(query, key, value, slopes=None):
    key, value = (t.repeat_interleave(HQ // HKV, 1) for t in (key, value))
    i, j = torch.arange(M, device="cuda")[:, None], torch.arange(N, device="cuda")
    slopes = torch.tensor(SLOPES, device="cuda") if slopes is None else slopes
    slopes = slopes.to(query.dtype)[:, None, None]
    raw = query @ key.mT / math.sqrt(query.size(-1))
    scores = torch.where(i >= j, 3 * (raw / 3).tanh() + slopes * (j - i), -math.inf)
    return torch.softmax(scores, -1) @ value, scores.logsumexp(-1)


def loss(attend, *x):
    out, lse = attend(*x)
    return out.double().sin().sum() + lse.double().square().mean()


def second(attend):
    """Of seven inputs, the last of which are slopes that learn, these get a gradient too."""

    def product(*x):
        grads = grad(lambda *y: loss(attend, *y, *x[6:]), (0, 1, 2))(*x[:3])
        return sum((g.double() * a.double()).sum() for g, a in zip(grads, x[3:6], strict=True))

    return lambda *x: grad(product, (0, 1, 2, *range(6, len(x))))(*x)


def of_tangent(attend):
    def value(*x):
        out, moved = jvp(lambda *y: attend(*y, *x[6:])[0], x[:3], x[3:6])
        return (out - moved).double().square().sum()

    return lambda *x: grad(value, tuple(range(len(x))))(*x)


DERIVATIVES = {
    "tangent": lambda f: lambda *x: jvp(f, x[:3], x[3:]),
    "second": second,
    "of_tangent": of_tangent,
}


@pytest.mark.parametrize("run", ["compiled", "eager"])
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("name", DERIVATIVES)
def test_derivatives(name, width, run):
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = [(B, HQ, M, width), (B, HKV, N, width), (B, HKV, N, width)] * 2
    x = [
        torch.randn(shape, generator=generator, device="cuda").to(torch.bfloat16)
        for shape in shapes
    ]
    check(name, x, run)


@pytest.mark.parametrize("run", ["compiled", "eager"])
@pytest.mark.parametrize("is_deterministic", [False, True])
@pytest.mark.parametrize("name", ["second", "of_tangent"])
def test_slopes_that_learn(name, is_deterministic, run):
    generator = torch.Generator("cuda").manual_seed(1)
    shapes = [(B, HQ, M, 64), (B, HKV, N, 64), (B, HKV, N, 64)] * 2
    x = [
        torch.randn(shape, generator=generator, device="cuda").to(torch.bfloat16)
        for shape in shapes
    ]
    with DeterministicGuard(is_deterministic):
        check(name, [*x, torch.tensor(SLOPES, device="cuda")], run)


def check(name, x, run):
    derivative = DERIVATIVES[name](flexible)
    if run == "compiled":
        found = torch.compile(derivative, fullgraph=True)(*x)
    else:
        with flexhop.eager_kernels():
            found = derivative(*x)
    gold = DERIVATIVES[name](dense)(*(t.double() for t in x))
    plain = DERIVATIVES[name](dense)(*x)
    flat = [torch.utils._pytree.tree_leaves(results) for results in (found, gold, plain)]
    for actual, exact, rounded in zip(*flat, strict=True):
        error = (actual.double() - exact).abs().mean()
        budget = 1.5 * (rounded.double() - exact).abs().mean() + 2**-9 * exact.abs().mean()
        assert error <= budget, (float(error), float(budget))
