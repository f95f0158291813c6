"""The backward kernel of Hopper GPUs where gradients must be the same bits in every run.

Tiles of keys wait for each other there, so every test also shows that they do not wait forever.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor.utils import run_and_get_code

import flexhop
from flexhop.masks import causal
from flexhop.options import KernelOptions
from tests.gpu.test_hopper_backward import attend, gradients, judge, operands, replays

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="needs a Hopper GPU",
    ),
]
EXACT = KernelOptions(backend="hopper", deterministic=True)
RUNS = 20
Mask = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def window(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return (q >= k) & (q - k < 300)


def documents(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return (q >= k) & (q * q // 90_000 == k * k // 90_000)


def prefix(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return (q >= k) | (k < 333)


def scattered(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """Some blocks of every head, some of them whole; some queries see nothing."""
    block = (q // 128 * 7 + k // 128 * 3 + h + 2 * b) % 5
    return ((block == 0) | ((block == 1) & (k % 3 > 0))) & (q % 700 > 10)


MASKS: dict[str, Mask | None] = {
    "none": None,
    "causal": causal,
    "window": window,
    "documents": documents,
    "prefix": prefix,
    "scattered": scattered,
}


def make_mask(name: str, length: int, heads: int) -> Any:
    mask = MASKS[name]
    by_head = (2, heads) if name == "scattered" else (None, None)
    if mask is None:
        return None
    return flexhop.create_block_mask(mask, *by_head, length, length, "cuda")


def visible_of(name: str, length: int, heads: int) -> Tensor:
    position = torch.arange(length, device="cuda")
    mask = MASKS[name]
    if mask is None:
        return torch.ones(1, dtype=torch.bool, device="cuda")
    batch, head = torch.arange(2, device="cuda"), torch.arange(heads, device="cuda")
    shaped = batch[:, None, None, None], head[:, None, None]
    return mask(*shaped, position[:, None], position).expand(2, heads, length, length)


def assert_repeats(call: Any, tensors: list[Tensor], first: tuple[Tensor, ...]) -> None:
    for _ in range(RUNS):
        assert all(map(torch.equal, first, gradients(call, tensors)))


def portable_gradients(
    tensors: list[Tensor], mask: Any, score_mod: Any = None
) -> tuple[Tensor, ...]:
    torch._dynamo.reset()
    portable = KernelOptions(backend="triton", deterministic=True)
    return gradients(torch.compile(attend(mask, score_mod, portable), fullgraph=True), tensors)


@pytest.mark.parametrize(("length", "kv_heads"), [(128, 4), (1000, 1)])
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("width", [64, 128, 256])
def test_gradients_repeat_and_are_right(width: int, name: str, length: int, kv_heads: int):
    tensors = operands(width, length, kv_heads)
    call = torch.compile(attend(make_mask(name, length, 4), None, EXACT), fullgraph=True)
    first, codes = run_and_get_code(gradients, call, tensors)
    assert any("def add_in_turn" in code for code in codes), "not the Hopper kernel"
    judge(first, tensors, visible_of(name, length, 4))
    assert_repeats(call, tensors, first)


@pytest.mark.parametrize("length", [512, 1000])
@pytest.mark.parametrize("width", [64, 128])
def test_gradients_that_need_the_scores(width: int, length: int):
    """They wait in shared memory at 128 columns, where sums are handed over, too."""

    def power(score: Tensor, *indices: Tensor) -> Tensor:
        return ((score * 0.05 + 0.3) * score + 0.5) * score

    tensors = operands(width, length)
    call = torch.compile(attend(make_mask("causal", length, 4), power, EXACT), fullgraph=True)
    first, codes = run_and_get_code(gradients, call, tensors)
    assert any("def add_in_turn" in code for code in codes), "not the Hopper kernel"
    judge(first, tensors, visible_of("causal", length, 4), power)
    assert_repeats(call, tensors, first)


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("width", [64, 128, 192])
def test_with_more_tiles_than_programs(width: int, name: str):
    """Tiles then wait for others that the same programs finished before."""
    length = 4096
    tensors = [
        t.detach().repeat(1, 2, 1, 1).requires_grad_(i < 3)
        for i, t in enumerate(operands(width, length, 4))
    ]
    mask = make_mask(name, length, 8)
    score_mod = lambda s, b, h, q, k: s + 0.001 * (k - q)  # noqa: E731
    call = torch.compile(attend(mask, score_mod, EXACT), fullgraph=True)
    first = gradients(call, tensors)
    assert_repeats(call, tensors, first)
    others = portable_gradients(tensors, mask, score_mod)
    for actual, other in zip(first, others, strict=True):
        difference = (actual.double() - other.double()).norm() / other.double().norm()
        assert difference < 5e-3, "more than roundings of 16 bits"


@pytest.fixture
def demanded() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("width", [64, 128, 256])
def test_packed_sequences(width: int, demanded: None):
    offsets = torch.tensor([0, 5, 700, 701, 1500, 2304, 4000], dtype=torch.int32, device="cuda")
    query, key, value, grad_out = (
        torch.randn(4000, heads, width, device="cuda").bfloat16() for heads in (4, 2, 2, 4)
    )
    leaves = [t.requires_grad_() for t in (query, key, value)]

    def call(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        options = KernelOptions(backend="hopper")
        return flexhop.varlen_attention(
            query, key, value, offsets, is_causal=True, enable_gqa=True, kernel_options=options
        )

    compiled = torch.compile(call, fullgraph=True)
    first, codes = run_and_get_code(gradients, compiled, [*leaves, grad_out])
    assert any("def add_in_turn" in code for code in codes), "not the Hopper kernel"
    assert_repeats(compiled, [*leaves, grad_out], first)
    document = torch.bucketize(torch.arange(4000, device="cuda"), offsets[1:], right=True)
    position = torch.arange(4000, device="cuda")
    visible = (document[:, None] == document) & (position[:, None] >= position)
    padded = [t.detach().transpose(0, 1)[None].requires_grad_() for t in (*leaves, grad_out)]
    judge(tuple(t.transpose(0, 1)[None] for t in first), padded, visible)


def test_lists_that_name_a_block_twice():
    """It is computed twice, by both kernels, and whoever comes after waits for both."""
    mask = flexhop.create_block_mask(causal, None, None, 1024, 1024, "cuda")
    assert mask.full_q_num_blocks is not None and mask.full_q_indices is not None
    mask.full_q_num_blocks[0, 0, 1] += 1
    mask.full_q_indices[0, 0, 1, int(mask.full_q_num_blocks[0, 0, 1]) - 1] = 5
    tensors = operands(128, 1024, 4)
    call = torch.compile(attend(mask, None, EXACT), fullgraph=True)
    first = gradients(call, tensors)
    assert_repeats(call, tensors, first)
    others = portable_gradients(tensors, mask)
    for actual, other in zip(first[1:], others[1:], strict=True):
        torch.testing.assert_close(actual, other, rtol=0.05, atol=0.02)


def test_beside_kernels_of_another_stream():
    """Programs may start late, and in any order."""
    mask = flexhop.create_block_mask(causal, None, None, 4096, 4096, "cuda")
    tensors = operands(128, 4096, 4)
    call = torch.compile(attend(mask, None, EXACT), fullgraph=True)
    first = gradients(call, tensors)
    busy = torch.randn(4096, 4096, device="cuda").bfloat16()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    for _ in range(RUNS):
        with torch.cuda.stream(stream):
            for _ in range(4):
                busy = (busy @ busy).clamp(-1, 1)
        assert all(map(torch.equal, first, gradients(call, tensors)))


def test_in_a_cuda_graph():
    mask = flexhop.create_block_mask(causal, None, None, 1024, 1024, "cuda")
    tensors = operands(128, 1024)
    call = torch.compile(attend(mask, None, EXACT), fullgraph=True)
    expected = gradients(call, tensors)
    for found in replays(call, tensors):
        assert all(map(torch.equal, found, expected))


def test_lengths_may_change():
    call = torch.compile(attend(None, None, EXACT), fullgraph=True, dynamic=True)
    for length in (256, 384, 1000, 1337):
        tensors = operands(128, length)
        first = gradients(call, tensors)
        judge(first, tensors, torch.ones(1, dtype=torch.bool, device="cuda"))
        assert_repeats(call, tensors, first)
