"""Emit the kernel that stores the mask of partial blocks as bits."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from flexhop.compat.kernels import inductor
from flexhop.lowering.emission.kernel import KernelCall, Output, emit_one
from flexhop.lowering.hopper import bits
from flexhop.lowering.hopper.bits import StoredBits
from flexhop.templates import hopper

_WARPS = 4


def _row_grid(batch: Any, rows: Any, meta: dict[str, Any]) -> tuple[Any, int, int]:
    """Several programs per row of blocks and slice of its rows, on one axis."""
    return (batch * rows * (meta["ROW_SIZE"] // meta["ROWS"]) * meta["PROGRAMS_PER_ROW"], 1, 1)


_TEMPLATE = inductor.make_template(
    "flexhop_mask_bits", _row_grid, hopper.source_before("mask_bits")
)


def emit_mask_bits(
    call: KernelCall, operands: Sequence[Any], lists: Sequence[Any], stored: StoredBits,
    *, by_key: bool = False,
) -> Any:  # fmt: skip
    """Emit the mask of partial blocks as bits, int32; None if it stays a function.

    Args:
        call: data that all kernels of the call share.
        operands: query and key.
        lists: block lists of the queries, or of the keys.
        stored: the bits.
        by_key: whether they are those of the keys.
    """
    query = operands[0]
    if not stored.blocks:
        return None
    size = bits_size(stored, query, lists[0].get_size()[2])
    layout = inductor.contiguous_layout(inductor.device_of(query), torch.int32, size)
    inputs = [*operands, *lists[:2]]
    made = {"num_warps": _WARPS, **dataclasses.asdict(bits.constants(stored, by_key=by_key))}
    batch = query.get_size()[0] if stored.by_batch else 1
    output = Output(layout, [batch, lists[0].get_size()[2]])
    return inductor.realize([emit_one(_TEMPLATE, inputs, output, made, call)])[0]


def bits_size(stored: StoredBits, query: Any, rows: Any) -> list[Any]:
    """Sizes of the words: [B' * rows of blocks * stored blocks, 1, units, 4 * rows of a block].

    B' is the number of batches with their own bits.
    """
    batch = query.get_size()[0] if stored.by_batch else 1
    return [batch * rows * stored.blocks, 1, stored.columns // stored.unit, 4 * stored.rows]
