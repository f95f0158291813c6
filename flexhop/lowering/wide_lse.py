"""A wide lse (ops/wide_lse.py) taken apart by Inductor, before kernels of ours read it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flexhop.compat.graphs import inline
from flexhop.compat.kernels import inductor
from flexhop.ops.args import BackwardArgs
from flexhop.ops.wide_lse import parts_of


def first_part(args: BackwardArgs) -> Any:
    """The fp32 number next to lse; lse itself if it is not wide."""
    convert = torch.ops.prims.convert_element_type.default
    return inductor.call_lowering(convert, args.lse, torch.float32)


def rest(args: BackwardArgs) -> Any:
    """What fp32 leaves of lse."""
    return _lower(lambda lse: parts_of(lse).rest, args)


def both_parts(args: BackwardArgs) -> Any:
    """The bits of both parts in one int64, the first part's in the upper half."""
    return _lower(_bits, args)


def _bits(lse: Tensor) -> Tensor:
    first, rest = (part.view(torch.int32).to(torch.int64) for part in parts_of(lse))
    return (first << 32) | (rest & 0xFFFFFFFF)


def _lower(formula: Callable[[Tensor], Tensor], args: BackwardArgs) -> Any:
    fake = BackwardArgs(*inline.fake_operands()).lse
    return inline.lower_formula(lambda lse: [formula(lse)], [fake], [args.lse])[0]
