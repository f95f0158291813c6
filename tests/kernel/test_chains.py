"""Exact fp32 products: a GPU adds their terms one after the other, unlike the interpreter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import triton.language as tl
from torch import Tensor

import flexhop
from flexhop import AuxRequest, KernelOptions
from flexhop.offline import interpreter
from flexhop.offline.interpret import interpret

WIDTH = 256
OPTIONS = KernelOptions(backend="triton", float32_precision="ieee")


def call(query: Tensor, key: Tensor, value: Tensor) -> Any:
    return flexhop.flex_attention(
        query, key, value, scale=1.0, return_aux=AuxRequest(lse=True), kernel_options=OPTIONS
    )


def chain(left: np.ndarray, right: np.ndarray, total: np.ndarray) -> np.ndarray:
    """total + left @ right as multiply-adds, each of which rounds."""
    for column in range(left.shape[1]):
        terms = left[:, column, None].astype(np.float64) * right[column].astype(np.float64)
        total = (total + terms).astype(np.float32)
    return total


def _chained(original: Callable[..., Any]) -> Callable[..., Any]:
    def dot(self: Any, a: Any, b: Any, c: Any, *rest: Any) -> Any:
        return interpreter.TensorHandle(chain(a.data, b.data, c.data), tl.float32)

    return dot


def error(found: Tensor, exact: Tensor) -> float:
    return float((found - exact).detach().square().mean().sqrt())


def test_wide_rows_are_added_in_several_chains(monkeypatch):
    """Scores are up to 50 here, and weights are as wrong as they are, in forward and backward."""
    monkeypatch.setattr(interpreter, "_dot", _chained)
    torch.manual_seed(0)
    query, key, value, weight = (torch.randn(1, 1, n, WIDTH) for n in (48, 33, 33, 48))
    leaves = [t.requires_grad_() for t in (query, key, value)]
    _, aux = interpret(call, *leaves, grad=lambda found: (found[0] * weight).sum()).result
    exact, start = query.double() @ key.double().mT, np.zeros((48, 33), np.float32)
    one_chain = chain(query[0, 0].detach().numpy(), key[0, 0].detach().numpy().T, start)
    lossy = torch.from_numpy(one_chain).double()[None, None]
    lost = error(lossy.logsumexp(-1), exact.logsumexp(-1))
    assert error(aux.lse, exact.logsumexp(-1)) < 0.6 * lost
    grads = [scores.softmax(-1).mT @ weight.double() for scores in (exact, lossy)]
    assert value.grad is not None
    assert error(value.grad, grads[0]) < error(grads[1], grads[0])
