"""Learned tables by pairs of blocks or segments: tiles add a sum for each group of scores."""

from __future__ import annotations

from functools import partial

import pytest
import torch

import flexhop
from flexhop.offline import generate_code
from flexhop.offline.cubin import compile_kernel
from tests.learned import check_gradients

pytestmark = pytest.mark.filterwarnings("ignore::flexhop.errors.EagerWarning")
QUERIES, KEYS = 75, 61
SEGMENTS = torch.tensor([0] * 40 + [1] * 3 + [2] * 32, dtype=torch.int32)
MODS = {
    "blocks": lambda t: lambda s, b, h, q, k: s + t[h, q // 8, k // 4],
    "rows": lambda t: lambda s, b, h, q, k: s * (1 + t[h, q >> 5, k]),
    "ids": lambda t: lambda s, b, h, q, k: s + t[h, SEGMENTS[q], SEGMENTS[k] + 1],
    "frames": lambda t: lambda s, b, h, q, k: s + t[h, (q + 8) // 24, k // 200 + b],
}


@pytest.mark.parametrize(
    ("name", "is_causal", "deterministic"),
    [("blocks", False, (False, True)), ("rows", True, (False,)), ("ids", True, (False,)),
     ("frames", False, (False,))],
)  # fmt: skip
def test_gradients_are_those_of_the_definition(name, is_causal, deterministic):
    torch.manual_seed(0)
    sizes = ((2, 2, QUERIES, 16), (2, 1, KEYS, 16), (2, 1, KEYS, 16))
    tensors = [torch.randn(size).requires_grad_() for size in sizes]
    table = torch.randn(2, 10, KEYS if name == "rows" else 16).requires_grad_()
    mod = MODS[name](table)
    check_gradients(tensors, table, mod, is_causal=is_causal, deterministic=deterministic)


def test_ids_of_a_single_key():
    """They are read at one address, which gives a number and no row of numbers."""
    tensors = [torch.zeros(1, 2, n, 16).requires_grad_() for n in (75, 1, 1)]
    table, ids = torch.zeros(2, 10, 16).requires_grad_(), torch.tensor([2])

    def call(query, key, value, table, ids):
        return flexhop.flex_attention(
            query, key, value, lambda s, b, h, q, k: s + table[h, SEGMENTS[q], ids[k]],
            kernel_options={"backend": "triton"},
        )  # fmt: skip

    generated = generate_code(call, *tensors, table, ids, grad=True)
    assert any("of_groups" in kernel.source for kernel in generated.templates)
    for kernel in generated.templates:
        assert compile_kernel(kernel, 90).registers


@pytest.mark.parametrize(
    ("read", "groups"),
    [
        (lambda t, q, k: t[q // 8, k // 8], "8, 8"),
        (lambda t, q, k: t[(q >> 4) % 3, k], "16, 1"),
        (lambda t, q, k: t[q, SEGMENTS[k]], "1, 128"),
        (lambda t, q, k: t[(q + 4) // 24, k // 1560], "4, 128"),
        (lambda t, q, k: t[q // 3, k // 5], None),
        (lambda t, q, k: t[q % 7, k], None),
        (lambda t, q, k: t[(q - k) // 8, k // 8], None),
    ],
)
def test_groups_are_as_large_as_the_indices_say(read, groups):
    table = torch.zeros(256, 256, requires_grad=True)
    tensors = [torch.zeros(1, 2, 75, 16, requires_grad=True) for _ in range(3)]
    call = partial(
        flexhop.flex_attention,
        score_mod=lambda s, b, h, q, k: s + read(table, q, k),
        kernel_options={"backend": "triton"},
    )
    source = "".join(
        kernel.source for kernel in generate_code(call, *tensors, grad=True).templates
    )
    assert (f"sum_groups(grad_0, {groups})" in source) == (groups is not None)
