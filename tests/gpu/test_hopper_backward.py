"""The backward kernel of Hopper GPUs: which calls get it, and what does not depend on chance.

pytest tests/gpu -q -n 8
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor import config as inductor_config
from torch._inductor.utils import run_and_get_code

import flexhop
from flexhop.lowering.hopper import backward
from flexhop.masks import causal
from flexhop.options import KernelOptions
from tests.budgets import (
    Formula,
    assert_within_budget,
    dense_attention,
    dense_backward,
    kernel_formulas,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="needs a Hopper GPU",
    ),
]
HOPPER = KernelOptions(backend="hopper")
WIDTHS = [8, 24, 32, 64, 96, 128, 192, 256]


def operands(width: int, length: int, kv_heads: int = 2, layout: str = "BHSD") -> list[Tensor]:
    """Query, key, value and the gradient of the output; two batches of four heads."""
    generator = torch.Generator("cuda").manual_seed(width + length)
    made = []
    for heads in (4, kv_heads, kv_heads, 4):
        sizes = (2, heads, length, width) if layout == "BHSD" else (2, length, heads, width)
        tensor = torch.randn(sizes, generator=generator, device="cuda").bfloat16()
        made.append(tensor if layout == "BHSD" else tensor.transpose(1, 2))
    return [t.requires_grad_() for t in made[:3]] + made[3:]


def gradients(call: Any, tensors: list[Tensor]) -> tuple[Tensor, ...]:
    query, key, value, grad_out = tensors
    return torch.autograd.grad(call(query, key, value), (query, key, value), grad_out)


def attend(mask: Any, score_mod: Any = None, options: KernelOptions = HOPPER) -> Any:
    def call(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return flexhop.flex_attention(
            query, key, value, score_mod, mask, enable_gqa=True, kernel_options=options
        )

    return call


def judge(
    found: tuple[Tensor, ...], tensors: list[Tensor], visible: Tensor, score_mod: Any = None
) -> None:
    """Every gradient against fp64, in units of the error of plain PyTorch.

    It rounds where a kernel does, too: of 67,584 queries, one that sees two keys exceeded the
    budget in one of six fillings of the operands, without any kernel.
    """
    runs = []
    rounded: list[Formula] = ["plain", *kernel_formulas(torch.bfloat16, truncates=False)]
    for dtype, formula in ((torch.float64, "plain"), *((torch.bfloat16, f) for f in rounded)):
        leaves = [t.detach().to(dtype).requires_grad_() for t in tensors[:3]]
        scale = tensors[0].size(-1) ** -0.5
        dense = dense_attention(*leaves, score_mod, visible, scale, formula=formula)
        dense_backward(dense, tensors[3].to(dtype), None)
        runs.append([leaf.grad for leaf in leaves])
    for name, actual, *others in zip(("q", "k", "v"), found, *runs, strict=True):
        assert_within_budget(actual, *others, name=name)


@pytest.mark.parametrize("layout", ["BHSD", "BSHD"])
@pytest.mark.parametrize("length", [128, 1000])
@pytest.mark.parametrize("width", WIDTHS)
def test_gradients_of_every_width(width: int, length: int, layout: str):
    mask = flexhop.create_block_mask(causal, None, None, length, length, "cuda")
    tensors = operands(width, length, layout=layout)
    call = torch.compile(attend(mask), fullgraph=True)
    found, codes = run_and_get_code(gradients, call, tensors)
    assert any("def differentiate" in code for code in codes), "not the Hopper kernel"
    position = torch.arange(length, device="cuda")
    judge(found, tensors, position[:, None] >= position)


@pytest.mark.parametrize("is_deterministic", [False, True])
@pytest.mark.parametrize("kv_heads", [1, 4])
@pytest.mark.parametrize("length", [128, 1000])
@pytest.mark.parametrize("dims", [(192, 128), (136, 40), (160, 96)])
def test_gradients_of_the_widths_of_latent_attention(dims, length, kv_heads, is_deterministic):
    """Queries and keys of up to 192 columns, values of up to 128."""
    width, value_width = dims
    query, key, value, grad_out = operands(width, length, kv_heads)
    value = value[..., :value_width].contiguous().detach().requires_grad_()
    tensors = [query, key, value, grad_out[..., :value_width].contiguous()]
    mask = flexhop.create_block_mask(causal, None, None, length, length, "cuda")
    options = KernelOptions(backend="hopper", deterministic=is_deterministic)
    call = torch.compile(attend(mask, options=options), fullgraph=True)
    found, codes = run_and_get_code(gradients, call, tensors)
    assert any("def halved_grad_steps" in code for code in codes), "not the kernel of halves"
    position = torch.arange(length, device="cuda")
    judge(found, tensors, position[:, None] >= position)
    repeated = gradients(call, tensors)
    fixed = slice(0 if is_deterministic else 1, 3)
    assert all(map(torch.equal, found[fixed], repeated[fixed]))


def read_head(table: Any) -> Any:
    return lambda s, b, h, q, k: s + table[h, 0] * 0.01 * (k - q)


def read_key(table: Any) -> Any:
    return lambda s, b, h, q, k: s + table[h, k]


def read_query(table: Any) -> Any:
    return lambda s, b, h, q, k: s + table[h, q] * (k - q) * 0.01


def read_distance(table: Any) -> Any:
    middle = table.size(1) // 2
    return lambda s, b, h, q, k: s + table[h, q - k + middle]


def read_bucket(table: Any) -> Any:
    """Distances share entries, and some are beyond the last."""
    return lambda s, b, h, q, k: s + table[h, ((q - k) // 3).clamp(-20, 40) + 20]


def read_thrice(table: Any) -> Any:
    """Factors of the score, so that its gradient needs it."""
    middle = table.size(1) // 2
    return lambda s, b, h, q, k: (
        s * (1 + 0.3 * table[h, q] * table[h, k]) + table[h, q - k + middle]
    )


def read_factor(table: Any) -> Any:
    """By head, and by query: scores wait in shared memory for the gradient."""
    return lambda s, b, h, q, k: s * (1 + 0.2 * table[h, 0] + 0.1 * table[h, q])


def read_shared(table: Any) -> Any:
    """Queries share entries."""
    return lambda s, b, h, q, k: s * (0.5 + 0.1 * table[h, q // 50])


def read_cap(table: Any) -> Any:
    """A soft-cap of its own for every head."""
    return lambda s, b, h, q, k: (2 + table[h, 0].abs()) * torch.tanh(s / (2 + table[h, 0].abs()))


READS = [
    *(read_head, read_key, read_query, read_distance, read_bucket, read_thrice),
    *(read_factor, read_shared, read_cap),
]


@pytest.mark.parametrize("reads", READS, ids=lambda f: f.__name__)
@pytest.mark.parametrize(("length", "is_causal"), [(512, True), (1000, True), (333, False)])
@pytest.mark.parametrize("width", [64, 128, 256])
def test_gradients_of_a_captured_table(width: int, length: int, is_causal: bool, reads: Any):
    """Sums of all scores, of a key's, a query's, and of those at one distance."""
    codes = check_table(width, length, is_causal, reads)
    assert any("def add_captured_grads" in code for code in codes), "not the Hopper kernel"


@pytest.fixture
def _shares_keys(monkeypatch):
    """Kernels for 128 keys at 128 columns are refused, as if they had spilled."""
    monkeypatch.setattr(backward, "_LOCAL_BYTES_OWN", -1)
    torch.compiler.reset()
    with inductor_config.patch(fx_graph_cache=False):  # it knows other kernels
        yield


SHARES = "SHARES_KEYS = gl.constexpr(True)"


@pytest.mark.usefixtures("_shares_keys")
@pytest.mark.parametrize("reads", READS, ids=lambda f: f.__name__)
@pytest.mark.parametrize(("length", "is_causal"), [(1000, True), (333, False)])
def test_consumers_that_share_keys_at_128_columns(length: int, is_causal: bool, reads: Any):
    assert any(SHARES in code for code in check_table(128, length, is_causal, reads))


def check_table(width: int, length: int, is_causal: bool, reads: Any) -> list[str]:
    """Compare gradients with those of plain PyTorch; returns the generated code."""
    generator = torch.Generator("cuda").manual_seed(width)
    table = torch.randn(4, 2 * length, generator=generator, device="cuda").requires_grad_()
    mask = None
    if is_causal:
        mask = flexhop.create_block_mask(causal, None, None, length, length, "cuda")
    *leaves, grad_out = operands(width, length)
    leaves.append(table)

    def call(query: Tensor, key: Tensor, value: Tensor, table: Tensor) -> Tensor:
        return attend(mask, reads(table))(query, key, value)

    def run() -> tuple[Tensor, ...]:
        out = torch.compile(call, fullgraph=True)(*leaves)
        return torch.autograd.grad(out, leaves, grad_out)

    found, codes = run_and_get_code(run)
    position = torch.arange(length, device="cuda")
    visible = position[:, None] >= (position if is_causal else 0)
    gold = dense_run(leaves, reads, visible, grad_out.double())
    # delta comes from the rounded out: where its terms cancel, one formula can be exact by luck.
    formulas: tuple[Formula, ...] = ("plain", "fused", "online")
    references = [dense_run(leaves, reads, visible, grad_out, formula) for formula in formulas]
    names = ("query", "key", "value", "table")
    for name, actual, *others in zip(names, found, gold, *references, strict=True):
        assert_within_budget(actual, *others, name=name, captured=name == "table")
    return codes


@pytest.mark.parametrize("width", [64, 128, 256])
def test_a_shift_of_all_scores_of_a_query_has_no_gradient(width: int):
    generator = torch.Generator("cuda").manual_seed(width)
    table = torch.randn(4, 1000, generator=generator, device="cuda").requires_grad_()
    *leaves, grad_out = operands(width, 1000)

    def run(shift: Any) -> tuple[Tensor, ...]:
        score_mod = lambda s, b, h, q, k: s * 0.5 + shift[h, q] * (q + 1)  # noqa: E731
        out = torch.compile(attend(None, score_mod), fullgraph=True)(*leaves)
        return torch.autograd.grad(out, [*leaves, table], grad_out, allow_unused=True)

    found, codes = run_and_get_code(run, table)
    assert not any("def add_captured_grads" in code for code in codes)
    assert not found[3].any()
    for learned, fixed in zip(found[:3], run(table.detach())[:3], strict=True):
        torch.testing.assert_close(learned, fixed, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("length", [512, 1000])
@pytest.mark.parametrize("width", [64, 96, 128])
def test_gradients_of_a_polynomial(width: int, length: int, is_causal: bool):
    """Of sums and products of scores, which wait in shared memory at 128 columns."""
    check_polynomial(width, length, is_causal)


@pytest.mark.usefixtures("_shares_keys")
@pytest.mark.parametrize(("length", "is_causal"), [(512, True), (1000, False)])
@pytest.mark.parametrize("width", [80, 96, 128])
def test_a_polynomial_if_consumers_share_keys(width: int, length: int, is_causal: bool):
    assert any(SHARES in code for code in check_polynomial(width, length, is_causal))


def check_polynomial(width: int, length: int, is_causal: bool) -> list[str]:
    """As check_table."""
    mask = None
    if is_causal:
        mask = flexhop.create_block_mask(causal, None, None, length, length, "cuda")
    tensors = operands(width, length)

    def power(score: Tensor, *indices: Tensor) -> Tensor:
        return ((score * 0.05 + 0.3) * score + 0.5) * score + score * score * 0.1

    call = torch.compile(attend(mask, power), fullgraph=True)
    found, codes = run_and_get_code(gradients, call, tensors)
    assert any("def differentiate" in code for code in codes), "not the Hopper kernel"
    position = torch.arange(length, device="cuda")
    judge(found, tensors, position[:, None] >= (position if is_causal else 0), power)
    return codes


def dense_run(
    leaves: list[Tensor], reads: Any, visible: Tensor, grad_out: Tensor, formula: Formula = "plain"
) -> list[Tensor | None]:
    """Gradients of plain PyTorch, in fp64 if grad_out is."""
    wide = grad_out.dtype == torch.float64
    copies = [(t.detach().double() if wide else t.detach()).requires_grad_() for t in leaves]
    scale = leaves[0].size(-1) ** -0.5
    dense = dense_attention(*copies[:3], reads(copies[3]), visible, scale, formula=formula)
    dense_backward(dense, grad_out, None)
    return [copy.grad for copy in copies]


@pytest.mark.parametrize(
    ("width", "length", "group", "layout"),
    [
        (64, 197, 1, "BHSD"),
        (64, 512, 1, "BSHD"),
        (128, 130, 1, "BHSD"),
        (128, 256, 1, "BSHD"),
        (80, 200, 2, "BSHD"),
        (48, 256, 2, "BHSD"),
    ],
)
@pytest.mark.parametrize("learns", [False, True])
def test_gradients_of_programs_that_own_heads(width, length, group, layout, learns):
    """Short sequences: 132 key heads, with a learned slope, or with a mask alone."""
    generator = torch.Generator("cuda").manual_seed(length)
    tensors = []
    for heads in (2 * group, 2, 2, 2 * group):
        sizes = (66, heads, length, width) if layout == "BHSD" else (66, length, heads, width)
        tensor = torch.randn(sizes, generator=generator, device="cuda").bfloat16()
        tensors.append(tensor if layout == "BHSD" else tensor.transpose(1, 2))
    tensors = [t.requires_grad_() for t in tensors[:3]] + tensors[3:]
    slope = torch.full((), 0.05, device="cuda", requires_grad=learns)

    def alibi(s, b, h, q, k):
        return s + slope * (k - q)

    mask = flexhop.create_block_mask(causal, None, None, length, length, "cuda")
    call = torch.compile(attend(mask, alibi if learns else None), fullgraph=True)
    found, codes = run_and_get_code(gradients, call, tensors)
    assert any("OWNS_HEADS = gl.constexpr(True)" in code for code in codes), "not such a kernel"
    position = torch.arange(length, device="cuda")
    judge(found, tensors, position[:, None] >= position, alibi if learns else None)
    again = gradients(call, tensors)  # the sums were cleared
    judge(again, tensors, position[:, None] >= position, alibi if learns else None)


@pytest.mark.parametrize("width", [64, 128, 256])
def test_lengths_may_change_without_compiling_anew(width: int):
    call = torch.compile(attend(None), fullgraph=True, dynamic=True)
    for length in (256, 384, 1000, 1337):
        tensors = operands(width, length)
        judge(gradients(call, tensors), tensors, torch.ones(1, dtype=torch.bool, device="cuda"))


@pytest.mark.parametrize("width", [64, 128, 256])
def test_gradients_of_key_and_value_are_bitwise_repeatable(width: int):
    """That of query is added up in any order, in fp32, and then rounded once."""
    mask = flexhop.create_block_mask(causal, None, None, 1024, 1024, "cuda")
    tensors = operands(width, 1024)
    call = torch.compile(attend(mask, lambda s, b, h, q, k: s + 0.01 * (k - q)), fullgraph=True)
    first = gradients(call, tensors)
    for _ in range(100):
        again = gradients(call, tensors)
        assert torch.equal(first[1], again[1])
        assert torch.equal(first[2], again[2])
        difference = (first[0].double() - again[0].double()).norm() / first[0].double().norm()
        assert difference < 1e-3, "more than another rounding of a few elements"


def test_a_gradient_that_is_one_number_for_all():
    """What the sum of an output hands back has stride 0, which TMA does not read."""
    query, key, value, _ = tensors = operands(128, 256)
    call = torch.compile(attend(None), fullgraph=True)
    found = torch.autograd.grad(call(query, key, value).sum(), (query, key, value))
    tensors[3] = torch.ones_like(query)
    judge(found, tensors, torch.ones(1, dtype=torch.bool, device="cuda"))


def replays(call: Any, tensors: list[Tensor]) -> Iterator[tuple[Tensor, ...]]:
    """Gradients from a CUDA graph, three times."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = gradients(call, tensors)
    for _ in range(3):
        for tensor in found:
            tensor.fill_(float("nan"))
        graph.replay()
        yield found


def test_in_a_cuda_graph():
    mask = flexhop.create_block_mask(causal, None, None, 1024, 1024, "cuda")
    tensors = operands(128, 1024)
    call = torch.compile(attend(mask), fullgraph=True)
    expected = gradients(call, tensors)
    for found in replays(call, tensors):
        for actual, wanted in zip(found, expected, strict=True):
            torch.testing.assert_close(actual, wanted, rtol=0.02, atol=1e-3)
