"""Emit the decode kernel, and the one that combines its splits."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch

from flexhop.compat.kernels import inductor
from flexhop.lowering.emission.kernel import KernelCall, Output, emit_one
from flexhop.lowering.portable import kernels, splits
from flexhop.lowering.portable.emit import emit_kernel
from flexhop.lowering.portable.head_lists import emit_head_lists
from flexhop.ops.args import AttentionArgs, CachedArgs
from flexhop.templates import portable

# A program reads a few rows of one number each, and at most 4096 accumulators at a time.
_COMBINE_WARPS = 4


def _row_grid(
    batch: Any, heads: Any, length: Any, width: Any, meta: dict[str, Any]
) -> tuple[Any, int, int]:
    """One program per row, on one axis."""
    return (batch * heads * length, 1, 1)


_COMBINE = inductor.make_template(
    "flexhop_decode_combine", _row_grid, portable.source("decode_combine")
)


def emit_decode(
    call: KernelCall, args: AttentionArgs | CachedArgs, lists: Sequence[Any], output: Output
) -> Any:
    """Emit attention of short queries.

    Args:
        call: data that all kernels of the call share.
        args: operands with storage.
        lists: block lists of the queries.
        output: the result. lse is also written, and max_scores if the call asks for them.
    """
    count = kernels.num_splits(call.problem, call.options)
    operands = (args.query, args.key, args.value)
    if splits.merges_lists(call.problem):
        lists = emit_head_lists(call.problem, args, lists)

    def emit(statistics: Sequence[Any], shares: Output) -> Any:
        return emit_kernel(call, "decode", [*operands, *statistics, *lists], shares)

    return emit_shares(call, count, output, emit)


def emit_shares(
    call: KernelCall, count: int, output: Output, emit: Callable[[Sequence[Any], Output], Any]
) -> Any:
    """Emit a kernel for `count` shares of the keys, and the one that combines them.

    Args:
        call: data that all kernels of the call share.
        count: number of shares, SPLITS.
        output: the result, as in `emit_decode`.
        emit: emits the first kernel: of SUMS and SHIFTS, and of the output that it stores.
    """
    if count == 1:
        return emit((output.written[0], output.written[-1]), output)
    batch, heads, length, width = output.layout.size
    device = output.layout.device
    sums, shifts = (
        inductor.empty([count, batch, heads, length], None, torch.float32, device)
        for _ in range(2)
    )
    layout = inductor.contiguous_layout(
        device, torch.float32, [count * batch, heads, length, width]
    )
    acc = emit((sums, shifts), Output(layout, output.sizes, [sums, shifts]))
    inputs = [*inductor.realize((acc, sums, shifts)), output.written[0], output.written[-1]]
    constants = kernels.combine_constants(call.problem, call.options, count)
    made = {"num_warps": _COMBINE_WARPS, **dataclasses.asdict(constants)}
    return emit_one(_COMBINE, inputs, output, made)
