"""Autocast for the operator: the requested dtype, and a region without autocast."""

from __future__ import annotations

import contextlib

import torch

__all__ = ["wanted_dtype", "without_autocast"]


def wanted_dtype(device: str) -> torch.dtype | None:
    """The dtype that autocast converts operands on this device type to; None outside autocast."""
    # "meta" has no autocast and cannot answer the second question. Dynamo (2.11) cannot trace the
    # first one.
    has_autocast = torch.compiler.is_dynamo_compiling() or torch.amp.is_autocast_available(device)
    if not has_autocast or not torch.is_autocast_enabled(device):
        return None
    return torch.get_autocast_dtype(device)


def without_autocast(device: str) -> contextlib.AbstractContextManager[object]:
    """A region in which operations keep the dtypes of their operands."""
    if wanted_dtype(device) is None:
        return contextlib.nullcontext()
    return torch.autocast(device, enabled=False)
