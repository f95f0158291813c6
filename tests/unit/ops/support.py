"""What the operator's tests share: small operands, and eager attention as the oracle."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from flexhop import BlockMask, create_block_mask

BATCH, HEADS, LENGTH, WIDTH = 2, 2, 24, 8
SHAPE = (BATCH, HEADS, LENGTH, LENGTH)

# Eager attention is the oracle here, so its advice to compile is not wanted.
quiet = pytest.mark.filterwarnings("ignore::flexhop.errors.EagerWarning")


def operands(
    batch: int = BATCH,
    length: int = LENGTH,
    *,
    dtype: torch.dtype = torch.float32,
    grad: bool = False,
) -> list[Tensor]:
    """query, key, value."""
    shape = (batch, HEADS, length, WIDTH)
    return [torch.randn(shape, dtype=dtype, requires_grad=grad) for _ in range(3)]


def causal(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    """Keys up to the query."""
    return q_idx >= kv_idx


def causal_mask(length: int = LENGTH, mask_mod: Any = causal) -> BlockMask:
    """A block mask with several blocks."""
    return create_block_mask(mask_mod, None, None, length, length, device="cpu", BLOCK_SIZE=16)


def compiled(function: Callable[..., Any], **keywords: Any) -> Callable[..., Any]:
    """`function` through Dynamo and AOTAutograd, without code generation."""
    return torch.compile(function, backend="aot_eager", fullgraph=True, **keywords)


class Counted:
    """A compiled function that counts the graphs that Dynamo made for it."""

    def __init__(self, function: Callable[..., Any], dynamic: bool | None = None) -> None:
        from torch._dynamo.testing import CompileCounterWithBackend

        self.backend = CompileCounterWithBackend("aot_eager")
        self.run = torch.compile(function, backend=self.backend, fullgraph=True, dynamic=dynamic)

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        """Call it."""
        return self.run(*args, **keywords)

    @property
    def graphs(self) -> int:
        """How many."""
        return self.backend.frame_count


def assert_same(
    function: Callable[..., Any],
    inputs: Sequence[Any],
    leaves: Sequence[Tensor] | None = None,
    run: Callable[..., Any] | None = None,
) -> None:
    """Compiled and eager results agree, and so do the gradients of `leaves`.

    Args:
        function: of `inputs`; one tensor.
        inputs: its arguments.
        leaves: default: those of `inputs` that require a gradient.
        run: the compiled function, default `compiled(function)`.
    """
    run = compiled(function) if run is None else run
    if leaves is None:
        leaves = [t for t in inputs if isinstance(t, Tensor) and t.requires_grad]
    expected, actual = function(*inputs), run(*inputs)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
    if not leaves:
        return
    grad = torch.randn_like(expected)
    expected_grads = torch.autograd.grad(expected, leaves, grad, allow_unused=True)
    actual_grads = torch.autograd.grad(actual, leaves, grad, allow_unused=True)
    for found, wanted in zip(actual_grads, expected_grads, strict=True):
        wanted = torch.zeros_like(found) if wanted is None and found is not None else wanted
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
