"""Operands in the text of the kernels for CPUs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flexhop.compat.graphs import inline
from flexhop.compat.kernels import inductor
from flexhop.compat.kernels.cpp_kernel import Printer
from flexhop.lowering.cpu.mods import Mods
from flexhop.ops.args import AttentionArgs, BackwardArgs
from flexhop.ops.dropout import threshold
from flexhop.ops.eager import listed_blocks

PARTIAL, FULL = 1, 2  # as in templates/cpu/tiles.h


def dense(tensor: Any) -> Any:
    """A tensor with storage whose rows are dense."""
    (tensor,) = inductor.realize([tensor])
    return (
        tensor if inductor.is_known(tensor.get_stride()[-1] == 1) else inductor.contiguous(tensor)
    )


def lower_states(args: AttentionArgs | BackwardArgs) -> Any:
    """The states of blocks [B', H', R, C] uint8, with storage; None without a mask's blocks."""
    if not args.blocks:
        return None
    (states,) = inline.lower_operands(states_of, args)
    return inductor.contiguous(states)


def lse_pointers(printer: Printer, lse: Any) -> str:
    """Lse in fp32 and in fp64, of which one is absent."""
    pointers = printer.pointer(lse), "nullptr"
    return ", ".join(pointers[::-1] if lse.get_dtype() == torch.float64 else pointers)


def lower_seed(args: AttentionArgs | BackwardArgs) -> list[Any]:
    """The seed of dropout with storage, or nothing."""
    return [inductor.contiguous(seed) for seed in args.dropout_seed]


def states_of(args: Any) -> list[Tensor]:
    """The states of blocks, if the call has any."""
    grids = listed_blocks(args)
    if grids.partial is None:
        return []
    states = grids.partial.to(torch.uint8) * PARTIAL
    return [states if grids.full is None else torch.where(grids.full, FULL, states)]


def layout_of(query: Any, size: Sequence[Any], meta: Any) -> tuple[Any, list[Any]]:
    """Layout of a result whose rows are dense, and the strides that it shall have afterwards."""
    device, dtype = inductor.device_of(query), query.get_dtype()
    strides = inductor.as_expressions(meta.stride())
    if inductor.is_known(strides[-1] == 1):
        return inductor.fixed_layout(device, dtype, size, strides), strides
    return inductor.contiguous_layout(device, dtype, size), strides


def operand_numbers(printer: Printer, args: Any) -> str:
    """C++ of sizes and scale."""
    batch, heads, queries, width = args.query.get_size()
    kv_batch, kv_heads, keys, value_width = args.value.get_size()
    sizes = (batch, heads, kv_batch, kv_heads, queries, keys, width, value_width)
    return ", ".join([*map(printer.number, sizes), f"float({float(args.scale)!r})"])


def operand_pointers(printer: Printer, args: Any) -> str:
    """C++ of query, key and value."""
    return ",\n  ".join(strided(printer, one) for one in (args.query, args.key, args.value))


def strided(printer: Printer, tensor: Any) -> str:
    """C++ of a tensor [B or 1, H, L, D]."""
    sizes, strides = tensor.get_size(), list(tensor.get_stride())
    if inductor.is_known(sizes[0] == 1):
        strides[0] = 0  # shared by all batches
    numbers = ", ".join(map(printer.number, strides[:3]))
    return f"{{{printer.pointer(tensor)}, {numbers}}}"


def blocks_of(printer: Printer, args: Any, states: Any, mods: Mods) -> str:
    """C++ of the states of blocks."""
    otherwise = FULL if mods.mask is None else PARTIAL
    if states is None:
        # One block that is larger than any length: all queries are in its first row.
        return f"{{nullptr, 1, 1, 0, 0, int64_t(1) << 40, 1, {otherwise}}}"
    sizes = ", ".join(map(printer.number, states.get_size()))
    block = f"{int(args.options['q_block_size'])}, {int(args.options['kv_block_size'])}"
    return f"{{{printer.pointer(states)}, {sizes}, {block}, {otherwise}}}"


def dropout_of(printer: Printer, args: Any, seed: Sequence[Any]) -> str:
    """C++ of what decides which weights are kept."""
    if not seed:
        return "{nullptr, 0, 0, 1.0f}"
    dropout_p = float(args.options["dropout_p"])
    placed = int(args.options.get("dropout_groups", 0))
    kept = f"float({1 / (1 - dropout_p)!r})"
    return f"{{{printer.pointer(seed[0])}, {placed}, {threshold(dropout_p)}, {kept}}}"
