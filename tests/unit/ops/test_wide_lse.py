"""Lse as two numbers in one of fp64."""

from __future__ import annotations

import math

import pytest
import torch

import flexhop
from flexhop.ops import wide_lse

LOWEST = torch.finfo(torch.float32).min


@pytest.mark.parametrize("shift", [0.0, 1.5, -7.0, 1e4, -1e9, -(2.0**30), 1e30, LOWEST, -LOWEST])
@pytest.mark.parametrize("keys", [1, 3, 200, 100_000])
def test_parts_give_the_sum_back(shift: float, keys: int):
    log = torch.tensor(math.log(keys))
    found = wide_lse.joined(torch.tensor(shift), log)
    first, rest = wide_lse.parts_of(found)
    assert found.dtype == torch.float64
    assert first == torch.tensor(shift) + log == found.to(torch.float32)
    exact = math.log(keys) + (float(torch.tensor(shift)) - float(first))
    assert abs(float(rest) - exact) <= 2.0**-21


@pytest.mark.parametrize("end", [math.inf, -math.inf, math.nan])
def test_ends_stay(end: float):
    found = wide_lse.joined(torch.tensor(end), torch.tensor(0.0))
    first, rest = wide_lse.parts_of(found)
    assert torch.equal(first.isnan(), torch.tensor(math.isnan(end))) and rest == 0
    assert math.isnan(end) or float(first) == end


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_caller_gets_fp32(backend: str):
    query = torch.randn(1, 1, 32, 16, requires_grad=True)

    def attend(query: torch.Tensor) -> torch.Tensor:
        _, aux = flexhop.flex_attention(
            query, query, query, lambda s, b, h, q, k: torch.where(q > 20, s, -1e9),
            return_aux=flexhop.AuxRequest(lse=True),
        )  # fmt: skip
        return aux.lse

    lse = torch.compile(attend, backend=backend, fullgraph=True)(query)
    assert lse.dtype == torch.float32
    lse[..., 21:].sum().backward()
    assert query.grad is not None and bool(query.grad.isfinite().all())


def test_vmap_gives_the_same_numbers():
    shift = torch.tensor([0.0, 1.5, -7.0, 1e-38, -1e9, 1e30, LOWEST, -LOWEST, -math.inf, math.nan])
    log = torch.linspace(0.0, 9.0, len(shift))
    found = wide_lse.joined(shift, log)
    torch.testing.assert_close(
        torch.vmap(wide_lse.joined)(shift, log), found, rtol=0, atol=0, equal_nan=True
    )
    both = torch.vmap(lambda lse: tuple(wide_lse.parts_of(lse)))(found)
    torch.testing.assert_close(
        both, tuple(wide_lse.parts_of(found)), rtol=0, atol=0, equal_nan=True
    )


@pytest.mark.filterwarnings("ignore::flexhop.errors.EagerWarning")
@pytest.mark.parametrize("number", [-1e4, -1e9, -1e20, -3.3e38])
def test_gradients_of_a_large_lse_are_weights(number: float):
    query, key, value = (torch.randn(1, 1, 4, 8) for _ in range(3))
    bias = torch.full((4,), number, requires_grad=True)
    lse_alone = flexhop.AuxRequest(lse=True)
    _, aux = flexhop.flex_attention(
        query, key, value, lambda s, b, h, q, k: s * 0 + bias[k], return_aux=lse_alone
    )
    (found,) = torch.autograd.grad(aux.lse.sum(), bias)
    assert torch.allclose(found, torch.ones(4))  # of 4 rows, each with weights of 1/4
