"""The context in which attention on a rank's part of the sequence covers the whole sequence."""

from __future__ import annotations

from types import TracebackType
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from flexhop import errors
from flexhop.compat import collectives
from flexhop.compat.collectives import agree
from flexhop.distributed.attend import attend_view
from flexhop.distributed.packed import PackedSequences
from flexhop.distributed.plan import Plan
from flexhop.distributed.views import View, make_view
from flexhop.errors import PlanError
from flexhop.mods.functions import MaskMod, noop_mask
from flexhop.ops.args import AttentionArgs
from flexhop.ops.call import Call, agree_on_shapes, note_mistake
from flexhop.ops.dispatch import run_operator
from flexhop.ops.dropout_seed import Dropout
from flexhop.ops.replicated import SLOT, VIEW, shared_seed, sum_gradient, view_of
from flexhop.sequences.ranges import Packing
from flexhop.sequences.row_tables import RowTables, local_mask_mod, range_mask


class _Rank:
    """One rank's state of an active context; the slot holds it."""

    def __init__(
        self, tokens: int, groups: tuple[str, str], *, kind: str, sums: bool, default: View | None
    ) -> None:
        self.tokens = tokens
        self.kind = kind  # of the mesh's devices, such as "cuda"
        self.groups = groups  # process groups that shard the sequence, and the heads; "" if none
        self.everyone = ",".join(group for group in groups if group)
        self.sum_groups = self.everyone if sums else ""
        self.default = default

    def run(
        self, args: AttentionArgs, call: Call, block_mask: Any, wants_lse: bool
    ) -> tuple[Tensor, Any, Tensor]:
        """See ops.sharding.Context."""
        view = self.default if block_mask is None else view_of(block_mask)
        mistake = call.mistake or self._mistake(args, view, block_mask)
        if view is None or mistake is not None:
            # `prepare` raises it, compiled or not.
            return run_operator(
                args._replace(blocks=()), call._replace(mask=None, mistake=mistake)
            )
        if not torch.compiler.is_compiling():
            agree_on_shapes(*args[:3], self.everyone)
        summed = ",".join(filter(None, (call.sum_groups, self.sum_groups)))
        call = call._replace(sum_groups=summed, agree_groups=self.everyone)
        return attend_view(args, call, view, self.groups, wants_lse)

    def _mistake(self, args: AttentionArgs, view: View | None, block_mask: Any) -> Any:
        if view is None:
            noted = getattr(block_mask, "mistake", None)
            return noted or note_mistake(
                errors.ShardedCallError,
                argument="block_mask", found="is not one of the plan's masks",
                expected="make_plan must get every mask that layers use, None included",
            )  # fmt: skip
        for name, tensor in (("query", args.query), ("key", args.key), ("value", args.value)):
            if tensor.device.type != self.kind:
                return note_mistake(
                    errors.ShardedCallError, argument=name, found=f"is on {tensor.device}",
                    expected=f"the mesh is of {self.kind} devices, and only their tensors travel",
                )  # fmt: skip
            if tensor.dim() == 4 and tensor.size(2) != self.tokens:
                return note_mistake(
                    errors.ShardedCallError, argument=name, found=f"has {tensor.size(2)} tokens",
                    expected=f"the plan gives each rank {self.tokens}; shard the batch first",
                )  # fmt: skip
        if args.query.size(1) % view.heads or args.key.size(1) % (view.heads * view.groups):
            return note_mistake(
                errors.ShardedCallError, argument="key", found=f"has {args.key.size(1)} heads",
                expected=f"{view.heads} ranks x {view.groups} groups must divide them",
            )  # fmt: skip
        return None

    def packed(self, packing: Packing, mask_mod: MaskMod | None) -> tuple[RowTables, Any]:
        """See ops.sharding.Context."""
        known = getattr(packing.offsets_q, VIEW, None)
        if known is None:
            return _unknown(packing, "cu_seqlens_q", "is not from the plan's PackedSequences")
        if packing.offsets_k is not packing.offsets_q or packing.used_k is not None:
            return _unknown(packing, "cu_seqlens_k or seqused_k", "is given")
        if packing.window != known.window or (mask_mod is None) != known.is_all:
            return _unknown(
                packing, "is_causal, window_size, bottom_right or mask_mod",
                "differs from that of the plan's PackedSequences",
            )  # fmt: skip
        tables = known.tables
        keep = range_mask(tables) if mask_mod is None else local_mask_mod(mask_mod, tables)
        return tables, _PackedMask(known.view, keep)

    def sum_gradient(self, tensor: Tensor) -> Tensor:
        """See ops.sharding.Context."""
        return sum_gradient(tensor, self.sum_groups)

    def seed(self, dropout: Dropout, query: Tensor) -> tuple[Tensor, ...]:
        """See ops.sharding.Context."""
        drawn = dropout.operand(query)
        if not drawn or dropout.seed is not None:
            return drawn
        return (shared_seed(drawn[0], self.everyone),)


class context_parallel:
    """Shard the sequence of every attention call inside over the ranks of a mesh.

    Inside, tensors with a sequence dimension hold a rank's tokens (see `shard`).
    `flexhop.flex_attention` and `flexhop.varlen_attention` return what they would on the whole
    sequence. Pass the masks, or the offsets, that the plan was made from. Mods see global
    positions, heads and batches; captured tensors are those of the whole sequence. Run backward
    passes inside, because activation checkpointing calls attention again.

    Every rank enters with the same plan and makes the same calls in the same order.

    Args:
        plan: from `make_plan`.
        mesh: a mesh of `plan.ranks` ranks, with one dimension; or two, (groups, heads), if the
            plan shards both the sequence and the heads.
        sum_captured: whether to sum gradients of captured tensors and sinks over the mesh. Pass
            False if something else reduces all parameter gradients over it, such as FSDP over a
            mesh that contains this one: each rank then keeps its own part.
        bucket: round up sizes of exchanges to multiples of this many units. Batches with different
            document boundaries then have the same shapes, and compiled code serves them all.

    Raises:
        PlanError: the mesh has the wrong size.
        RankDisagreementError: ranks enter with different plans.
    """

    def __init__(
        self, plan: Plan, mesh: DeviceMesh, *, sum_captured: bool = True, bucket: int = 1
    ) -> None:
        _check_mesh(plan, mesh)
        self.plan = plan
        self.mesh = mesh
        self.rank = _rank_of(mesh)
        self.device = _device_of(mesh)
        self._groups = _groups_of(plan, mesh)
        self._sides = [
            Side(group, collectives.size_of(group), collectives.rank_in(group))
            for group in filter(None, self._groups)
        ]
        self._sum_captured = sum_captured
        hint = "Make the plan from the same masks, and with the same arguments, on every rank"
        for group in filter(None, self._groups):
            agree("the plan", plan.fingerprint(), group, hint)
        self._views = {
            name: make_view(plan, name, self.rank, self.device, bucket) for name in plan.masks
        }
        self._before: Any = None

    @property
    def positions(self) -> Tensor:
        """Global positions of this rank's tokens, [tokens] int64; the last one for padding."""
        return self.plan.positions(self.rank).clamp(max=self.plan.length - 1).to(self.device)

    def shard(self, *tensors: Tensor, dim: int = 1, fill: float = 0) -> Any:
        """This rank's part of tensors that cover the whole sequence.

        Args:
            tensors: with `plan.length` entries in dimension dim, equal on all ranks.
            dim: the sequence dimension.
            fill: the value of padding, such as -100 for labels to be ignored.

        Returns:
            A tensor, or a tuple if several were given.

        Raises:
            PlanError: the wrong length.
        """
        parts = tuple(self.plan.shard(t, dim, self.rank, fill) for t in tensors)
        return parts[0] if len(parts) == 1 else parts

    def unshard(self, *tensors: Tensor, dim: int = 1) -> Any:
        """Gather the whole sequence from the parts of all ranks, on every rank, without padding.

        Differentiable: a part's gradient is its slice of the whole gradient, which every rank must
        compute alike.
        """
        wholes = tuple(self._gather(t, dim, sums=False) for t in tensors)
        return wholes[0] if len(wholes) == 1 else wholes

    def capture(self, *tensors: Tensor, dim: int = 0) -> Any:
        """Gather whole tensors, for mods to capture, from parts that each rank computed.

        Like `unshard`, but the gradient matches `sum_captured`: each part's gradient is summed
        over all ranks once.
        """
        wholes = tuple(self._gather(t, dim, sums=not self._sum_captured) for t in tensors)
        return wholes[0] if len(wholes) == 1 else wholes

    def _gather(self, tensor: Tensor, dim: int, *, sums: bool) -> Tensor:
        dim = dim % tensor.dim()
        if tensor.size(dim) != self.plan.tokens:
            raise PlanError(
                argument=f"dimension {dim} of the part", found=f"has {tensor.size(dim)} entries",
                expected=f"every rank has {self.plan.tokens} tokens",
            )  # fmt: skip
        parts = tensor
        for side in reversed(self._sides):
            parts = gather_parts(parts, dim, side, sums=sums)
        return parts.index_select(dim, self.plan.order().to(tensor.device))

    def __enter__(self) -> Self:
        default = None
        for name, source in self.plan.sources.items():
            if source is None:
                default = self._views[name]
            elif isinstance(source, PackedSequences):
                setattr(source.cu_seqlens, VIEW, _Offsets(self._views[name], source))
            else:
                for holder in _holders(source):
                    setattr(holder, VIEW, self._views[name])
        self._before = SLOT.current
        SLOT.current = _Rank(
            self.plan.tokens, self._groups, kind=self.mesh.device_type, sums=self._sum_captured,
            default=default,
        )  # fmt: skip
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        SLOT.current = self._before
        for source in self.plan.sources.values():
            for holder in _holders(source):
                if hasattr(holder, VIEW):
                    delattr(holder, VIEW)


def _holders(source: Any) -> tuple[Any, ...]:
    """The object that carries the view of a source; see ops.replicated.view_of."""
    if source is None:
        return ()
    if isinstance(source, PackedSequences):
        return (source.cu_seqlens,)
    return source, source.kv_num_blocks


class _Offsets:
    """Known packed sequences: their view, and the tables of the whole batch."""

    def __init__(self, view: View, source: PackedSequences) -> None:
        self.view = view
        self.tables = source.tables()
        self.window = source.window
        self.is_all = source.mask_mod is None


class _PackedMask(NamedTuple):
    """A stand-in for the block mask of packed sequences."""

    flexhop_view: View | None
    mask_mod: MaskMod
    mistake: Any = None


def _unknown(packing: Packing, argument: str, found: str) -> tuple[RowTables, _PackedMask]:
    """Tables of the right form, and a mask that carries the error."""
    mistake = note_mistake(
        errors.ShardedCallError, argument=argument, found=found,
        expected="calls must repeat the plan's PackedSequences(cu_seqlens, total, ...)",
    )  # fmt: skip
    empty = packing.offsets_q[:0].int()
    tables = RowTables(empty, empty, empty, empty, empty, empty)
    return tables, _PackedMask(None, noop_mask, mistake)


def _check_mesh(plan: Plan, mesh: DeviceMesh) -> None:
    if mesh.size() != plan.ranks:
        raise PlanError(
            argument="mesh", found=f"has {mesh.size()} ranks",
            expected=f"the plan is for {plan.ranks}",
        )  # fmt: skip
    both = plan.groups > 1 and plan.heads > 1
    wanted = (plan.groups, plan.heads)
    if mesh.ndim > 2 or (mesh.ndim == 2 and tuple(mesh.shape) != wanted):
        raise PlanError(
            argument="mesh", found=f"has shape {tuple(mesh.shape)}",
            expected=f"must have one dimension, or shape {wanted}",
        )  # fmt: skip
    if both and mesh.ndim == 1:
        raise PlanError(
            argument="mesh", found="has one dimension",
            expected=f"a plan by sequence and heads needs a mesh of shape {wanted}",
        )  # fmt: skip


def _rank_of(mesh: DeviceMesh) -> int:
    place = mesh.get_coordinate()
    if place is None:
        raise PlanError(
            argument="mesh",
            found="does not contain this rank",
            expected="only its ranks may enter",
        )
    rank = 0
    for coordinate, size in zip(place, mesh.shape, strict=True):
        rank = rank * size + coordinate
    return rank


def _device_of(mesh: DeviceMesh) -> torch.device:
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.accelerator.current_device_index())


def _groups_of(plan: Plan, mesh: DeviceMesh) -> tuple[str, str]:
    """Names of the process groups that shard the sequence, and the heads; "" if none."""
    if mesh.ndim == 1:
        name = mesh.get_group().group_name
        return (name, "") if plan.heads == 1 else ("", name)
    by_sequence, by_heads = (mesh.get_group(dim).group_name for dim in (0, 1))
    return by_sequence, by_heads


class _Gather(torch.autograd.Function):
    """Concatenate the parts of all ranks along dimension 0; see `gather_parts`."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, ranks: int, rank: int, group: str, sums: bool) -> Tensor:
        ctx.group, ctx.sums, ctx.size, ctx.rank = group, sums, tensor.size(0), rank
        return collectives.gather_over(tensor, group, ranks)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]  # torch: *grad_outputs
        if ctx.sums:
            grad = collectives.sum_over(grad, ctx.group)
        return grad.narrow(0, ctx.rank * ctx.size, ctx.size), *[None] * 4


class Side(NamedTuple):
    """A process group as a rank sees it: its name, its size, and the rank's index in it."""

    group: str
    ranks: int
    rank: int


def gather_parts(tensor: Tensor, dim: int, side: Side, *, sums: bool) -> Tensor:
    """Concatenate the parts of all ranks along `dim`.

    Args:
        tensor: the rank's part, of the same shape on all ranks.
        dim: the dimension to concatenate along.
        side: the process group.
        sums: whether each rank holds only a part of the whole's gradient, so that a part's
            gradient is a sum over ranks. Otherwise every rank holds all of it.
    """
    group, ranks, rank = side
    return _Gather.apply(tensor.movedim(dim, 0), ranks, rank, group, sums).movedim(0, dim)
