"""Packed and nested sequences on a GPU, forward and backward, against the dense formula."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch._inductor.utils import run_and_get_code

import flexhop
from tests.packed_dense import between, distances, judge, sequence_and_place
from tests.varlen_cases import (
    CASES,
    Packed,
    call_arguments,
    make_operands,
    make_score,
    mask_mod,
    offsets,
    packed_call,
    used_keys,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
]
SIZES = [(torch.bfloat16, 64), (torch.bfloat16, 128), (torch.float16, 128), (torch.float32, 32)]
LONG = Packed((1000, 3, 700, 0, 129, 216, 2000), heads=16, kv_heads=8)


def visible_keys(case: Packed) -> torch.Tensor:
    """[T, U], from the lengths and options alone."""
    tokens = sum(case.queries) + case.padding
    used = case.key_lengths if case.used is None else case.used
    of_q, at_q = sequence_and_place(case.queries, tokens, "cuda")
    of_k, at_k = sequence_and_place(case.key_lengths, sum(case.key_lengths), "cuda")
    counted = used if case.bottom_right else None
    ahead, same = distances(case.queries, case.key_lengths, tokens, "cuda", counted)
    left, right = case.window
    kept = between(ahead, same, left, 0 if case.causal else right)
    kept = kept & (at_k < torch.tensor(used, device="cuda")[of_k])
    if case.mask:
        kept = kept & mask_mod(of_q[:, None], 0, at_q[:, None], at_k)
    return kept


def local_score(case: Packed, leaves: dict[str, torch.Tensor]):
    """score_mod of the case in packed positions."""
    if not case.score:
        return None
    tokens = sum(case.queries) + case.padding
    of_q, at_q = sequence_and_place(case.queries, tokens, "cuda")
    at_k = sequence_and_place(case.key_lengths, sum(case.key_lengths), "cuda")[1]
    local = make_score(leaves["slopes"])
    return lambda s, b, h, q, k: local(s, of_q.clamp(min=0)[q], h, at_q[q], at_k[k])


def check_packed(case: Packed, dtype: torch.dtype, call) -> None:
    """Judge out, lse and gradients of one compiled call."""
    operands = make_operands(case, dtype, "cuda")
    out, aux = call(*call_arguments(case, operands))
    (out * operands.grad).sum().backward()
    found = {"out": out, "lse": aux.lse}
    found |= {name: leaf.grad for name, leaf in operands.leaves.items() if leaf.grad is not None}
    judge(
        found, operands.leaves, visible_keys(case), lambda leaves: local_score(case, leaves),
        operands.grad, case.head_dim**-0.5,
    )  # fmt: skip


# The three queries of "decode" are too few for gradients of slopes to be judged in fp32.
CALLS = [(name, *size) for name in CASES for size in SIZES if name != "decode" or size[1] != 32]


@pytest.mark.parametrize(("name", "dtype", "width"), CALLS, ids=str)
def test_varlen(name, dtype, width):
    torch.set_float32_matmul_precision("highest")
    case = CASES[name]
    # More heads than where each is computed alone: errors are judged by their mean.
    more = {"heads": 4 * case.heads, "kv_heads": 4 * case.kv_heads, "head_dim": width}
    case = dataclasses.replace(case, **more)
    call = torch.compile(packed_call(case, used_keys(case, "cuda")), fullgraph=True)
    check_packed(case, dtype, call)


@pytest.mark.parametrize("backend", ["auto", "hopper"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [(None, None), (300, None)], ids=str)
def test_long_sequences(causal, window, backend):
    if backend == "hopper" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    case = dataclasses.replace(LONG, head_dim=128, causal=causal, window=window)
    options = flexhop.KernelOptions(backend=backend)
    call = torch.compile(packed_call(case, None, options), fullgraph=True)
    check_packed(case, torch.bfloat16, call)


BACKWARD = {
    "cross": Packed((300, 0, 130, 1, 1000), (700, 3, 100, 0, 64), padding=3),
    "bottom_right": Packed((300, 0, 513, 64), (700, 129, 600, 0), causal=True),
    "top_left": Packed((30, 200, 500), (200, 600, 100), causal=True, bottom_right=False),
    "window": Packed((1400, 150, 0, 33), window=(200, 50)),
    "whole": Packed((1024, 512, 512), causal=True),
    "used": Packed((256, 600, 30), (512, 640, 64), used=(300, 640, 0), causal=True),
    "mods": Packed((700, 0, 65, 300), causal=True, score=True, mask=True),
    "score": Packed((256, 1000, 24), score=True),
    "many_short": Packed((1, 2, 3, 1, 2) * 200, causal=True),
}


@pytest.mark.parametrize("backend", ["triton", "hopper"])
@pytest.mark.parametrize("width", [64, 128, 256])
@pytest.mark.parametrize("name", BACKWARD)
def test_gradients_of_either_backward_kernel(name, width, backend):
    """Slopes need no gradient: what is added up for captured tensors is not this kernel's."""
    if backend == "hopper" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    case = dataclasses.replace(BACKWARD[name], heads=16, kv_heads=8, head_dim=width)
    options = flexhop.KernelOptions(backend=backend)
    plain = packed_call(case, used_keys(case, "cuda"), options)

    def frozen(query, key, value, slopes, *cuts):
        return plain(query, key, value, slopes.detach(), *cuts)

    call = torch.compile(frozen, fullgraph=True)
    _, codes = run_and_get_code(check_packed, case, torch.bfloat16, call)
    assert any("def differentiate" in code for code in codes) == (backend == "hopper")


# By what reads one entry of a table [2048, heads].
LEARNED = {
    "slope": lambda t: lambda s, b, h, q, k: s + t[0, h] * 0.05 * (k - q),
    "slope_of_a_sequence": lambda t: lambda s, b, h, q, k: s + t[b, h] * 0.05 * (k - q),
    "temperature": lambda t: lambda s, b, h, q, k: s * (1 + 0.2 * t[0, h]),
    "temperature_of_a_query": lambda t: lambda s, b, h, q, k: s * (1 + 0.2 * t[q, h]),
    "distance": lambda t: lambda s, b, h, q, k: s + t[q - k + 1023, h],
    "bucket": lambda t: lambda s, b, h, q, k: s + t[((q - k) // 3).clamp(-20, 100) + 20, h],
}


@pytest.mark.parametrize("backend", ["triton", "hopper"])
@pytest.mark.parametrize("width", [64, 128, 256])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", LEARNED)
def test_gradients_of_learned_tables(name, causal, width, backend):
    if backend == "hopper" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    case = Packed((300, 0, 65, 129, 1, 333), heads=8, kv_heads=4, head_dim=width, causal=causal)
    made = make_operands(case, torch.bfloat16, "cuda")
    table = torch.randn(2048, 8, generator=torch.Generator("cuda").manual_seed(1), device="cuda")
    operands = dataclasses.replace(made, slopes=table.requires_grad_())
    at = sequence_and_place(case.queries, sum(case.queries), "cuda")
    options = flexhop.KernelOptions(backend=backend)

    def call(query, key, value, table, cut):
        return flexhop.varlen_attention(
            query, key, value, cut, score_mod=LEARNED[name](table), is_causal=causal,
            enable_gqa=True, kernel_options=options,
        )  # fmt: skip

    def run():
        out = torch.compile(call, fullgraph=True)(*call_arguments(case, operands)[:5])
        (out * operands.grad).sum().backward()
        return out

    def of_packed(leaves):
        local, (sequence, place) = LEARNED[name](leaves["slopes"]), at
        return lambda s, b, h, q, k: local(s, sequence[q], h, place[q], place[k])

    out, codes = run_and_get_code(run)
    assert any("def add_captured_grads" in code for code in codes) == (backend == "hopper")
    found = {"out": out} | {name: leaf.grad for name, leaf in operands.leaves.items()}
    judge(found, operands.leaves, visible_keys(case), of_packed, operands.grad, width**-0.5)


def test_new_lengths_run_the_same_kernels():
    call = torch.compile(packed_call(LONG), fullgraph=True, dynamic=True)
    for lengths in ((1000, 48, 1200), (500, 3, 900), (129,) * 9):
        case = dataclasses.replace(LONG, queries=lengths, head_dim=64)
        check_packed(case, torch.bfloat16, call)


def test_ten_thousand_sequences():
    """Against the same sequences, a thousand at a time."""
    lengths = tuple(1 + 7 * number % 50 for number in range(10_000))
    case = Packed(lengths, heads=2, kv_heads=1, head_dim=64, causal=True)
    operands = make_operands(case, torch.bfloat16, "cuda")
    query, key, value = (operands.query, operands.key, operands.value)
    call = torch.compile(packed_call(case), dynamic=True)
    out, _ = call(*call_arguments(case, operands))
    first = 0
    for number in range(0, len(lengths), 1000):
        part = dataclasses.replace(case, queries=lengths[number : number + 1000])
        span = slice(first, first + sum(part.queries))
        few = offsets(part.queries, "cuda")
        expected, _ = call(query[span], key[span], value[span], operands.slopes, few)
        torch.testing.assert_close(out[span], expected, rtol=0, atol=2e-2)
        first = span.stop


def jagged(tokens: torch.Tensor, cut: torch.Tensor) -> torch.Tensor:
    """[T, H, D] as [S, H, ragged, D]."""
    return torch.nested.nested_tensor_from_jagged(tokens, cut).transpose(1, 2)


@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("name", ["alike", "causal", "cross"])
def test_nested(name, width):
    case = dataclasses.replace(CASES[name], head_dim=width, padding=0)
    operands = make_operands(case, torch.bfloat16, "cuda")
    leaves = [operands.query, operands.key, operands.value]
    cuts = [offsets(case.queries, "cuda").long(), *[offsets(case.key_lengths, "cuda").long()] * 2]

    def call(*leaves):
        nested = [jagged(leaf, cut) for leaf, cut in zip(leaves, cuts, strict=True)]
        if case.keys is None:
            out = flexhop.scaled_dot_product_attention(*nested, is_causal=case.causal)
        else:
            out = flexhop.flex_attention(*nested)
        return out.transpose(1, 2).values()

    out = torch.compile(call)(*leaves)
    (out * operands.grad).sum().backward()
    found = {"out": out}
    found |= {n: leaf.grad for n, leaf in operands.leaves.items() if leaf.grad is not None}
    named = dict(zip(("query", "key", "value"), leaves, strict=True))
    visible = visible_keys(case)
    judge(found, named, visible, lambda _: None, operands.grad, width**-0.5)
