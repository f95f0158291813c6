"""What the operator's tests share: small operands, and eager attention as the oracle."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from flexhop.ops.dispatch import warn_once

BATCH, HEADS, LENGTH, WIDTH = 2, 2, 24, 8


def operands(
    batch: int = BATCH,
    heads: int = HEADS,
    length: int = LENGTH,
    *,
    dtype: torch.dtype = torch.float32,
    grad: bool = False,
) -> list[Tensor]:
    """query, key, value."""
    shape = (batch, heads, length, WIDTH)
    return [torch.randn(shape, dtype=dtype, requires_grad=grad) for _ in range(3)]


def compiled(function: Callable[..., Any], **keywords: Any) -> Callable[..., Any]:
    """`function` through Dynamo and AOTAutograd, without code generation."""
    return torch.compile(function, backend="aot_eager", fullgraph=True, **keywords)


def counter() -> CompileCounterWithBackend:
    """A backend that counts the graphs it gets (`frame_count`)."""
    return CompileCounterWithBackend("aot_eager")


def assert_same(
    function: Callable[..., Tensor],
    inputs: Sequence[Tensor],
    leaves: Sequence[Tensor] | None = None,
    run: Callable[..., Tensor] | None = None,
) -> None:
    """Compiled and eager results agree, and so do the gradients of `leaves`.

    Args:
        function: of `inputs`; one tensor.
        inputs: its arguments.
        leaves: default: those of `inputs` that require a gradient.
        run: the compiled function, default `compiled(function)`.
    """
    run = compiled(function) if run is None else run
    leaves = [t for t in inputs if t.requires_grad] if leaves is None else leaves
    expected, actual = function(*inputs), run(*inputs)
    torch.testing.assert_close(actual, expected)
    if not leaves:
        return
    grad = torch.randn_like(expected)
    expected_grads = torch.autograd.grad(expected, leaves, grad, allow_unused=True)
    actual_grads = torch.autograd.grad(actual, leaves, grad, allow_unused=True)
    for found, wanted in zip(actual_grads, expected_grads, strict=True):
        assert (found is None) == (wanted is None)
        if found is not None:
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


__all__ = ["assert_same", "compiled", "counter", "operands", "warn_once"]
