"""The compute capability that graphs are traced for. Public names only."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

import torch

__all__ = ["assumed", "capability_of"]

_ASSUMED: ContextVar[tuple[int, int] | None] = ContextVar("capability", default=None)


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
