"""Dispatch modes without Dynamo, `torch.no_grad()` inside a mod, and the GPU that is traced for.

torch 2.11 to 2.15.

A trace into operators drops the switches of grad mode that Dynamo records, and derivatives of the
graph would go through what they enclose.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any, Self

import torch
import torch.utils._pytree as pytree
from torch._C._dynamo.eval_frame import set_eval_frame
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["DetachMode", "DispatchMode", "assumed", "capability_of", "without_dynamo"]

_ASSUMED: ContextVar[tuple[int, int] | None] = ContextVar("capability", default=None)


class DispatchMode(TorchDispatchMode):
    """A mode while which Dynamo rests.

    PyTorch wraps other modes' `__torch_dispatch__`, lest Dynamo compile it. The wrapper imports
    Dynamo, which takes more than a second in a process that compiles nothing, and costs each
    operator microseconds.
    """

    def __init__(self) -> None:
        super().__init__()
        self._callbacks: list[Any] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __enter__(self) -> Self:
        self._callbacks.append(set_eval_frame(None))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        set_eval_frame(self._callbacks.pop())


@contextlib.contextmanager
def without_dynamo() -> Iterator[None]:
    """A region that Dynamo does not compile.

    If a backend cannot compile a graph, Dynamo runs its frame, and compiles what that calls.
    """
    before = set_eval_frame(None)
    try:
        yield
    finally:
        set_eval_frame(before)


class DetachMode(TorchFunctionMode):
    """Detach what functions return while gradients are off; to trace a mod with gradients on."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Call the function."""
        result = func(*args, **(kwargs or {}))
        if torch.is_grad_enabled():
            return result
        return pytree.tree_map_only(torch.Tensor, _detach, result)


def _detach(tensor: torch.Tensor) -> torch.Tensor:
    return torch.ops.aten.detach.default(tensor) if tensor.is_floating_point() else tensor


def capability_of(device: torch.device) -> tuple[int, int] | None:
    """The capability of the GPU that runs a graph of tensors on a device; None: it is no GPU.

    Graphs for an absent GPU are traced on a CPU.
    """
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device)
    return _ASSUMED.get()


@contextlib.contextmanager
def assumed(capability: tuple[int, int]) -> Iterator[None]:
    """Trace on a CPU for a GPU of this capability."""
    token = _ASSUMED.set(capability)
    try:
        yield
    finally:
        _ASSUMED.reset(token)
