"""Emit the kernel that computes the order in which tiles of keys add to the gradient of query.

Reproducible sums need a fixed order: that of the keys. The number of tiles that add to a block of
queries before a given tile follows from the lists of the earlier tiles.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from flexhop.compat.kernels import gluon, inductor
from flexhop.lowering.emission.kernel import Output, emit_one
from flexhop.lowering.hopper import backward
from flexhop.lowering.problem import Problem
from flexhop.templates import hopper

_WARPS = 4
_ROWS = 64
_COLUMNS = 32


@dataclasses.dataclass(frozen=True, slots=True)
class AddOrderConstants:
    """Constants of hopper/before/add_order.py.jinja."""

    ROWS: int
    COLUMNS: int
    HEADS: int
    SPARSE_Q_BLOCK_SIZE: int
    SPARSE_KV_BLOCK_SIZE: int
    TILES_PER_KV_BLOCK: int
    HAS_FULL_BLOCKS: bool
    HAS_RANGES: bool


def constants(problem: Problem) -> AddOrderConstants:
    """Constants of the kernel for a problem with blocks."""
    blocks = problem.blocks
    assert blocks is not None
    tile = backward.table_tile(problem)
    return AddOrderConstants(
        ROWS=_ROWS,
        COLUMNS=_COLUMNS,
        HEADS=problem.query_heads if blocks.per_head else 1,
        SPARSE_Q_BLOCK_SIZE=blocks.q_size,
        SPARSE_KV_BLOCK_SIZE=blocks.kv_size,
        TILES_PER_KV_BLOCK=blocks.kv_size // tile.block_n,
        HAS_FULL_BLOCKS=blocks.has_full,
        HAS_RANGES=blocks.has_ranges,
    )


def _grid(batch: Any, columns: Any, meta: dict[str, Any]) -> tuple[Any, int, int]:
    """One program per block of queries and one more, head and batch, on one axis."""
    return (batch * meta["HEADS"] * columns, 1, 1)


_TEMPLATE = inductor.make_template("flexhop_add_order", _grid, hopper.source_before("add_order"))


def order_size(problem: Problem, query: Any, key: Any) -> list[Any]:
    """Sizes of the result: [B or 1, Hq or 1, tiles of keys or 1, blocks of queries + 1]."""
    blocks = problem.blocks
    assert blocks is not None
    made = constants(problem)
    rows = gluon.count_blocks(key.get_size()[2], blocks.kv_size) * made.TILES_PER_KV_BLOCK
    columns = gluon.count_blocks(query.get_size()[2], blocks.q_size) + 1
    batch = query.get_size()[0] if blocks.per_batch else 1
    return [batch, made.HEADS, 1 if blocks.has_ranges else rows, columns]


def emit_order(problem: Problem, operands: Sequence[Any], lists: Sequence[Any]) -> Any:
    """Emit the kernel; int32 with sizes `order_size`.

    Args:
        problem: the call's problem, with blocks.
        operands: query and key.
        lists: block lists of the keys.
    """
    query, key = operands
    size = order_size(problem, query, key)
    layout = inductor.contiguous_layout(inductor.device_of(query), torch.int32, size)
    inputs = [query, key, *lists]
    made = {"num_warps": _WARPS, **dataclasses.asdict(constants(problem))}
    result = emit_one(_TEMPLATE, inputs, Output(layout, [size[0], size[3]]), made)
    return inductor.realize([result])[0]
