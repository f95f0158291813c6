"""Autocast for the operator: the requested dtype, and a region without autocast."""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor

__all__ = ["cast", "dtype_under", "wanted_dtype", "without_autocast"]

# Autocast converts these. It leaves fp64 alone, as it does for PyTorch's own operators.
_CAST = (torch.float16, torch.bfloat16, torch.float32)


def wanted_dtype(device: str) -> torch.dtype | None:
    """The dtype that autocast converts operands on this device type to; None outside autocast."""
    # "meta" has no autocast and cannot answer the second question. Dynamo (2.11) cannot trace the
    # first one.
    has_autocast = torch.compiler.is_dynamo_compiling() or torch.amp.is_autocast_available(device)
    if not has_autocast or not torch.is_autocast_enabled(device):
        return None
    return torch.get_autocast_dtype(device)


def dtype_under(wanted: torch.dtype | None, dtype: torch.dtype) -> torch.dtype:
    """The dtype that an operand has after autocast to `wanted`."""
    return dtype if wanted is None or dtype not in _CAST else wanted


def cast(tensor: Tensor, wanted: torch.dtype) -> Tensor:
    """Convert an operand as autocast to `wanted` does."""
    return tensor.to(dtype_under(wanted, tensor.dtype))


def without_autocast(device: str) -> contextlib.AbstractContextManager[object]:
    """A region in which operations keep the dtypes of their operands."""
    if wanted_dtype(device) is None:
        return contextlib.nullcontext()
    return torch.autocast(device, enabled=False)
