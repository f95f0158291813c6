"""Memory layout of results, and those of calls without a batch or without queries.

They have no elements, and gradients are 0. Mods are not evaluated: `torch.vmap` cannot map a sum
of two indices over a length of 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flexhop.compat.sizes import is_known


def dense_strides(sizes: Sequence[int], like: Sequence[int]) -> tuple[int, ...]:
    """Strides of a dense tensor of `sizes` with the dimension order of `like`.

    The last dimension stays innermost if it is innermost in `like`. Otherwise the result is
    contiguous, because kernels write rows.
    """
    order = list(range(len(sizes)))
    if like[-1] == 1:
        # Stable sort: among equal strides (expanded dimensions), the outer dimension stays outer.
        order[:-1] = sorted(order[:-1], key=lambda d: like[d], reverse=True)
    strides = [0] * len(sizes)
    step = 1
    for dimension in reversed(order):
        strides[dimension] = step
        step = step * sizes[dimension]
    return tuple(strides)


def empty_ordered(sizes: Sequence[int], like: Tensor) -> Tensor:
    """Uninitialised dense tensor of `sizes` in the dtype, device and order of `like`."""
    return like.new_empty_strided(tuple(sizes), dense_strides(sizes, like.stride()))


def ordered(result: Tensor, like: Tensor) -> Tensor:
    """`result` stored in the dimension order of `like`."""
    # Do not write to an empty tensor: under torch.vmap and forward mode it may lack a dimension.
    strides = dense_strides(result.shape, like.stride())
    order = sorted(range(len(strides)), key=lambda d: strides[d], reverse=True)
    inverse = sorted(range(len(order)), key=order.__getitem__)
    return result.permute(order).contiguous().permute(inverse)


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
