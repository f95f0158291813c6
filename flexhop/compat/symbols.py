"""Whether a size is a number or dynamic, without specialising it. torch 2.11 to 2.15."""

from __future__ import annotations

import torch

__all__ = ["is_exporting", "is_flag", "is_symbolic"]


def is_exporting() -> bool:
    """Whether torch.export is tracing; `torch.compiler.is_exporting` is constant in Dynamo's
    traces (2.11 to 2.13)."""
    return torch.compiler._is_exporting_flag


def is_flag(value: object) -> bool:
    """Whether an argument is a choice: a bool, also NumPy's or a symbol, 0 or 1, or None."""
    is_plain = value is None or isinstance(value, (bool, int, torch.SymBool))
    return is_plain or type(value).__name__ in ("bool", "bool_")  # NumPy 2, and 1


def is_symbolic(size: int) -> bool:
    """Whether a size is dynamic in the code being traced.

    Dynamo hides it: while it traces, a symbolic size is an instance of int.
    """
    if not torch.compiler.is_dynamo_compiling():
        return isinstance(size, torch.SymInt)
    from torch.fx.experimental.symbolic_shapes import has_static_value

    return not has_static_value(size)
