"""Soft caps as one operator of forward kernels."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import flexhop
from flexhop.compat.kernels.functions import scaled_tanh
from flexhop.lowering.mods.caps import fold_caps, foldable_scale
from flexhop.offline import generate_code
from flexhop.offline.packed_assembly import run_packed
from flexhop.ops.graphs.subgraphs import trace_score

TABLE = torch.tensor([3.0, 20.0])
SCORES = torch.cat([torch.logspace(-20, 3, 999), -torch.logspace(-20, 3, 999), torch.zeros(1)])


def folded(mod):
    """The graph of a mod as forward kernels have it; it has the same values."""
    graph = trace_score(mod, torch.zeros(1, 2, 2, 64, dtype=torch.bfloat16), ())
    fast = fold_caps(graph, 0.0).graph
    zero = torch.tensor(0, dtype=torch.int32)
    for score in SCORES[::97]:
        at = (score, zero, zero + 1, zero + 5, zero + 2)
        torch.testing.assert_close(fast(*at), graph(*at), rtol=1e-6, atol=1e-6)
    return fast


@pytest.mark.parametrize(
    ("mod", "factors"),
    [
        (lambda s, b, h, q, k: 30 * torch.tanh(s / 30), (1 / 30, 30.0)),
        (lambda s, b, h, q, k: torch.tanh(s * 0.05) * 20, (0.05, 20.0)),
        (lambda s, b, h, q, k: 30 * torch.tanh(s / 30) - 0.1 * (q - k), (1 / 30, 30.0)),
        (lambda s, b, h, q, k: s - torch.tanh(s) * 5.0, (1.0, 5.0)),
        (lambda s, b, h, q, k: torch.tanh(TABLE[h] * s) * -3, (1.0, -3.0)),
        (lambda s, b, h, q, k: torch.tanh(s / -30), (-1 / 30, 1.0)),
        (lambda s, b, h, q, k: torch.tanh(s) + TABLE[h], (1.0, 1.0)),
    ],
)
def test_factors_of_tanh_are_folded(mod, factors):
    (node,) = folded(mod).graph.find_nodes(
        op="call_function", target=torch.ops.flexhop.scaled_tanh.default
    )
    assert node.args[1:] == pytest.approx(factors)


@pytest.mark.parametrize(
    "mod",
    [
        lambda s, b, h, q, k: torch.tanh(s) * TABLE[h],
        lambda s, b, h, q, k: TABLE[h] * torch.tanh(s / 4),
        lambda s, b, h, q, k: (s - torch.tanh(s)).abs().sqrt(),
        lambda s, b, h, q, k: 1e4 * torch.tanh(s / 1e4),
        lambda s, b, h, q, k: torch.where(q > k, 5 * torch.tanh(s), s),
        lambda s, b, h, q, k: torch.tanh(s.double() / 3).float(),
        lambda s, b, h, q, k: torch.tanh(s * 1e-9),
    ],
)
def test_other_products_stay(mod):
    assert "scaled_tanh" not in folded(mod).code


def test_tanh_that_is_used_otherwise_stays():
    def mod(s, b, h, q, k):
        t = torch.tanh(s / 30)
        return 30 * t + t * t

    assert "scaled_tanh" not in folded(mod).code


@pytest.mark.parametrize(("inner", "outer"), [(1 / 30, 30.0), (0.02, 50.0), (2.0, -0.7), (-1, 1)])
def test_texts_have_the_precision_of_tanh(inner, outer):
    text = scaled_tanh(inner, outer).text
    (found,) = run_packed(text, 1, [SCORES.float().numpy()], [np.dtype(np.float32)])
    exact = outer * torch.tanh(inner * SCORES.float().double())
    assert bool(((torch.from_numpy(found) - exact).abs() <= abs(outer) * 2.0**-21).all())
    assert found[-1] == 0  # of 0
    ends = np.array([math.inf, -math.inf, math.nan], dtype=np.float32)
    (found,) = run_packed(text, 1, [ends], [np.dtype(np.float32)])
    sign = math.copysign(1, inner)
    np.testing.assert_allclose(found, [sign * outer, -sign * outer, math.nan], rtol=1e-7)


@pytest.mark.parametrize("scale", [0.125, 0.0, None])
@pytest.mark.parametrize("mod", [flexhop.mods.softcap(30.0), lambda s, b, h, q, k: torch.tanh(s)])
def test_a_cap_that_is_the_whole_mod_takes_products_and_returns_exponents(mod, scale):
    graph = trace_score(mod, torch.zeros(1, 2, 2, 64, dtype=torch.bfloat16), ())
    fast = fold_caps(graph, scale)
    assert fast.takes_products == bool(scale)
    zero = torch.tensor(0, dtype=torch.int32)
    for product in SCORES[::97]:
        at = (zero, zero + 1, zero + 5, zero + 2)
        expected = graph(product * scale, *at) / math.log(2) if scale else graph(product, *at)
        torch.testing.assert_close(fast.graph(product, *at), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "mod",
    [
        lambda s, b, h, q, k: 30 * torch.tanh(s / 30) + 0.5,
        lambda s, b, h, q, k: 30 * torch.tanh((s + TABLE[h]) / 30),
        lambda s, b, h, q, k: 30 * torch.tanh(s / 30) * TABLE[h],
        lambda s, b, h, q, k: 1e4 * torch.tanh(s / 1e4),
    ],
)
def test_others_take_scores(mod):
    graph = trace_score(mod, torch.zeros(1, 2, 2, 64, dtype=torch.bfloat16), ())
    assert not fold_caps(graph, 0.125).takes_products


@pytest.mark.parametrize(
    ("options", "scale", "expected"),
    [
        ({}, 0.125, 0.125), ({}, -0.125, 0.0), ({}, 0.0, 0.0),
        ({"prescale_qk": True}, 0.125, 0.0), ({"return_max": True}, 0.125, None),
    ],
)  # fmt: skip
def test_scales_that_a_cap_may_hold(options, scale, expected):
    args = SimpleNamespace(options=options, scale=scale)
    assert foldable_scale(args, has_texts=True) == expected
    assert foldable_scale(args, has_texts=False) is None


def texts(dtype: torch.dtype) -> list[str]:
    """The score_mods of the kernels of a call with a soft cap: forward, then backward."""
    inputs = [torch.zeros(1, 2, 1024, 64, dtype=dtype, requires_grad=True) for _ in range(3)]
    found = generate_code(
        lambda q, k, v: flexhop.flex_attention(
            q, k, v, lambda s, b, h, m, n: 30 * torch.tanh(s / 30)
        ),
        *inputs, grad=True,
    )  # fmt: skip
    return [kernel.source for kernel in found.templates]


def test_forward_kernels_have_one_text_and_backward_kernels_tanh():
    forward, *backward = texts(torch.bfloat16)
    assert "rcp.approx" in forward and "PTX_TANH)" not in forward
    assert all("PTX_TANH)" in kernel for kernel in backward)


def test_kernels_of_float32_call_the_library():
    assert all("libdevice.tanh" in kernel for kernel in texts(torch.float32))
