"""Calls without a batch or without queries: results without elements, and gradients of 0.

Mods are not evaluated: `torch.vmap` cannot map a sum of two indices over a length of 0.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flexhop.compat.sizes import is_known


def is_nothing(query: Tensor) -> bool:
    """Whether a size of query, [B, Hq, M, D], is known to be 0."""
    return any(is_known(size == 0) for size in query.shape)


def no_rows(
    rows: Tensor, key: Tensor, value: Tensor, captures: tuple[Any, ...], wide: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Out, lse and max_scores; out and lse depend on the operands, whose gradients are 0.

    Args:
        rows: the queries, [B, Hq, m, D], of which there are none.
        key, value, captures: the other operands.
        wide: dtype of lse.
    """
    tensors = (t for t in (rows, key, value, *captures) if isinstance(t, Tensor))
    operands = (t for t in tensors if t.is_floating_point())
    link = torch.stack([t.sum().to(wide) for t in operands]).sum()
    lse = rows.new_zeros(rows.shape[:3], dtype=wide) + link
    out = rows.new_zeros((*rows.shape[:3], value.size(3))) + link.to(rows.dtype)
    return out, lse, lse.detach()
