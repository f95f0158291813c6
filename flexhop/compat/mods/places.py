"""Where a number stands among those of a tensor, by operations that kernels compute.

PyTorch has no batching rules for `isin` and `isclose`, and none with symbolic sizes for
`searchsorted`; Inductor has none of them for each score. Up to 16 numbers are compared one by one,
which the analysis of mods understands. More are searched by halves: each step reads one. torch
2.11 to 2.15.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flexhop.compat.operators import vmapped

__all__ = ["COMPARED", "is_close", "is_in", "place_among"]

COMPARED = 16  # most numbers that are compared one by one, as many as make a row


def is_in(number: Tensor, numbers: Any, *, invert: bool = False) -> Tensor:
    """torch.isin for one number."""
    if not isinstance(numbers, Tensor) or numbers.dim() == 0:
        found = number == numbers
    elif numbers.numel() <= COMPARED:
        found = (numbers.reshape(-1) == number).any()
    else:
        ordered = numbers.reshape(-1).sort().values
        place = place_among(ordered, number).clamp(max=ordered.numel() - 1)
        found = vmapped.index(ordered, [place]) == number
    return ~found if invert else found


def is_close(
    value: Tensor, other: Tensor, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False
) -> Tensor:
    """torch.isclose, which has no batching rule: a loop over all scores would take minutes."""
    close = value == other
    if equal_nan:
        close = close | (value.isnan() & other.isnan())
    apart, allowed = (value - other).abs(), atol + (rtol * other).abs()
    return close | (apart.isfinite() & (apart <= allowed))


def place_among(ordered: Tensor, number: Tensor, *, right: bool = False) -> Tensor:
    """torch.searchsorted for one number: how many are smaller, or with `right` at most as large.

    NaN comes last, as in PyTorch.
    """
    count = ordered.numel()
    if count <= COMPARED:
        is_before = ~(ordered > number) if right else ~(ordered >= number)
        return is_before.sum()
    steps = 1
    while count >= 2**steps:  # of a symbolic size, only the power of two is guarded on
        steps += 1
    place = torch.zeros((), dtype=torch.int64, device=number.device)
    for power in range(steps - 1, -1, -1):
        next_place = place + 2**power
        value = vmapped.index(ordered, [next_place.clamp(max=count) - 1])
        is_before = ~(value > number) if right else ~(value >= number)
        place = torch.where((next_place <= count) & is_before, next_place, place)
    return place
