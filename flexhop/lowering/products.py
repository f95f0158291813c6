"""Products of 16-bit values, as kernels that read these values from memory have them."""

from __future__ import annotations

from typing import Any

import torch

from flexhop.compat.kernels import inductor, pointwise

aten = torch.ops.aten
convert = torch.ops.prims.convert_element_type.default


def product(left: Any, right: Any) -> Any:
    """The elementwise product of two IR values, fp32.

    delta = rowsum(out * grad_out) takes what our kernels read: without the rounding, a difference
    would remain where grad_weight - delta cancels.
    """
    factors = (
        inductor.call_lowering(convert, pointwise.as_stored(t), torch.float32)
        for t in (left, right)
    )
    return inductor.call_lowering(aten.mul.Tensor, *factors)
