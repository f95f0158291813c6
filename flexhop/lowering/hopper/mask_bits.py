"""Emit the kernel that stores the mask of partial blocks as bits."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from flexhop.compat import inductor
from flexhop.lowering.emission.kernel import KernelCall, Output, emit_one
from flexhop.lowering.hopper import bits
from flexhop.templates import hopper

_WARPS = 4


def _row_grid(batch: Any, rows: Any, meta: dict[str, Any]) -> tuple[Any, int, int]:
    """Some programs per row of blocks and slice of its queries, on one axis."""
    return (batch * rows * (meta["BLOCK"] // meta["ROWS"]) * meta["PROGRAMS_PER_ROW"], 1, 1)


_TEMPLATE = inductor.make_template(
    "flexhop_mask_bits", _row_grid, hopper.source_before("mask_bits")
)


def emit_mask_bits(call: KernelCall, operands: Sequence[Any], lists: Sequence[Any]) -> Any:
    """Emit the mask of partial blocks as bits, int32 [N, 1, 1, 512]; None if it stays a function.

    N is stored blocks per row, times rows of blocks, times batches that have bits of their own.

    Args:
        call: what all kernels of the call share.
        operands: query and key.
        lists: block lists of the queries.
    """
    problem, query = call.problem, operands[0]
    if not bits.stored_blocks(problem):
        return None
    batch = query.get_size()[0] if bits.is_by_batch(problem) else 1
    rows = lists[0].get_size()[2]
    size = [batch * rows * bits.stored_blocks(problem), 1, 1, bits.WORDS]
    device = inductor.device_of(query)
    layout = inductor.contiguous_layout(device, torch.int32, size)
    inputs = [*operands, *lists[:2]]
    made = {"num_warps": _WARPS, **dataclasses.asdict(bits.constants())}
    result = emit_one(_TEMPLATE, inputs, Output(layout, [batch, rows]), made, call)
    return inductor.realize([result])[0]
