"""Tables that are made before a call, under the transforms of torch.func and in forward mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import grad, jvp, vmap

import flexhop
from flexhop.offline.interpret import Memory, interpret

HEADS, LENGTH = 2, 33
pytestmark = pytest.mark.filterwarnings("ignore::flexhop.errors.EagerWarning")
Attend = Callable[..., Tensor]
# What a mod reads of a head's row: no kernel computes the first two.
ROWS: dict[str, Callable[[Tensor], Tensor]] = {
    "so far": lambda row: row.cumsum(0) * 0.3,
    "sorted": lambda row: row.sort().values * 0.3,
    "functions": lambda row: row.exp().softmax(0).log(),
}


def attend_with(row: Callable[[Tensor], Tensor], *, is_stopped: bool = False) -> Attend:
    """A call of query, key, value and a table; is_stopped: half of it under no_grad."""

    def attend(query: Tensor, key: Tensor, value: Tensor, table: Tensor) -> Tensor:
        def score_mod(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
            with torch.set_grad_enabled(not is_stopped):
                fixed = row(table[h])[(q * k) % 5]
            return s.sin() * fixed + row(table[h])[(q - k).abs() % 6]

        return flexhop.flex_attention(query, key, value, score_mod)

    return attend


def gradient(attend: Attend) -> Callable[..., Any]:
    return grad(lambda *x: attend(*x).sin().sum(), (0, 1, 2, 3))


def gradient_of_three(attend: Attend) -> Callable[..., Any]:
    return grad(lambda *x: attend(*x).sin().sum(), (0, 1, 2))


def tangent(attend: Attend) -> Callable[..., Any]:
    return lambda *x: jvp(attend, x, tuple(t.cos() for t in x))[1]


def tangent_of_three(attend: Attend) -> Callable[..., Any]:
    return lambda *x: jvp(lambda *y: attend(*y, x[3]), x[:3], tuple(t.cos() for t in x[:3]))[1]


def forward_mode(attend: Attend) -> Callable[..., Any]:
    def run(*x: Tensor) -> Tensor | None:
        with forward_ad.dual_level():
            duals = [forward_ad.make_dual(t, t.cos()) for t in x]
            return forward_ad.unpack_dual(attend(*duals)).tangent

    return run


def second(attend: Attend) -> Callable[..., Any]:
    def product(*x: Tensor) -> Tensor:
        return sum(((g * t.cos()).sum() for g, t in zip(gradient(attend)(*x), x, strict=True)),
                   start=x[0].new_zeros(()))  # fmt: skip

    return grad(product, (0, 1, 2, 3))


def of_tangent(attend: Attend) -> Callable[..., Any]:
    return grad(lambda *x: tangent(attend)(*x).square().sum(), (0, 1, 2, 3))


def for_each(attend: Attend) -> Callable[..., Any]:
    def run(*x: Tensor) -> Any:
        one = gradient(lambda q, k, v, t: attend(q[None], k[None], v[None], t))
        return vmap(one, (0, 0, 0, None))(*x)

    return run


TRANSFORMS = (
    gradient, gradient_of_three, tangent, tangent_of_three, forward_mode, second, of_tangent,
    for_each,
)  # fmt: skip


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("row", ROWS)
def test_tables_are_made_before_the_call(row, transform, monkeypatch):
    check(transform(attend_with(ROWS[row])), monkeypatch)


@pytest.mark.parametrize("transform", [tangent, gradient])
def test_no_grad_inside_a_mod_stops_gradients_alone(transform, monkeypatch):
    check(transform(attend_with(ROWS["so far"], is_stopped=True)), monkeypatch)


def check(run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels compute what plain PyTorch does, and nothing else serves the call."""
    monkeypatch.setenv("FLEXHOP_STRICT", "1")
    torch.manual_seed(7)
    inputs = [torch.randn(2, HEADS, LENGTH, 16) for _ in range(3)] + [torch.randn(HEADS, 8)]
    found = interpret(run, *inputs, memory=Memory(poison=True, check_bounds=True))
    assert found.templates
    leaves = torch.utils._pytree.tree_leaves
    for one, other in zip(leaves(found.result), leaves(run(*inputs)), strict=True):
        torch.testing.assert_close(one, other, rtol=2e-4, atol=2e-4)
