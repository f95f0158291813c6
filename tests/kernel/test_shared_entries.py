"""Learned tables of a query or key and a clamped distance: most tiles have a sum for each row."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

import flexhop
from flexhop.offline import generate_code
from tests.learned import check_gradients

pytestmark = pytest.mark.filterwarnings("ignore::flexhop.errors.EagerWarning")
QUERIES, KEYS, FARTHEST = 53, 61, 9


def bucket(distance: torch.Tensor) -> torch.Tensor:
    """Two distances each, of either side."""
    return distance.clamp(-FARTHEST, FARTHEST - 1) // 2 + 5


# Size of the table by sequence and head, and how a score_mod reads it.
Make = Callable[[torch.Tensor], Callable[..., Any]]
MODS: dict[str, tuple[int, Make]] = {
    "query": (
        QUERIES, lambda t: lambda s, b, h, q, k: s + t[b, h, q, (q - k).clamp(-9, 8) + 9],
    ),
    "key": (
        KEYS, lambda t: lambda s, b, h, q, k: s * (1 + t[b, h, k, (k - q).clamp(-9, 8) + 9]),
    ),
    "bucket": (QUERIES, lambda t: lambda s, b, h, q, k: s + t[b, h, q, bucket(q - k)]),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "is_causal", "deterministic"),
    [("query", False, False), ("query", True, True), ("key", False, False),
     ("bucket", True, False)],
)  # fmt: skip
def test_gradients_are_those_of_the_definition(name: str, is_causal: bool, deterministic: bool):
    torch.manual_seed(0)
    rows, make = MODS[name]
    sizes = ((2, 2, QUERIES, 16), (2, 1, KEYS, 16), (2, 1, KEYS, 16))
    tensors = [torch.randn(size).requires_grad_() for size in sizes]
    table = torch.randn(2, 2, rows, 2 * FARTHEST).requires_grad_()
    orders = [deterministic]
    check_gradients(tensors, table, make(table), is_causal=is_causal, deterministic=orders)


@pytest.mark.parametrize(
    ("size", "read", "is_shared"),
    [
        ((256, 18), lambda t, b, h, q, k: t[q, (q - k).clamp(-9, 8) + 9], True),
        ((18, 256), lambda t, b, h, q, k: t[(q - k).clamp(-9, 8) + 9, k], True),
        ((18,), lambda t, b, h, q, k: t[(q - k).clamp(-9, 8) + 9], False),  # by distance
        ((256, 512), lambda t, b, h, q, k: t[q, q - k + 256], False),  # each has its own
        ((256, 256), lambda t, b, h, q, k: t[q, (q + k) % 9], False),
    ],
)
def test_rows_are_summed_if_a_clamped_distance_gives_the_entry(size, read, is_shared):
    table = torch.zeros(size, requires_grad=True)
    tensors = [torch.zeros(1, 2, 256, 16, requires_grad=True) for _ in range(3)]
    call = partial(
        flexhop.flex_attention,
        score_mod=lambda s, b, h, q, k: s + read(table, b, h, q, k),
        kernel_options={"backend": "triton"},
    )
    source = "".join(
        kernel.source for kernel in generate_code(call, *tensors, grad=True).templates
    )
    assert ("tl.min(index_" in source) == is_shared
