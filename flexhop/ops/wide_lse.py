"""Lse in fp64, as the operators of a call with a score_mod save it for backward.

A score_mod that hides keys by -1e9 makes all scores of some rows -1e9. Then lse is -1e9 plus the
logarithm of the number of keys, which fp32 loses: backward would find weights of 1. About -3e38,
the smallest number of fp32, fp64 loses it, too. So the number saved is not the sum. It is the fp32
number next to it plus the rest in a unit so small that the sum still rounds to this number:
2**-31 times the power of 2 in it. The rest is at most 32, and so is accurate to 2**-23.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexhop.compat.operators import vmapped

OPTION = "wide_lse"  # of the operators
_UNIT = 2.0**-31


class Parts(NamedTuple):
    """Lse is first + rest, both fp32."""

    first: Tensor
    rest: Tensor


def is_wanted(score_mod: Any) -> bool:
    """Whether the operator of a call returns a wide lse. Without a score_mod, scores are small."""
    return score_mod is not None and torch.is_grad_enabled()


def dtype_of(options: Mapping[str, Any], dtype: torch.dtype) -> torch.dtype:
    """The dtype of lse; options: the operator's, dtype: of sums."""
    return torch.float64 if options.get(OPTION) else dtype


def joined(shift: Tensor, log: Tensor) -> Tensor:
    """Shift + log as one wide number; both fp32."""
    first = shift + log
    # Without derivatives, which all are first's: a unit of 2**96 would cancel, and they with it.
    known = first.detach()
    rest = (shift.detach().double() - known.double()) + log.detach().double()
    small = torch.where(known.isfinite(), rest * _unit(known), 0.0)
    return first.double() + small


def parts_of(lse: Tensor) -> Parts:
    """The parts of a wide lse, or of one in fp32."""
    first = lse.to(torch.float32)
    if lse.dtype != torch.float64:
        return Parts(first, torch.zeros_like(first))
    rest = torch.where(first.isfinite(), (lse - first.double()) / _unit(first), 0.0)
    return Parts(first, rest.to(torch.float32))


def _unit(first: Tensor) -> Tensor:
    if vmapped.is_mapped(first):  # torch.vmap of 2.11 has no rule for bits
        exponent = torch.frexp(first).exponent - 1
        power = torch.ldexp(torch.where(first == 0, 0.0, 1.0).double(), exponent)
    else:
        power = (first.view(torch.int32) & 0x7F800000).view(torch.float32)
    return power.clamp(min=1e-30).double() * _UNIT
