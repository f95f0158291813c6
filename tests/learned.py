"""Gradients of a captured tensor by interpreted portable kernels, against the definition."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch

import flexhop
from flexhop.masks import causal
from flexhop.offline.interpret import Memory, interpret
from flexhop.options import KernelOptions, Tile

SMALL = Tile(16, 16, 4, 2)


def check_kernels(
    tensors: Sequence[torch.Tensor], learned: Sequence[torch.Tensor],
    score_mod: Callable[..., Any], options: KernelOptions | None = None,
) -> None:  # fmt: skip
    """Compare output and gradients of query, key, value and what is learned, in fp32."""
    leaves, along = [*tensors, *learned], torch.randn(tensors[0].shape)
    out = flexhop.flex_attention(*tensors, score_mod)
    expected = torch.autograd.grad((out * along).sum(), leaves)
    found = interpret(
        partial(flexhop.flex_attention, score_mod=score_mod, kernel_options=options), *tensors,
        grad=lambda out: (out * along).sum(), memory=Memory(poison=True, check_bounds=True),
    )  # fmt: skip
    torch.testing.assert_close(found.result, out, rtol=2e-5, atol=2e-5)
    grads = [leaf.grad for leaf in leaves]
    torch.testing.assert_close(grads, list(expected), rtol=1e-4, atol=1e-4)


def check_gradients(
    tensors: Sequence[torch.Tensor], captured: torch.Tensor, score_mod: Callable[..., Any],
    *, is_causal: bool, deterministic: Iterable[bool],
) -> None:  # fmt: skip
    """Compare output and gradients of query, key, value and `captured`, in small tiles, fp32."""
    queries, keys = tensors[0].size(2), tensors[1].size(2)
    words: dict[str, Any] = {"score_mod": score_mod, "enable_gqa": True}
    if is_causal:
        words["block_mask"] = flexhop.create_block_mask(
            causal, None, None, queries, keys, "cpu", BLOCK_SIZE=16
        )
    along = torch.randn(*tensors[0].shape[:3], tensors[2].size(3))
    leaves = [*tensors, captured]
    out = flexhop.flex_attention(*tensors, **words)
    expected = torch.autograd.grad((out * along).sum(), leaves)
    for in_order in deterministic:
        options = KernelOptions(
            backend="triton", deterministic=in_order, forward=SMALL, grad_query=SMALL,
            grad_key_value=SMALL,
        )  # fmt: skip
        call = partial(flexhop.flex_attention, kernel_options=options, **words)
        for leaf in leaves:
            leaf.grad = None
        found = interpret(
            call, *tensors, grad=lambda out: (out * along).sum(),
            memory=Memory(poison=True, check_bounds=True),
        )  # fmt: skip
        torch.testing.assert_close(found.result, out, rtol=2e-5, atol=2e-5)
        grads = tuple(leaf.grad for leaf in leaves)
        torch.testing.assert_close(grads, expected, rtol=2e-5, atol=2e-5)
