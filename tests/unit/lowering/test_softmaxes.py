"""A softmax in a mod is computed before the kernel, without Inductor's warning of it."""

from __future__ import annotations

import warnings

import pytest
import torch

from flexhop import create_block_mask, flex_attention
from flexhop.compat import torch_version
from flexhop.offline import generate_code

LENGTH, HEADS = 64, 2
WARNING = "Online softmax is disabled"
SCORES = {
    "whole": lambda weight: lambda s, b, h, q, k: s + weight.softmax(-1)[h, k % 5],
    "row": lambda weight: lambda s, b, h, q, k: s + weight[h].softmax(-1)[k % 5],
    "logarithm": lambda weight: lambda s, b, h, q, k: s + weight[h].log_softmax(-1)[(q - k) % 5],
    "table": lambda weight: lambda s, b, h, q, k: s + weight[h].softmax(0).cumsum(0)[(q - k) % 5],
}  # fmt: skip


def _warnings(function, *tensors):
    """How often Inductor warns, forward and backward, for a GPU that is not here."""
    torch._dynamo.reset()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        generate_code(function, *tensors, grad=any(t.requires_grad for t in tensors))
    return sum(WARNING in str(each.message) for each in seen)


def _tensors(dtype=torch.float32):
    return torch.randn(1, HEADS, LENGTH, 16, dtype=dtype), torch.randn(HEADS, 5, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", SCORES)
def test_scores_bring_no_warning(name, dtype):
    """float64 has no kernel: the definition is compiled, with the mod in it."""
    query, weight = _tensors(dtype)

    def call(query, weight):
        return flex_attention(query, query, query, score_mod=SCORES[name](weight))

    assert _warnings(call, query, weight.requires_grad_()) == 0


def test_masks_bring_no_warning():
    query, weight = _tensors()

    def call(query, weight):
        def mask_mod(b, h, q, k):
            return weight[h].softmax(-1)[(q + k) % 5] > 0.1

        mask = create_block_mask(mask_mod, 1, HEADS, LENGTH, LENGTH, device="cpu")
        return flex_attention(query, query, query, block_mask=mask)

    assert _warnings(call, query, weight) == 0


def test_softmaxes_of_users_warn_as_without_flexhop():
    """2.13 and later versions never warn."""
    query, weight = _tensors()

    def call(query, weight):
        shares = weight.softmax(-1)
        return flex_attention(
            query, query, query, score_mod=lambda s, b, h, q, k: s + shares[h, 0]
        )

    assert _warnings(call, query, weight) == (1 if torch_version() < (2, 13) else 0)
