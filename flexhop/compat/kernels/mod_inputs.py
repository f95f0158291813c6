"""Inductor: the scalar inputs of user functions, whose names templates know.

`ir.InputBuffer` and `ir.FixedLayout` are the same in torch 2.11 to 2.15.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._inductor import ir

__all__ = ["buffer_name", "placeholder"]


def placeholder(name: str, dtype: torch.dtype, device: torch.device) -> Any:
    """An input, by the name of the template's variable."""
    layout = ir.FixedLayout(device, dtype, [], [])
    return ir.TensorBox.create(ir.InputBuffer(name=buffer_name(name), layout=layout))


def buffer_name(name: str) -> str:
    """The name of an input's buffer. No tensor has it.

    AOTInductor names buffers after the parameters of a module, and one may be called b.
    """
    return f"input {name}"
