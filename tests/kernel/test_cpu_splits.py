"""Loops of compiled C++ that compute with quotients of a position."""

import pytest
import torch
from torch._inductor.codegen import cpp  # noqa: F401  (its import brings the repairs)
from torch._inductor.utils import fresh_cache

import flexhop
from flexhop.compat.kernels import cpp_checks

LENGTH, SIZE = 256, 50  # five documents of 50, and six positions


def documents():
    return torch.arange(LENGTH) // SIZE


def attend(query, key, value):
    ids = documents()
    mask = flexhop.create_block_mask(
        lambda b, h, q_idx, kv_idx: ids[q_idx] == ids[kv_idx], None, None, LENGTH, LENGTH, "cpu"
    )
    return flexhop.flex_attention(query, key, value, block_mask=mask)


@pytest.mark.filterwarnings("ignore::flexhop.errors.EagerWarning")
def test_documents_made_in_a_compiled_function():
    """PyTorch left the last six entries uninitialised, and gradients were wrong."""
    torch.manual_seed(0)
    inputs = [torch.randn(1, 2, LENGTH, 16).requires_grad_() for _ in range(3)]
    wanted = torch.autograd.grad(attend(*inputs).square().sum(), inputs)
    compiled = torch.compile(attend, fullgraph=True)
    found = torch.autograd.grad(compiled(*inputs).square().sum(), inputs)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("length", "is_split"), [(250, True), (256, False)])
def test_only_loops_without_a_rest_are_split(length, is_split, monkeypatch: pytest.MonkeyPatch):
    def note(node):
        answers.append(leaves_rest(node))
        return answers[-1]

    answers, leaves_rest = [], cpp_checks._leaves_rest
    monkeypatch.setattr(cpp_checks, "_leaves_rest", note)
    with fresh_cache():  # a graph that is found there has no loops to split
        found = torch.compile(lambda: torch.arange(length) // SIZE)()
    torch.testing.assert_close(found, torch.arange(length) // SIZE)
    assert answers == [not is_split]
