"""16-bit values as memory holds them, in Inductor's fused kernels. torch 2.11 to 2.15.

Inductor computes with them in fp32, and a kernel that stores a value goes on with what it had
before it was rounded.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._inductor.lowering import make_pointwise
from torch._inductor.virtualized import ops

__all__ = ["as_stored"]

_HALVES = (torch.float16, torch.bfloat16)


def as_stored(value: Any) -> Any:
    """IR of the same value, rounded to its dtype."""
    dtype = value.get_dtype()
    if dtype not in _HALVES:
        return value

    def through_bits(x: Any) -> Any:
        bits = ops.to_dtype_bitcast(x, torch.int16, dtype)
        return ops.to_dtype_bitcast(bits, dtype, torch.int16)

    return make_pointwise(through_bits)(value)
