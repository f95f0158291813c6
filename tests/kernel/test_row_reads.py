"""Biases of pairs: loaded ahead in rows of keys, and their gradients stored or added in fours."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

import flexhop
from flexhop.offline import generate_code
from flexhop.offline.cubin import compile_kernel, local_accesses
from tests.learned import check_gradients

pytestmark = pytest.mark.filterwarnings("ignore::flexhop.errors.EagerWarning")
Make = Callable[..., Any]
MODS: dict[str, tuple[tuple[int, ...], Make]] = {
    "own": ((2, 2), lambda t: lambda s, b, h, q, k: s + t[b, h, q, k]),
    "batches": ((1, 2), lambda t: lambda s, b, h, q, k: s * 0.5 + t[0, h, q, k]),
    "factor": ((2, 1), lambda t: lambda s, b, h, q, k: s * (1 + t[b, 0, q, k])),
}


def operands(queries: int, keys: int, dtype: torch.dtype) -> list[torch.Tensor]:
    torch.manual_seed(0)
    sizes = ((2, 2, queries, 16), (2, 1, keys, 16), (2, 1, keys, 16))
    return [torch.randn(size).to(dtype).requires_grad_() for size in sizes]


# Lengths that tiles divide, of whole pieces, and neither.
@pytest.mark.parametrize(
    ("name", "queries", "keys", "is_causal"),
    [
        ("own", 33, 40, True), ("own", 20, 37, False), ("batches", 32, 48, False),
        ("batches", 33, 40, False), ("factor", 20, 40, True),
    ],
)  # fmt: skip
def test_gradients_are_those_of_the_definition(
    name: str, queries: int, keys: int, is_causal: bool
):
    heads, make = MODS[name]
    tensors = operands(queries, keys, torch.float32)
    bias = torch.randn(*heads, queries, keys).requires_grad_()
    orders = {False, name == "own"}
    check_gradients(tensors, bias, make(bias), is_causal=is_causal, deterministic=orders)


# What the loops of forward and grad_query move: the bias in pieces of 8 or 16 bytes, ahead of its
# use, and its gradient.
MOVES = {
    "own": r"STG\.E\.(64|128)",
    "batches": r"RED[G.E]*\.ADD\.F32x4",
}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "length"), [("own", 504), ("batches", 512)])
def test_rows_move_in_pieces(name: str, length: int):
    heads, make = MODS[name]
    tensors = [
        torch.zeros(2, 2, length, 64, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)
    ]
    bias = torch.zeros(*heads, length, length, dtype=torch.bfloat16, requires_grad=True)
    call = partial(flexhop.flex_attention, score_mod=make(bias))
    kernels = generate_code(call, *tensors, grad=True).templates
    forward, grad_query = (compile_kernel(kernel, 90) for kernel in kernels[:2])
    for cubin in (forward, grad_query):
        loop = max(cubin.loops(), key=len)
        assert "LDG.E.U16" not in loop
        assert local_accesses(loop) == 0
    assert re.search(MOVES[name], max(grad_query.loops(), key=len))
