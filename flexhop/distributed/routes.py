"""Which units are sent where, and how a rank's buffer of keys is assembled.

Pure functions of a plan. All sizes are the same on every rank, padded with units that no list
names. One graph therefore serves all ranks, and none skips a collective that others wait in.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flexhop.block_mask.lists import block_count
from flexhop.distributed.plan import Plan

NOWHERE = -1  # a zero-filled place of a buffer
# A run of units keeps its gaps in the buffer if they are at most this fraction of it.
_MOST_GAPS = 0.25


class Route(NamedTuple):
    """One exchange of a rank, and the buffer that it fills. Places are in units.

    Args:
        columns: [N] global indices of the buffer's units; padded with NOWHERE.
        order: [N] where each comes from: own units first, then received ones; NOWHERE is zeros.
        send: [T] places of own units, ordered by destination; padded with 0.
        counts: [2, groups] units sent to, and received from, each group.
        received: most units that arrive.
        own_back: [own] place in the buffer of each own unit; NOWHERE if it is absent; [0] if no
            own unit is in the buffer.
        received_back: [received] the same for received ones.
        returned: [own, W] places, among the T sent units, whose gradients belong to an own unit.
        is_run: whether the buffer's units are consecutive in the sequence.
        is_gather: whether everything is sent to everyone, by an all-gather.
        is_own: whether the buffer is the rank's own keys unchanged, and nothing is sent.
    """

    columns: Tensor
    order: Tensor
    send: Tensor
    counts: Tensor
    received: int
    own_back: Tensor
    received_back: Tensor
    returned: Tensor
    is_run: bool = False
    is_gather: bool = False
    is_own: bool = False


def make_routes(plan: Plan, name: str, rank: int, bucket: int) -> list[Route]:
    """The exchanges of a rank's group for one mask, in order of use.

    Args:
        plan, name: of the mask.
        rank: index of the group.
        bucket: round up sizes to multiples of this many units, so that different packings of a
            batch share them.
    """
    if plan.groups == 1:
        return [_own_route(plan, rank)]
    method = plan.masks[name].cost.method
    if method == "gather":
        return [_gather_route(plan, rank)]
    flow = _flows(plan, name)
    if method == "blocks":
        return [_block_route(plan, name, rank, flow, bucket)]
    own = _own_route(plan, rank)
    travels = any(len(units) for row in flow for units in row)
    return [own, _remote_route(plan, rank, flow, bucket)] if travels else [own]


def _own_route(plan: Plan, rank: int) -> Route:
    own, none = plan.own[rank], plan.own[rank][:0]
    is_run = plan.layout == "contiguous" or plan.groups == 1
    return Route(own, none, none, none, 0, none, none, none, is_run=is_run, is_own=True)


def _flows(plan: Plan, name: str) -> list[list[Tensor]]:
    """Units that each group sends to each other group."""
    need = plan.masks[name].need
    everyone = range(plan.groups)
    return [
        [
            plan.own[s][:0] if s == t else need[t][torch.isin(need[t], plan.own[s])]
            for t in everyone
        ]
        for s in everyone
    ]


def _gather_route(plan: Plan, rank: int) -> Route:
    """Every existing unit, in sequence order."""
    units = block_count(plan.length, plan.unit)
    each = len(plan.own[0])
    everything = torch.cat(plan.own)
    place = everything.argsort()[:units]
    back = _positions_of(everything, torch.arange(units))
    returned = torch.arange(each)[:, None] + torch.arange(plan.groups) * each
    return Route(
        columns=torch.arange(units), order=place, send=torch.arange(each),
        counts=torch.full((2, plan.groups), each), received=len(everything),
        own_back=torch.arange(0), received_back=back, returned=returned,
        is_run=True, is_gather=True,
    )  # fmt: skip


def _block_route(plan: Plan, name: str, rank: int, flow: list[list[Tensor]], bucket: int) -> Route:
    """Needed units, own and received, in sequence order."""
    needs = plan.masks[name].need
    units = block_count(plan.length, plan.unit)
    spans = [int(n[-1]) + 1 - int(n[0]) if len(n) else 0 for n in needs]
    most = max(1, *(len(n) for n in needs))
    run = min(units, _rounded(max(1, *spans), bucket))
    # All ranks must decide alike, or their graphs would differ.
    is_run = run <= most * (1 + _MOST_GAPS) + bucket
    if is_run:
        start = int(needs[rank][0]) if len(needs[rank]) else 0
        columns = torch.arange(run) + min(start, units - run)
    else:
        columns = _filled(needs[rank], _rounded(most, bucket), NOWHERE)
    return _route(plan, rank, columns, plan.own[rank], flow, bucket)._replace(is_run=is_run)


def _remote_route(plan: Plan, rank: int, flow: list[list[Tensor]], bucket: int) -> Route:
    """Received units only."""
    arriving = torch.cat([row[rank] for row in flow]).sort().values
    most = max(sum(len(row[t]) for row in flow) for t in range(plan.groups))
    columns = _filled(arriving, _rounded(most, bucket), NOWHERE)
    return _route(plan, rank, columns, plan.own[rank][:0], flow, bucket)


def _route(
    plan: Plan, rank: int, columns: Tensor, own: Tensor, flow: list[list[Tensor]], bucket: int
) -> Route:
    """A buffer with these columns; `own` are copied from the rank's own keys."""
    everyone = range(plan.groups)
    sizes = [[len(units) for units in row] for row in flow]
    most_in = _rounded(max(sum(row[t] for row in sizes) for t in everyone), bucket)
    most_out = _rounded(max(map(sum, sizes)), bucket)
    arriving = torch.cat([row[rank] for row in flow])
    send = torch.searchsorted(plan.own[rank], torch.cat(flow[rank]))
    return Route(
        columns=columns,
        order=_positions_of(columns, torch.cat((own, _filled(arriving, most_in, NOWHERE)))),
        send=_filled(send, most_out, 0),
        counts=torch.tensor([sizes[rank], [row[rank] for row in sizes]]),
        received=most_in,
        own_back=_positions_of(own, columns),
        received_back=_filled(_positions_of(arriving, columns), most_in, NOWHERE),
        returned=_returned(plan, flow, rank, send),
    )


def _returned(plan: Plan, flow: list[list[Tensor]], rank: int, send: Tensor) -> Tensor:
    """Places of each own unit's gradients among those that come back, by destination."""

    def widest(source: int) -> int:
        sent = torch.cat(flow[source])
        return int(sent.unique(return_counts=True)[1].max()) if len(sent) else 0

    width = max(widest(source) for source in range(plan.groups))
    table = torch.full((len(plan.own[rank]), width), NOWHERE)
    filled = [0] * len(table)
    for place, unit in enumerate(send.tolist()):
        table[unit, filled[unit]] = place
        filled[unit] += 1
    return table


def _positions_of(wanted: Tensor, among: Tensor) -> Tensor:
    """Index of each of `wanted` in `among`, whose entries are distinct; NOWHERE if absent."""
    if not len(among):
        return torch.full_like(wanted, NOWHERE)
    values, places = among.sort()
    found = torch.searchsorted(values, wanted).clamp(max=len(values) - 1)
    is_there = (values[found] == wanted) & (wanted != NOWHERE)
    return torch.where(is_there, places[found], NOWHERE)


def _rounded(count: int, bucket: int) -> int:
    return block_count(count, max(1, bucket)) * max(1, bucket)


def _filled(values: Tensor, size: int, filling: int) -> Tensor:
    return torch.cat((values, values.new_full((size - len(values),), filling)))
