"""A rank's view of one mask under a plan: exchanges, local block lists and positions."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexhop.attention import mask_operands
from flexhop.block_mask.lists import block_count, dense_to_lists
from flexhop.block_mask.mask import BlockMask
from flexhop.distributed.packed import PackedSequences
from flexhop.distributed.places import Places
from flexhop.distributed.plan import Plan
from flexhop.distributed.routes import NOWHERE, Route, make_routes
from flexhop.mods.closures import describe
from flexhop.ops.call import MaskFacts


class Part(NamedTuple):
    """One attention call: its keys, their positions, and the blocks to visit.

    tokens: keys of the call. groups: for dropout, positions in the sequence by 16 queries, then by
    16 keys, see ops.dropout.place.
    """

    route: Route
    tokens: int
    places: Places
    blocks: tuple[Tensor, ...]
    facts: MaskFacts
    groups: Tensor


class View(NamedTuple):
    """One mask as a rank sees it. Created once per batch and shared by every layer with this mask.

    is_merged: whether the parts are merged by their lse; otherwise there is one part.
    groups: number of head groups, whose exchanges overlap. heads: number of ranks that split
    tokens by heads; this one is the head_rank-th.
    """

    name: str
    parts: tuple[Part, ...]
    unit: int
    is_merged: bool
    groups: int
    heads: int
    head_rank: int


def make_view(plan: Plan, name: str, rank: int, device: torch.device, bucket: int = 1) -> View:
    """The view of one rank of the mesh.

    Args:
        plan, name: of the mask.
        rank: rank in the mesh.
        device: device of the tensors.
        bucket: see make_routes.
    """
    group, head_rank = divmod(rank, plan.heads)
    # A graph that serves batches with other documents has no constants that depend on them.
    is_fixed = bucket == 1 or _is_fixed(plan.sources[name])
    parts = tuple(
        _part(plan, name, rank, route, device, is_fixed=is_fixed)
        for route in make_routes(plan, name, group, bucket)
    )
    cost = plan.masks[name].cost
    is_merged = cost.method == "stages" and plan.groups > 1
    groups = 1 if is_merged else cost.groups
    return View(name, parts, plan.unit, is_merged, groups, plan.heads, head_rank)


def _part(
    plan: Plan, name: str, rank: int, route: Route, device: torch.device, *, is_fixed: bool
) -> Part:
    units = block_count(plan.length, plan.unit)
    is_whole = route.is_run and not route.is_own and len(route.columns) == units
    tokens = plan.length if is_whole else len(route.columns) * plan.unit
    group = rank // plan.heads
    places = _places(plan, group, route, device, is_whole=is_whole, is_fixed=is_fixed)
    mask = _local_mask(plan, name, rank, route.columns, tokens)
    blocks, _, facts = mask_operands(mask)
    assert facts is not None
    placed = Route(*(_on(field, device) for field in route))._replace(counts=route.counts)
    groups = _dropout_groups(plan, group, route).to(device)
    return Part(placed, tokens, places, tuple(t.to(device) for t in blocks), facts, groups)


def _dropout_groups(plan: Plan, group: int, route: Route) -> Tensor:
    each = plan.unit // 16
    units = torch.cat((plan.own[group], route.columns.clamp(min=0)))
    return (units[:, None] * each + torch.arange(each)).flatten()


def _on(field: Any, device: torch.device) -> Any:
    return field.to(device) if isinstance(field, Tensor) else field


def _places(
    plan: Plan, group: int, route: Route, device: torch.device, *, is_whole: bool, is_fixed: bool
) -> Places:
    units = block_count(plan.length, plan.unit)
    queries = plan.group_positions(group)
    exists = queries < plan.length
    has_padding = plan.length % plan.unit != 0
    reach = plan.groups * plan.group_tokens if route.is_own else units * plan.unit
    query: Tensor | int = int(queries[0])
    is_constant = _is_run(plan.own[group]) and (is_fixed or plan.layout != "greedy")
    if not is_constant or not bool(exists.all()):
        query = queries.clamp(max=plan.length - 1).int().to(device)
    key: Tensor | int = 0 if is_whole else int(route.columns[0]) * plan.unit
    if not route.is_run:
        steps = torch.arange(plan.unit)
        columns = torch.where(route.columns == NOWHERE, plan.length, route.columns * plan.unit)
        key = (columns[:, None] + steps).flatten().int().to(device)
    elif not (is_whole or is_fixed or route.is_own):
        key = torch.tensor(key, dtype=torch.int32, device=device)
    return Places(
        query=query,
        key=key,
        live=exists.sum().int().to(device) if has_padding else None,
        length=plan.length,
        overhangs=reach > plan.length and not is_whole,
    )


def _is_run(units: Tensor) -> bool:
    """Whether units are consecutive."""
    return int(units[-1]) - int(units[0]) + 1 == len(units)


def _is_fixed(source: Any) -> bool:
    """Whether a mask's blocks depend on lengths alone, not on tensors that change with batches."""
    if source is None:
        return True
    found = None if isinstance(source, PackedSequences) else describe([source.mask_mod])
    return found is not None and not found.tensors


def _local_mask(plan: Plan, name: str, rank: int, columns: Tensor, tokens: int) -> BlockMask:
    """A rank's rows of the whole grid, with the columns in its buffer; its heads."""
    group, head_rank = divmod(rank, plan.heads)
    grid = plan.masks[name].grid
    per_unit = [plan.unit // size for size in grid.block]
    rows = _blocks(plan.own[group], per_unit[0])
    wanted = _blocks(columns, per_unit[1])[: block_count(tokens, grid.block[1])]
    lists = []
    for whole in (grid.partial, grid.full):
        dense = whole if whole.size(1) == 1 else whole.chunk(plan.heads, 1)[head_rank]
        there = (rows >= 0) & (rows < dense.size(2)), (wanted >= 0) & (wanted < dense.size(3))
        picked = dense[:, :, rows.clamp(0, dense.size(2) - 1)]
        picked = picked[..., wanted.clamp(0, dense.size(3) - 1)]
        lists += dense_to_lists(picked & there[0][:, None] & there[1])
    return BlockMask.from_kv_blocks(
        *lists, BLOCK_SIZE=grid.block, seq_lengths=(plan.group_tokens, tokens)
    )


def _blocks(units: Tensor, per_unit: int) -> Tensor:
    """Indices of the blocks of some units; negative if the unit is NOWHERE."""
    return (units[:, None] * per_unit + torch.arange(per_unit) * (units[:, None] >= 0)).flatten()
