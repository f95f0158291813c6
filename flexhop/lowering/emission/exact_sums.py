"""Order-independent sums of floating-point numbers.

Gradients of captured tensors are accumulated by atomic additions, in whatever order the GPU runs
them. In deterministic mode the numbers are added as integers. A sum is ROWS - 1 64-bit integers;
row k counts units of 2 ** (32 k - 149), and every finite fp32 number splits into two of them
(templates/mods/exact_sum.py.jinja). Integer addition is exact and associative; nothing is rounded
before `value_of`. A sum holds up to 2 ** 32 numbers of any size.

Source: Kulisch 2013, Computer Arithmetic and Validity, chapter 8 (long accumulators).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flexhop.compat.graphs import inline
from flexhop.compat.kernels import inductor

ROWS = 10  # the last row flags what is not finite: 1 for inf, 2 for -inf, 4 for NaN
_BITS = 32
_UNIT = -149  # exponent of the smallest fp32 number


def make_sums(size: Sequence[Any], device: torch.device) -> Any:
    """Empty sums, [ROWS, *size] int64, to be added to."""
    return inductor.zeros([ROWS, *size], torch.int64, device)


def lower_value(sums: Any, like: Tensor, copies: int | None = None) -> Any:
    """The values of the sums: IR with the sizes and dtype of the fake tensor `like`.

    copies: sums are [ROWS, ..., copies]; their total is wanted.
    """

    def formula(sums: Tensor) -> list[Tensor]:
        return [value_of(sums if copies is None else _total(sums)).to(like.dtype)]

    size = [ROWS, *like.shape, *([] if copies is None else [copies])]
    (value,) = inline.lower_formula(formula, [inline.fake(size, torch.int64, like)], [sums])
    return value


def _total(sums: Tensor) -> Tensor:
    """Sums [ROWS, ...] of copies [ROWS, ..., copies]."""
    special = sums[-1]
    flags = (((special & bit) != 0).any(-1).to(torch.int64) * bit for bit in (1, 2, 4))
    return torch.cat([sums[:-1].sum(-1), functools.reduce(torch.add, flags)[None]])


def value_of(sums: Tensor) -> Tensor:
    """Convert [ROWS, ...] int64 to [...] fp64, rounded like fp64 sums."""
    *rows, special = sums.unbind(0)
    total = torch.zeros_like(special, dtype=torch.float64)
    for number, row in reversed(list(enumerate(rows))):
        total = total + row.double() * 2.0 ** (_BITS * number + _UNIT)
    total = torch.where(special == 1, float("inf"), total)
    total = torch.where(special == 2, -float("inf"), total)
    return torch.where(special > 2, float("nan"), total)
