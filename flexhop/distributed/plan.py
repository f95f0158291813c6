"""A plan: which rank computes which queries, and which keys it needs for them.

A plan is a pure function of masks. Every rank computes the same one, so none is sent. The sequence
is divided into units (grids.py) and chunks of several units. Every rank owns the same number of
chunks. Keys are where their queries are. docs/distributed.md shows pictures.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexhop.block_mask.lists import block_count
from flexhop.distributed.cost import METHODS, AttentionShape, Cost, Machine, Method, find_cost
from flexhop.distributed.grids import Demand, MaskGrid, common_unit, read_masks
from flexhop.distributed.layouts import CANDIDATES, LAYOUTS
from flexhop.errors import OptionValueError, PlanError

_EQUAL = 1.01  # costs that differ by less are equal


class MaskPlan(NamedTuple):
    """One mask under a plan.

    need: for each group of ranks, the units of keys that its queries visit, ascending.
    """

    grid: MaskGrid
    need: tuple[Tensor, ...]
    cost: Cost


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """What every rank of a context-parallel mesh owns and needs; see `make_plan`.

    Ranks form groups of `heads` neighbours. A group shares the tokens of its units. Outside
    attention, each of its ranks has an equal part of the tokens; inside attention, each has all
    tokens and an equal part of the heads (Ulysses). With heads=1, every rank is a group.

    length: tokens of the whole sequence. unit: tokens per unit. chunk: units per chunk. own: the
    units of each group, ascending; units beyond the sequence are padding. masks: by name. sources:
    the mask objects that each was made from.
    """

    ranks: int
    heads: int
    length: int
    unit: int
    chunk: int
    layout: str
    own: tuple[Tensor, ...]
    masks: Mapping[str, MaskPlan]
    sources: Mapping[str, Any]
    shape: AttentionShape
    machine: Machine

    @property
    def groups(self) -> int:
        """Number of groups of ranks that shard the sequence."""
        return len(self.own)

    @property
    def tokens(self) -> int:
        """Tokens of each rank, padding included."""
        return self.group_tokens // self.heads

    @property
    def group_tokens(self) -> int:
        """Tokens of each group of ranks, padding included."""
        return len(self.own[0]) * self.unit

    @property
    def seconds(self) -> float:
        """Predicted seconds for one layer of each mask, forward and backward, on the slowest
        rank."""
        return sum(mask.cost.seconds for mask in self.masks.values())

    def group_positions(self, group: int) -> Tensor:
        """Global positions of a group's tokens, [group_tokens] int64, ascending.

        Positions from `length` on are padding.
        """
        return (self.own[group][:, None] * self.unit + torch.arange(self.unit)).flatten()

    def positions(self, rank: int) -> Tensor:
        """Global positions of a rank's tokens, [tokens] int64; positions from `length` on are
        padding."""
        whole = self.group_positions(rank // self.heads)
        return whole.view(self.heads, -1)[rank % self.heads]

    def shard(self, tensor: Tensor, dim: int, rank: int, fill: float = 0) -> Tensor:
        """A rank's part of a tensor that covers the whole sequence.

        Args:
            tensor: with `length` tokens in dimension dim.
            rank: rank in the mesh.
            fill: padding value.

        Raises:
            PlanError: the wrong number of tokens.
        """
        if tensor.size(dim) != self.length:
            raise PlanError(
                argument=f"dimension {dim} of the tensor to shard",
                found=f"has {tensor.size(dim)} entries",
                expected=f"the plan is for {self.length} tokens",
            )
        place = self.positions(rank).to(tensor.device)
        part = tensor.index_select(dim, place.clamp(max=self.length - 1))
        sizes = [1] * tensor.dim()
        sizes[dim] = -1
        return part.masked_fill((place >= self.length).view(sizes), fill)

    def unshard(self, parts: list[Tensor], dim: int) -> Tensor:
        """Assemble the whole sequence from the parts of all ranks, in rank order, without
        padding."""
        order = self.order().to(parts[0].device)
        return torch.cat(parts, dim).index_select(dim, order)

    def order(self) -> Tensor:
        """The index of each token of the sequence in the concatenated parts of all ranks, [length]
        int64."""
        places = torch.cat([self.group_positions(group) for group in range(self.groups)])
        return places.argsort()[: self.length]

    def fingerprint(self) -> str:
        """A text that is equal on two ranks if and only if their plans are."""
        digest = hashlib.sha256()
        for name, mask in self.masks.items():
            digest.update(f"{name} {mask.grid.block} {mask.grid.partial.shape}".encode())
            digest.update(mask.grid.partial.numpy().tobytes() + mask.grid.full.numpy().tobytes())
            digest.update(f"{mask.cost.method} {mask.cost.groups}".encode())
        digest.update(str([units.tolist() for units in self.own]).encode())
        return (
            f"{self.length} tokens in units of {self.unit}, {self.layout} over {self.ranks} ranks "
            f"({self.heads} by heads), masks {digest.hexdigest()[:16]}"
        )


def make_plan(
    masks: Any,
    ranks: int,
    *,
    length: int | None = None,
    layout: str = "auto",
    chunk: int | None = None,
    heads: int | str = 1,
    method: str = "auto",
    groups: int | None = None,
    shape: AttentionShape | None = None,
    machine: Machine | None = None,
) -> Plan:
    """Plan how to shard a sequence over the ranks of a mesh dimension.

    Reads the masks' block lists, so it synchronises with the device: make plans where you build
    batches.

    Args:
        masks: one mask, or a dict of a model's masks, whose layers share one layout. Each is a
            BlockMask (flexhop's or PyTorch's) of the whole sequence, PackedSequences, or None,
            which visits everything.
        ranks: size of the mesh dimension.
        length: tokens of the whole sequence; required if every mask is None.
        layout: "contiguous", "zigzag", "greedy", or "auto": the cheapest one.
        chunk: tokens that stay together, a multiple of the unit. By default, contiguous has one
            chunk per rank, zigzag two, and greedy the cheapest number.
        heads: how many neighbouring ranks split their tokens by heads (Ulysses). Must divide the
            ranks and the key heads. "auto" chooses, and requires `shape`.
        method: how keys are exchanged: "gather" (all keys to all ranks), "blocks" (needed units,
            one attention call), "stages" (needed units, one call on a rank's own keys while the
            others travel, merged by lse), or "auto": the cheapest for each mask.
        groups: number of key head groups; the exchange of one overlaps with the computation of
            another. None chooses.
        shape: sizes of a layer's attention, for the cost model.
        machine: speeds of the hardware, for the cost model.

    Raises:
        PlanError: masks that do not match each other, or numbers that do not divide.
        OptionValueError: an unknown name.
    """
    _check(ranks, layout, method)
    grids = read_masks(masks, length)
    unit = common_unit(grids)
    found = AttentionShape() if shape is None else shape
    speeds = Machine() if machine is None else machine
    demands = {name: Demand.of(grid, unit) for name, grid in grids.items()}
    sources = masks if isinstance(masks, Mapping) else {"": masks}
    whole = next(iter(grids.values())).length
    base = Plan(ranks, 1, whole, unit, 1, layout, (), {}, sources, found, speeds)
    plans = [
        _filled(
            dataclasses.replace(base, heads=count, layout=name, chunk=each),
            grids,
            demands,
            method,
            groups,
        )
        for count in _head_counts(heads, ranks, shape)
        for name, each in _candidates(base, count, layout, chunk)
    ]
    # The first candidate is the simplest; a model cannot tell differences below a percent.
    least = min(plan.seconds for plan in plans)
    return next(plan for plan in plans if plan.seconds <= least * _EQUAL)


def _check(ranks: int, layout: str, method: str) -> None:
    if ranks < 1:
        raise PlanError(argument="ranks", found=f"is {ranks}", expected="must be at least 1")
    for name, value, known in (("layout", layout, LAYOUTS), ("method", method, METHODS)):
        if value not in (*known, "auto"):
            allowed = ", ".join(map(repr, (*known, "auto")))
            raise OptionValueError(name=name, value=value, allowed=f"one of {allowed}")


def _head_counts(heads: int | str, ranks: int, shape: AttentionShape | None) -> list[int]:
    """Candidate numbers of ranks that split tokens by heads."""
    if heads == "auto":
        if shape is None:
            raise PlanError(
                argument="shape", found="is missing",
                expected='heads="auto" needs the number of heads',
            )  # fmt: skip
        return [n for n in range(1, ranks + 1) if ranks % n == 0 and shape.kv_heads % n == 0]
    if not isinstance(heads, int) or heads < 1 or ranks % heads:
        raise PlanError(
            argument="heads", found=f"is {heads!r}", expected=f"it must divide the {ranks} ranks"
        )
    if shape is not None and (shape.kv_heads % heads or shape.heads % heads):
        raise PlanError(
            argument="heads", found=f"is {heads}",
            expected=f"it must divide {shape.heads} query heads and {shape.kv_heads} key heads",
        )  # fmt: skip
    return [heads]


def _candidates(plan: Plan, heads: int, layout: str, chunk: int | None) -> list[tuple[str, int]]:
    """Names of layouts, with units per chunk."""
    units, groups = block_count(plan.length, plan.unit), plan.ranks // heads
    named = [(n, per) for n, per in CANDIDATES if layout in ("auto", n)]
    if chunk is None:
        return list(dict.fromkeys((n, block_count(units, groups * per)) for n, per in named))
    if chunk < 1 or chunk % plan.unit:
        raise PlanError(
            argument="chunk", found=f"is {chunk}",
            expected=f"must be a multiple of the plan's unit of {plan.unit} tokens",
        )  # fmt: skip
    return list(dict.fromkeys((n, chunk // plan.unit) for n, _ in named))


def _filled(
    plan: Plan, grids: Mapping[str, MaskGrid], demands: Mapping[str, Demand], method: str,
    groups: int | None,
) -> Plan:  # fmt: skip
    """The plan, completed with the units that its groups own and need."""
    own = _own(plan, demands)
    methods: tuple[Method, ...] = METHODS if method == "auto" else (method,)  # type: ignore[assignment]
    planned = {}
    for name, demand in demands.items():
        needs = demand.needs
        need = tuple(needs[units[units < len(needs)]].any(0).nonzero().flatten() for units in own)
        cost = find_cost(demand, plan.unit, own, plan.heads, plan.shape, plan.machine, methods)
        if groups is not None:
            cost = cost._replace(groups=groups)
        planned[name] = MaskPlan(grids[name], need, cost)
    return dataclasses.replace(plan, own=own, masks=planned)


def _own(plan: Plan, demands: Mapping[str, Demand]) -> tuple[Tensor, ...]:
    """Units of each group: whole chunks, which may extend beyond the sequence."""
    groups = plan.ranks // plan.heads
    each = least = plan.chunk * (2 if plan.layout == "zigzag" else 1)
    while each * plan.unit % plan.heads:  # the ranks of a group split its tokens
        each += least
    units = block_count(plan.length, plan.unit)
    padded = block_count(units, each * groups) * each * groups
    work = torch.zeros(padded, dtype=torch.float64)
    for demand in demands.values():
        work[:units] += demand.work.sum(1)
    by_chunk = work.view(-1, plan.chunk).sum(1).tolist()
    owner = torch.tensor(LAYOUTS[plan.layout](by_chunk, groups)).repeat_interleave(plan.chunk)
    return tuple((owner == group).nonzero().flatten() for group in range(groups))
