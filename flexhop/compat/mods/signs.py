"""Absolute values and signs whose derivatives PyTorch can trace under symbolic sizes.

2.11: the derivative of `aten.sgn`, which is that of `aten.abs`, is a tensor of zeros that ends in
an internal assertion if its sizes are symbols. 2.13 to 2.15 trace it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from flexhop.compat import torch_version

__all__ = ["TRACEABLE", "magnitude", "sign"]

aten = torch.ops.aten


def sign(x: Tensor) -> Tensor:
    """As `aten.sgn` of real numbers; 0 for NaN."""
    if not x.is_floating_point():
        return aten.sgn.default(x)
    return (x > 0).to(x.dtype) - (x < 0).to(x.dtype)


def magnitude(x: Tensor) -> Tensor:
    """As `aten.abs` of real numbers."""
    return x * sign(x) if x.is_floating_point() else aten.abs.default(x)


# What to call in place of an operator that is differentiated.
TRACEABLE: dict[object, Callable[[Tensor], Tensor]] = (
    {aten.abs.default: magnitude, aten.sgn.default: sign} if torch_version() < (2, 13) else {}
)
