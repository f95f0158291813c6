"""Lower `flexhop_unknown_blocks`: evaluate a mask in the blocks that intervals leave undecided.

On a GPU, one kernel reads the state of every block and evaluates the mask if it must. Only the
device knows how many blocks that are, and nothing synchronises. On the CPU, a loop evaluates some
unknown blocks at a time.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from flexhop.analysis import INDICES
from flexhop.block_mask.unknown import (
    EVERY,
    NONE,
    SOME,
    UNKNOWN,
    UnknownArgs,
    keep_of,
    states_of,
)
from flexhop.compat.graphs import inline
from flexhop.compat.kernels import inductor, pointwise
from flexhop.compat.kernels.pointwise import placeholder
from flexhop.lowering.emission.kernel import Output, fill, select
from flexhop.lowering.mods.analysed import kernel_graph
from flexhop.lowering.mods.indices import wrap_reads
from flexhop.lowering.mods.lower import INDEX_NAMES, position_sizes
from flexhop.templates import part

_WARPS = 4
# Blocks of one program: their states are one load.
_SPAN = 32
# Scores that a program evaluates at a time: 16 per thread.
_TILE = (32, 64)
_TURN_ELEMENTS = 1 << 20  # scores that the CPU evaluates per loop iteration


@dataclasses.dataclass(frozen=True, slots=True)
class UnknownConstants:
    """Constants of blocks/unknown_blocks.py.jinja."""

    SPAN: int
    ROW_SIZE: int
    COLUMN_SIZE: int
    TILE_M: int
    TILE_N: int
    NONE: int = NONE
    SOME: int = SOME
    EVERY: int = EVERY
    UNKNOWN: int = UNKNOWN


def constants(block: tuple[int, int]) -> UnknownConstants:
    """Constants of the kernel; block: queries and keys per block."""
    rows, columns = (
        min(tile, 1 << (size - 1).bit_length()) for tile, size in zip(_TILE, block, strict=True)
    )
    return UnknownConstants(_SPAN, *block, rows, columns)


def _grid(batch: Any, heads: Any, rows: Any, columns: Any, meta: dict[str, Any]) -> Any:
    """One program per SPAN blocks of a row of blocks, on one axis."""
    return (batch * heads * rows * ((columns + meta["SPAN"] - 1) // meta["SPAN"]), 1, 1)


_TEMPLATE = inductor.make_template("flexhop_unknown_blocks", _grid, part("blocks/unknown_blocks"))


def lower_unknown_blocks(*operands: Any) -> tuple[Any]:
    """Lower the operator: [B', H', R, C] int8."""
    args = UnknownArgs(*operands)
    if inductor.device_of(args.states).type == "cpu":
        return _loop(args)
    states: Any = args.states
    device, size = inductor.device_of(states), states.get_size()
    layout = inductor.contiguous_layout(device, torch.int8, size)
    sizes = UnknownArgs(*inline.fake_operands()).sizes
    graph = wrap_reads(kernel_graph(args.mask_mod, INDICES), INDICES, position_sizes(sizes))
    indices = [placeholder(name, torch.int32, device) for name in INDEX_NAMES]
    captures = inductor.realize(args.captures)
    buffers = pointwise.lower(graph, [*indices, *captures], "mask_mod")
    inputs = [inductor.contiguous(states), inductor.contiguous(args.lengths)]
    output, subgraphs = Output(layout, size), inductor.Subgraphs(buffers)
    made = {"num_warps": _WARPS, "num_stages": 1, **dataclasses.asdict(constants(args.block))}
    choices = fill(_TEMPLATE, inputs, output, [made], subgraphs)
    told = [*inputs, *captures]
    return (select(_TEMPLATE.name, choices, told, output, subgraphs, captures),)


def _loop(args: UnknownArgs) -> tuple[Any]:
    """The same on the CPU."""
    (found,) = inline.lower_operands(lambda given: [_asked(given)], args)
    return (found,)


def _asked(args: UnknownArgs) -> Tensor:
    """The states of all blocks; a loop evaluates the unknown ones."""
    flat = args.states.flatten()
    device, count = flat.device, max(1, _TURN_ELEMENTS // (args.block[0] * args.block[1]))
    is_unknown = flat == UNKNOWN
    ahead = is_unknown.cumsum(0)
    number, total = torch.arange(flat.shape[0], device=device), ahead[-1]
    # The unknown blocks in order, then others: evaluating the mask there gives the known state.
    place = torch.where(is_unknown, ahead - 1, total + number - ahead)
    order = torch.empty_like(number).scatter(0, place, number)
    positions, rebuild = inline.separate(args)
    fixed = [inline.leaves(args)[i] for i in positions]

    def condition(turn: Tensor, _: Tensor, total: Tensor, *__: Any) -> Tensor:
        return turn * count < total

    def body(turn: Tensor, states: Tensor, _: Tensor, order: Tensor, *values: Any) -> Any:
        given: UnknownArgs = rebuild(values)
        part = turn * count + torch.arange(count, device=device)
        part = order[part.clamp(max=order.shape[0] - 1)]
        found = states_of(keep_of(given), given, part)
        return turn + 1, states.index_copy(0, part, found)

    first = torch.zeros((), dtype=torch.int64, device=device)
    _, states = inline.while_loop(condition, body, (first, flat.clone()), [total, order, *fixed])
    return states.view(args.states.shape)
