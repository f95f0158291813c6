"""What a generated Triton kernel imports, wherever Inductor compiles it."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["branchless_tanh"]


@triton.jit
def branchless_tanh(x):
    """tanh in fp32; off by less than 4e-7, and less than 2e-6 of its value.

    CUDA's own function branches, and so would every one of a thread's scores for itself.
    """
    exponential = tl.exp2(x * 2.885390081777927)  # 2 log2 e: exp(2 x)
    # Near 0 the difference from 1 has no digits left: the series there, to x ** 7, below 0.2.
    square = x * x
    series = (-17.0 / 315.0 * square + 2.0 / 15.0) * square - 1.0 / 3.0
    near = x + x * (square * series)
    return tl.where(square < 0.04, near, 1.0 - 2.0 / (exponential + 1.0))
