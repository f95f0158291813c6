"""Gradients of what all scores of a query, a key or a head read: kernels sum rows in registers."""

from __future__ import annotations

from functools import partial

import pytest
import torch

import flexhop
from flexhop.masks import causal
from flexhop.offline import generate_code
from flexhop.offline.interpret import interpret
from tests.learned import SMALL, check_gradients

pytestmark = pytest.mark.filterwarnings("ignore::flexhop.errors.EagerWarning")
QUERIES, KEYS = 43, 37
LENGTH = 192  # more keys than one kernel for all gradients has

MODS = {
    "query": lambda t: lambda s, b, h, q, k: s * t[h, q],
    "key": lambda t: lambda s, b, h, q, k: s - t[h, k] * 0.5,
    "both": lambda t: lambda s, b, h, q, k: s + t[0, q] * t[1, k],
    "few": lambda t: lambda s, b, h, q, k: s * t[b, q % 3] - t[b, k % 4],
    "head": lambda t: lambda s, b, h, q, k: s * t[h, 0] + t[b, k // 8],
    "points": lambda t: lambda s, b, h, q, k: s - (t[:, q] - t[:, k]).square().sum(),
}


@pytest.mark.parametrize(
    ("name", "is_causal", "deterministic"),
    [("query", True, (False,)), ("key", True, (False, True)), ("both", False, (False, True)),
     ("few", True, (False,)), ("head", False, (False,)), ("points", False, (False,))],
)  # fmt: skip
def test_gradients_are_those_of_the_definition(name, is_causal, deterministic):
    torch.manual_seed(0)
    sizes = ((2, 2, QUERIES, 16), (2, 1, KEYS, 16), (2, 1, KEYS, 16))
    tensors = [torch.randn(size).requires_grad_() for size in sizes]
    table = torch.randn(2, QUERIES).requires_grad_()
    check_gradients(
        tensors, table, MODS[name](table), is_causal=is_causal, deterministic=deterministic
    )


def sources(score_mod, width=16, length=LENGTH, batch=1, **words):
    """The text of each kernel of a call with gradients, by what it computes."""
    tensors = [torch.zeros(batch, 2, length, width, dtype=torch.bfloat16) for _ in range(3)]
    tensors = [tensor.requires_grad_() for tensor in tensors]
    call = partial(
        flexhop.flex_attention, score_mod=score_mod, kernel_options={"backend": "triton"}, **words
    )
    forward, *backward = generate_code(call, *tensors, grad=True).templates
    del forward
    names = (
        ("grad_query", "grad_key_value") if len(backward) == 2 else ("grad_query", "key", "value")
    )
    return dict(zip(names, (kernel.source for kernel in backward), strict=True))


@pytest.mark.parametrize(
    ("name", "adding"),
    [
        ("query", {"grad_query"}),
        ("key", {"grad_key_value"}),
        ("head", {"grad_query", "grad_key_value"}),
    ],
)
def test_the_kernel_that_owns_a_row_sums_it(name, adding):
    table = torch.zeros(2, LENGTH, requires_grad=True)
    found = sources(MODS[name](table))
    assert {kernel for kernel, text in found.items() if "add_row_sums(arg" in text} == adding
    for text in found.values():
        per_tile = text[text.index("def scatter_captured_grads") :].split("\n@triton.jit")[0]
        assert "atomic_add" not in per_tile


def test_of_two_launches_the_first_sums_keys():
    table = torch.zeros(2, LENGTH, requires_grad=True)
    found = sources(MODS["key"](table), width=256)
    assert ["add_row_sums(arg" in found[name] for name in ("grad_query", "key", "value")] == [
        False, True, False,
    ]  # fmt: skip


def test_rows_that_share_few_entries_add_to_copies():
    table = torch.zeros(2, 4, requires_grad=True)
    found = sources(lambda s, b, h, q, k: s * table[h, q % 4], batch=64, length=1024)
    assert "+ (q_idx + tl.program_id(0) & 31)" in found["grad_query"]


SHIFTS = {
    "plain": lambda t: lambda s, b, h, q, k: s + t[h, q],
    "scaled": lambda t: lambda s, b, h, q, k: s - 0.5 * (q + 1) * t[h, q],
    "head": lambda t: lambda s, b, h, q, k: s + t[h, 3] / (q + 1),
    "gate": lambda t: lambda s, b, h, q, k: s + t[h, q] - t[h, k],
}
CHANGES = {
    "factor": lambda t: lambda s, b, h, q, k: s * t[h, q],
    "by key": lambda t: lambda s, b, h, q, k: s + t[h, q] / (k + 1),
    "inside": lambda t: lambda s, b, h, q, k: torch.tanh(s + t[h, q]),
    "chosen": lambda t: lambda s, b, h, q, k: torch.where(k > 3, s + t[h, q], s),
}


@pytest.mark.parametrize("name", [*SHIFTS, *CHANGES])
def test_what_is_added_to_all_scores_of_a_query_adds_nothing(name):
    table = torch.zeros(2, LENGTH, requires_grad=True)
    mod = (SHIFTS | CHANGES)[name](table)
    assert ("add_row_sums(arg" in sources(mod)["grad_query"]) == (name in CHANGES)
    with_lse = sources(mod, return_lse=True)
    assert "add_row_sums(arg" in with_lse["grad_query"]


@pytest.mark.parametrize("return_lse", [False, True])
def test_the_gradient_of_a_shift_is_that_of_lse(return_lse):
    torch.manual_seed(0)
    tensors = [torch.randn(1, 2, QUERIES, 16).requires_grad_() for _ in range(3)]
    shift = torch.randn(2, QUERIES).requires_grad_()
    mask = flexhop.create_block_mask(causal, None, None, QUERIES, QUERIES, "cpu", BLOCK_SIZE=16)
    options = {"backend": "triton", "forward": SMALL, "grad_query": SMALL, "grad_key_value": SMALL}
    call = partial(
        flexhop.flex_attention, score_mod=lambda s, b, h, q, k: s + shift[h, q], block_mask=mask,
        return_lse=return_lse, kernel_options=options,
    )  # fmt: skip
    along = torch.randn(1, 2, QUERIES)

    def total(results):
        out, lse = results if return_lse else (results, torch.zeros(1, 2, QUERIES))
        return out.square().sum() + (lse * along).sum()

    interpret(call, *tensors, grad=total)
    torch.testing.assert_close(shift.grad, along[0] * return_lse, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("axis", ["query", "key", "both"])
@pytest.mark.parametrize("width", [4, 12, 40])
@pytest.mark.parametrize("deterministic", [False, True])
def test_rows_in_loops_get_their_gradients(axis, width, deterministic):
    """The kernel whose program owns queries, or keys, adds them."""
    torch.manual_seed(0)
    sizes = ((2, 2, QUERIES, 16), (2, 1, KEYS, 16), (2, 1, KEYS, 16))
    tensors = [torch.randn(size).requires_grad_() for size in sizes]
    table = (torch.randn(max(QUERIES, KEYS), width) * 0.2).requires_grad_()
    mods = {
        "query": lambda s, b, h, q, k: s * (1 + table[q].tanh().sum()),
        "key": lambda s, b, h, q, k: s + table[k].square().sum(),
        "both": lambda s, b, h, q, k: s * table[k].tanh().sum() + table[q].sin().sum() * s,
    }
    check_gradients(tensors, table, mods[axis], is_causal=True, deterministic=(deterministic,))
