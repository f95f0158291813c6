"""A call as the lowerings would see it, for `flexhop.explain`."""

from __future__ import annotations

import contextlib
from typing import NamedTuple

import torch
from torch import Tensor

from flexhop.compat.graphs.inline import decompose
from flexhop.compat.kernels.pointwise import rehearsal
from flexhop.compat.modes import assumed
from flexhop.compat.offline.fake_gpu import GPUS
from flexhop.compat.operators import hop
from flexhop.errors import OptionValueError
from flexhop.lowering.cached import read_cached_tensors
from flexhop.lowering.dialect import plan
from flexhop.lowering.fallback import known_failures
from flexhop.lowering.mods.caps import foldable_scale
from flexhop.lowering.mods.captured import felt_sites
from flexhop.lowering.mods.lower import lower_joint, lower_mods, read_joint, read_mods
from flexhop.lowering.operands import read_tensor_problem, user_options
from flexhop.lowering.plan import KernelPlan
from flexhop.lowering.portable.rules import adders
from flexhop.lowering.problem import UNREAD, Device, Problem, read_device
from flexhop.lowering.tangents import describe_second
from flexhop.ops.args import AttentionArgs, CachedArgs, index_sizes, unpack_sites
from flexhop.ops.graphs.subgraphs import (
    Joint,
    needs_grad,
    trace_joint,
    trace_key,
    trace_mask,
    trace_score,
)
from flexhop.ops.graphs.tables import Tabulated, with_tables
from flexhop.options import KernelOptions

DEFAULT_CAPABILITY = (9, 0)


class Survey(NamedTuple):
    """Facts, graphs and plans of one call.

    The graphs are as the user wrote them. Facts and plans are the compiler's, which decomposes
    graphs first. joint: None if nothing needs a gradient. tables: tables that score_mod was
    rewritten to read; the graphs are then those of the rewritten mod. failures: candidates that
    did not compile in this process.
    """

    problem: Problem
    options: KernelOptions
    score: torch.fx.GraphModule
    mask: torch.fx.GraphModule
    joint: Joint | None
    plans: tuple[KernelPlan, ...]
    tables: Tabulated | None = None
    failures: tuple[str, ...] = ()
    second: str = ""  # what computes second derivatives

    @property
    def adders(self) -> tuple[str, ...]:
        """The kernels that add up, or store, gradients of captured tensors."""
        is_one = any(plan.kernel == "backward" for plan in self.plans)
        return ("backward",) if is_one else adders(self.problem, self.options)


def survey(
    args: AttentionArgs | CachedArgs, device: Device, *, value_is_key: bool = False,
    moves_lse: bool = True,
) -> Survey:  # fmt: skip
    """Survey a call whose operands are fake tensors and graphs.

    Args:
        args: the operands.
        device: the GPU to plan for.
        value_is_key: whether value is a view of key's first columns.
        moves_lse: whether the call's results depend on lse.

    Raises:
        FlexhopError: as compiling the call would raise.
    """
    mode = getattr(args.query, "fake_mode", contextlib.nullcontext())
    with mode, assumed(device.capability):
        args, tables = with_tables(args)
    if isinstance(args, CachedArgs):
        return _survey_cached(args, device, tables, value_is_key)
    score = trace_score(args.score_mod, args.query, args.score_captures)
    mask = trace_mask(args.mask_mod, args.query, args.mask_captures)
    joint = None
    if any(needs_grad((args.query, args.key, args.value, *args.score_captures))):
        joint = trace_joint(args.score_mod, args.query, args.score_captures)
    cap_scale = foldable_scale(args, has_texts=args.query.dtype.itemsize == 2)
    mods = read_mods(decompose(score), decompose(mask), cap_scale=cap_scale)
    sizes = index_sizes(args)
    grad = UNREAD
    if joint is not None:
        graph = decompose(joint.joint)
        sites = felt_sites(graph, unpack_sites(joint.sites), moves_lse=moves_lse)
        grad = read_joint(graph, sites, sizes)
    problem = read_tensor_problem(args, device, mods, grad, value_is_key=value_is_key)
    options = user_options(args.options)
    has_kernels = problem.dtype != torch.float64  # chunked.py lowers it
    plans: tuple[KernelPlan, ...] = ()
    if has_kernels:
        plans = (*plan("forward", problem, options), *plan("backward", problem, options))
    if has_kernels:
        rehearse(args, (score, mask), joint, sizes)
    failures = known_failures(problem)
    second = describe_second(problem) if has_kernels and joint is not None else ""
    return Survey(problem, options, score, mask, joint, plans, tables, failures, second)


def rehearse(
    args: AttentionArgs | CachedArgs, mods: tuple[torch.fx.GraphModule, torch.fx.GraphModule],
    joint: Joint | None, sizes: tuple[int, ...],
) -> None:  # fmt: skip
    """Lower the mods of a call, which finds what no kernel computes.

    Raises:
        ModLoweringError: as compiling the call would raise.
    """
    device = args.query.device
    with rehearsal() as lowered:
        captures = [list(map(lowered, c)) for c in (args.score_captures, args.mask_captures)]
        lower_mods(device, tuple(map(decompose, mods)), (captures[0], captures[1]), sizes)
        if joint is not None:
            given = list(map(lowered, joint.captures))
            sites = unpack_sites(joint.sites)
            lower_joint(device, decompose(joint.joint), given, sites, sizes)


def _survey_cached(
    args: CachedArgs, device: Device, tables: Tabulated | None, value_is_key: bool
) -> Survey:
    args = args._replace(
        key_mod=decompose(trace_key(args.key_mod, args.query, args.key_captures)),
        value_mod=decompose(trace_key(args.value_mod, args.query, args.value_captures)),
    )
    score = trace_score(args.score_mod, args.query, args.score_captures)
    mask = trace_mask(args.mask_mod, args.query, args.mask_captures)
    problem = read_cached_tensors(
        args, device, decompose(score), decompose(mask), value_is_key=value_is_key
    )
    options = user_options(args.options)
    plans = ()
    if problem.dtype != torch.float64:
        plans = plan("forward", problem, options)
        rehearse(args, (score, mask), None, index_sizes(args))
    failures = known_failures(problem)
    return Survey(problem, options, score, mask, None, plans, tables, failures)


def find_device(query: Tensor, capability: tuple[int, int] | None) -> Device:
    """The GPU to plan for: the requested one, query's own, or otherwise an sm_90.

    Raises:
        OptionValueError: an unknown capability.
    """
    if capability is None and query.device.type == "cuda" and not hop.is_fake(query):
        return read_device(query.device)
    wanted = capability or DEFAULT_CAPABILITY
    if wanted not in GPUS:
        raise OptionValueError(
            name="capability", value=wanted, allowed=f"one of {', '.join(map(str, GPUS))}"
        )
    gpu = GPUS[wanted]
    return Device(gpu.capability, gpu.shared_memory, gpu.multiprocessors, gpu.l2_cache, gpu.name)
