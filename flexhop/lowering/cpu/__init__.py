"""Kernels for CPUs: C++ (templates/cpu) with the user's functions, printed by Inductor, inside."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from flexhop.compat.kernels import inductor
from flexhop.errors import ModLoweringError
from flexhop.lowering import chunked, fallback
from flexhop.lowering.cpu import backward, forward
from flexhop.ops.args import AttentionArgs, BackwardArgs, CachedArgs

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def lower_attention(*operands: Any) -> Any:
    """Lower `flexhop_attention`, or None if the kernels do not serve the call."""
    return _lower(forward.lower_attention, AttentionArgs(*operands))


def lower_cached_attention(*operands: Any) -> Any:
    """Lower `flexhop_cached_attention`, or None."""
    return _lower(forward.lower_cached_attention, CachedArgs(*operands))


def lower_attention_backward(*operands: Any) -> Any:
    """Lower `flexhop_attention_backward`, or None."""
    return _lower(backward.lower_attention_backward, BackwardArgs(*operands))


def _lower(lower: Callable[[Any], Any], args: Any) -> Any:
    """What `lower` gives; the definition by chunks serves calls for which that is nothing.

    These are: fp64; no query; functions that cannot be computed for one score at a time; systems
    other than Linux, because only there PyTorch's libraries export the products that they call.
    """
    query = args.query
    is_served = inductor.device_of(query).type == "cpu" and query.get_dtype() in DTYPES
    if not is_served or sys.platform != "linux" or fallback.is_without_kernels():
        return None
    if chunked.is_empty(query):
        return None
    try:
        return lower(args)
    except ModLoweringError:
        return None
