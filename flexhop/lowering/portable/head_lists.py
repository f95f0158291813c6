"""Masks whose heads have lists of blocks of their own: one list for the heads of a group.

The decode kernel reads the keys of a group once if its heads iterate over one list. A small kernel
before it merges their lists, and notes which head sees what (portable/head_lists.py.jinja).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from flexhop.compat.kernels import gluon, inductor
from flexhop.lowering.emission.kernel import Output, emit_one
from flexhop.lowering.problem import Problem
from flexhop.ops.args import AttentionArgs, CachedArgs
from flexhop.templates import portable

_WARPS = 4
_COLUMNS = 256  # blocks that a program looks at together


@dataclasses.dataclass(frozen=True, slots=True)
class HeadListsConstants:
    """Constants of portable/head_lists.py.jinja."""

    KV_HEADS: int
    GQA_GROUP: int
    GROUP_ROUNDED: int
    COLUMNS: int
    HAS_FULL_BLOCKS: bool
    ALL_FULL: int  # the state of a block that is full for all heads


def constants(problem: Problem) -> HeadListsConstants:
    """Constants of the kernel for a problem with blocks."""
    blocks, group = problem.blocks, problem.group
    assert blocks is not None
    full = sum(2 << (2 * head) for head in range(group))
    return HeadListsConstants(
        KV_HEADS=problem.kv_heads,
        GQA_GROUP=group,
        GROUP_ROUNDED=1 << (group - 1).bit_length(),
        COLUMNS=_COLUMNS,
        HAS_FULL_BLOCKS=blocks.has_full,
        ALL_FULL=full - (1 << 32) if full >= 1 << 31 else full,  # as int32
    )


def _grid(batch: Any, heads: Any, rows: Any, meta: dict[str, Any]) -> tuple[Any, int, int]:
    """One program per row of blocks, key head and batch with lists of its own, on one axis."""
    return (batch * heads * rows, 1, 1)


_TEMPLATE = inductor.make_template("flexhop_head_lists", _grid, portable.source("head_lists"))


def emit_head_lists(
    problem: Problem, args: AttentionArgs | CachedArgs, lists: Sequence[Any]
) -> list[Any]:
    """Emit the kernel: counts and entries of partial blocks, and of full ones.

    Args:
        problem: the call's problem, with blocks.
        args: operands with storage.
        lists: block lists of the queries.
    """
    blocks = problem.blocks
    assert blocks is not None
    query: Any = args.query
    key: Any = args.key
    batch = query.get_size()[0] if blocks.per_batch else 1
    rows = gluon.count_blocks(query.get_size()[2], blocks.q_size)
    keys = key.get_size()[2]
    if isinstance(args, CachedArgs) and args.pages:
        table: Any = args.pages[0]
        keys = keys * table.get_size()[1]
    columns = gluon.count_blocks(keys, blocks.kv_size)
    device, count = inductor.device_of(query), [batch, problem.kv_heads, rows]
    entries, full_num, full_entries = (
        inductor.empty(size, None, torch.int32, device)
        for size in ([*count, 2 * columns], count, [*count, columns])
    )
    layout = inductor.contiguous_layout(device, torch.int32, count)
    output = Output(layout, count, [entries, full_num, full_entries])
    inputs = [entries, full_num, full_entries, *lists]
    made = {"num_warps": _WARPS, **dataclasses.asdict(constants(problem))}
    num = emit_one(_TEMPLATE, inputs, output, made)
    return inductor.realize((num, entries, full_num, full_entries))
