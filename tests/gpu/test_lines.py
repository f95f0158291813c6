"""score_mods that add a line over keys, which the forward kernel of Hopper GPUs follows.

pytest tests/gpu/test_lines.py -q -n 8
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import flexhop
from flexhop.masks import causal
from flexhop.options import KernelOptions
from tests.budgets import assert_within_budget, dense_attention

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="needs a Hopper GPU",
    ),
]
HEADS = 4
HOPPER = KernelOptions(backend="hopper", short_queries="forward")
LINES: dict[str, Callable[[Tensor], Any]] = {
    "alibi": lambda t: lambda s, b, h, q, k: s + t[h] * (k - q),
    "reversed": lambda t: lambda s, b, h, q, k: s - t[h] * (k - q),
    "of_keys": lambda t: lambda s, b, h, q, k: s + t[h] * k,
    "down": lambda t: lambda s, b, h, q, k: s - k * t[h],
    "by_query": lambda t: lambda s, b, h, q, k: s + t[q % HEADS] * (k - 100) / (b + 1),
    "steep": lambda t: lambda s, b, h, q, k: s + 3.0 * (k - q) + t[h],
    "level": lambda t: lambda s, b, h, q, k: s + t[(h + q) % HEADS],
    "distance": lambda t: lambda s, b, h, q, k: s - t[h] * (q - k).abs(),
    "far_bend": lambda t: lambda s, b, h, q, k: s + t[h] * (k + 75 - q - 300 * b).abs() - 0.01 * k,
    "bend_of_keys": lambda t: lambda s, b, h, q, k: s - t[h] * (k - 333).abs(),
    "step": lambda t: lambda s, b, h, q, k: torch.where(q - k < 130, s, s - 4 * t[h]),
    "chunks": lambda t: lambda s, b, h, q, k: s + torch.where(q // 100 == k // 100, 2 * t[h], 0.0),
    "bounded": lambda t: lambda s, b, h, q, k: s - t[h] * (q - k).clamp(max=200 + 50 * b),
    "steps": lambda t: lambda s, b, h, q, k: s + torch.where(
        (k < 40) | (q < k + 64), t[h], torch.where(q - k < 300, 0.02 * (k - q), -1.0)
    ),
    "hidden_step": lambda t: lambda s, b, h, q, k: s + torch.where(
        (q - k >= 257) & (k >= 65), float("-inf"), t[h]
    ),
}  # fmt: skip


def random_operands(queries: int, keys: int, width: int, batch: int = 2) -> list[Tensor]:
    """Query, key and value; two query heads share a key head."""
    sizes = [(batch, heads, n, width) for heads, n in ((HEADS, queries), (2, keys), (2, keys))]
    return [torch.randn(size, device="cuda", dtype=torch.bfloat16) for size in sizes]


def check(
    make: Callable[[Tensor], Any],
    operands: list[Tensor],
    is_causal: bool,
    options: KernelOptions = HOPPER,
    scale: float | None = None,
) -> None:
    """Results and statistics of the compiled kernel against fp64."""
    slopes = torch.tensor([0.6, 0.11, 0.037, 0.0041], device="cuda")
    queries, keys, width = operands[0].size(2), operands[1].size(2), operands[0].size(3)
    mask = flexhop.create_block_mask(causal, None, None, queries, keys, "cuda")
    wanted = flexhop.AuxRequest(lse=True, max_scores=True)

    def call(*tensors: Tensor) -> Any:
        return flexhop.flex_attention(
            *tensors, make(slopes), mask if is_causal else None, enable_gqa=True, scale=scale,
            kernel_options=options, return_aux=wanted,
        )  # fmt: skip

    with torch.no_grad():
        out, aux = torch.compile(call, fullgraph=True)(*operands)
        place = torch.arange(max(queries, keys), device="cuda")
        seen = place[:queries, None] >= place[None, :keys]
        if not is_causal:
            seen = torch.ones_like(seen)
        for b in range(out.size(0)):  # fp64 scores of all keys take room
            runs = [
                dense_attention(
                    *(t[b : b + 1].to(dtype) for t in operands),
                    _of_batch(make(slopes.to(wide)), b), seen, scale or width**-0.5,
                )
                for dtype, wide in (
                    (torch.float64, torch.float64), (torch.bfloat16, torch.float32)
                )
            ]  # fmt: skip
            found = {"out": out, "lse": aux.lse, "largest": aux.max_scores}
            for name, result in found.items():
                gold, reference = (getattr(run, name) for run in runs)
                assert_within_budget(result[b : b + 1], gold, reference, name=name)


def _of_batch(mod: Any, batch: int) -> Any:
    """A score_mod of one batch of several."""
    return lambda s, b, h, q, k: mod(s, b + batch, h, q, k)


@pytest.mark.parametrize("length", [1024, 1000])
@pytest.mark.parametrize("width", [64, 128, 256])
@pytest.mark.parametrize("name", LINES)
def test_lines(name, width, length):
    torch.manual_seed(width + length)
    check(LINES[name], random_operands(length, length, width), is_causal=True)


@pytest.mark.parametrize(
    "name", ["alibi", "reversed", "by_query", "distance", "far_bend", "bend_of_keys"]
)
def test_without_a_mask(name):
    torch.manual_seed(1)
    check(LINES[name], random_operands(300, 777, 128), is_causal=False)


@pytest.mark.parametrize("name", ["alibi", "of_keys", "down", "distance"])
@pytest.mark.parametrize("keys", [100_000, 131_072])
def test_far_keys(name, keys):
    """What the line adds is thousands, of which the scores' own digits must not be lost."""
    torch.manual_seed(2)
    check(LINES[name], random_operands(130, keys, 64, batch=1), is_causal=False)


@pytest.mark.parametrize("name", ["alibi", "distance"])
@pytest.mark.parametrize("scale", [1e-3, 2.0, -0.3, 1e-8])
def test_scales(scale, name):
    torch.manual_seed(3)
    check(LINES[name], random_operands(500, 500, 64), is_causal=True, scale=scale)


def test_rows_that_are_known_to_see_something():
    torch.manual_seed(4)
    options = KernelOptions(backend="hopper", rows_guaranteed_safe=True)
    check(LINES["alibi"], random_operands(512, 512, 128), is_causal=True, options=options)


def test_queries_that_see_nothing():
    torch.manual_seed(5)
    operands = random_operands(512, 384, 64)
    never = flexhop.create_block_mask(
        lambda b, h, q, k: (q >= k) & (q % 64 != 7) & (q < 400), None, None, 512, 384, "cuda"
    )
    slope = torch.tensor([0.5, -0.5, 2.0, 0.1], device="cuda")
    mod = LINES["alibi"](slope)
    call = torch.compile(
        lambda *t: flexhop.flex_attention(
            *t, mod, never, enable_gqa=True, kernel_options=HOPPER,
            return_aux=flexhop.AuxRequest(lse=True),
        ),
        fullgraph=True,
    )  # fmt: skip
    with torch.no_grad():
        out, aux = call(*operands)
    place = torch.arange(512, device="cuda")
    empty = (place % 64 == 7) | (place >= 400)
    assert (out[:, :, empty] == 0).all()
    assert (aux.lse[:, :, empty] == -torch.inf).all()
    assert aux.lse[:, :, ~empty].isfinite().all()


def test_one_dynamic_graph_serves_changing_lengths():
    slopes = torch.tensor([0.6, 0.11, 0.037, 0.0041], device="cuda")
    mod = LINES["alibi"]

    def call(query: Tensor, key: Tensor, value: Tensor, mask: Any) -> Tensor:
        return flexhop.flex_attention(query, key, value, mod(slopes), mask, enable_gqa=True)

    compiled = torch.compile(call, fullgraph=True, dynamic=True)
    for length in (1024, 777, 1300):
        operands = random_operands(length, length, 128)
        mask = flexhop.create_block_mask(causal, None, None, length, length, "cuda")
        with torch.no_grad():
            out = compiled(*operands, mask)
        place = torch.arange(length, device="cuda")
        seen = place[:, None] >= place[None, :]
        gold, reference = (
            dense_attention(*(t.to(d) for t in operands), mod(slopes.to(w)), seen, 128**-0.5).out
            for d, w in ((torch.float64, torch.float64), (torch.bfloat16, torch.float32))
        )
        assert_within_budget(out, gold, reference)
