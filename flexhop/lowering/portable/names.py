"""The portable kernels by name."""

from __future__ import annotations

from typing import Literal

Kernel = Literal[
    "forward", "decode", "jvp_forward", "grad_query", "grad_key_value", "grad_key", "grad_value",
    "jvp_grad_query", "jvp_grad_key", "jvp_grad_value",
]  # fmt: skip
