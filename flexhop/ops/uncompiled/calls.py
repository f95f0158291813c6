"""A call outside torch.compile that runs kernels: lifts its mods, remembers its options."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexhop.compat.compilation import remember
from flexhop.compat.mods.lift import Lifted, lift
from flexhop.compat.mods.wrapped import apart, is_bare
from flexhop.compat.operators import hop
from flexhop.compat.operators.autograd import wanted_dtype, without_autocast
from flexhop.compat.operators.transforms import is_deriving, is_tracked
from flexhop.mods.closures import Places, describe
from flexhop.mods.keys import noop_key
from flexhop.ops.args import AttentionArgs, CachedArgs, score_dtype
from flexhop.ops.cached import cached_attention, cast_cached
from flexhop.ops.cached_call import prepare_cached
from flexhop.ops.call import Call, is_determinism_required, prepare
from flexhop.ops.forward import attention, cast_operands
from flexhop.ops.uncompiled.bare import Plan
from flexhop.ops.uncompiled.option import OPTION
from flexhop.ops.uncompiled.repeats import note_plan

Results = tuple[Tensor, Tensor, Tensor]
_MOST = 4096  # calls whose checks are cached
_CALL: Any = tuple(Call(None, False, None, False, None))
_MOST_PLANS = 64  # of one cached choice


class _Choice(NamedTuple):
    """Scale and options of equal calls, and plans by what their mods have in common."""

    scale: float
    options: dict[str, Any]
    plans: dict[_Fixed, Plan] | None = None  # None: this choice is not cached


@dataclasses.dataclass(frozen=True, eq=False)
class _Fixed:
    """What mods of equal descriptions have in common: their graphs, and where captures are."""

    graphs: tuple[Any, ...]
    places: Places


_checked: dict[Hashable, _Choice] = {}
_fixed: dict[Hashable, _Fixed] = {}


def run_lifted(args: AttentionArgs, call: Call, *, has_kernels: bool) -> Results:
    """Evaluate a call as one operator, with kernels or by the reference; see run_operator."""
    device = args.query.device.type
    if (dtype := wanted_dtype(device)) is not None:
        args = cast_operands(dtype, args)
        with without_autocast(device):
            return run_lifted(args, call, has_kernels=has_kernels)
    choice = _choices(args, call, lambda: prepare(*args[:3], args.blocks, call))
    scale, options, _ = choice
    if not has_kernels:
        options = {name: value for name, value in options.items() if name != OPTION}
    derives = torch.is_grad_enabled() and any(map(is_tracked, args[:2]))
    lifted, fixed = _lifted(
        attention, _call_attention, args.query, (args.score_mod, args.mask_mod), derives
    )
    (score_mod, mask_mod), (score_captures, mask_captures) = lifted.graphs, lifted.captures
    args = AttentionArgs(
        args.query, args.key, args.value, score_mod, mask_mod, args.blocks, scale, options,
        score_captures, mask_captures, args.dropout_seed,
    )  # fmt: skip
    tensors = (*args[:3], *args.score_captures, *args.mask_captures, *args.blocks)
    if not is_bare(tensors):
        out, lse, max_scores = attention(*args)
        return out, lse, max_scores
    plan = _plan(choice, fixed, args)
    out, lse, max_scores = plan.run(args)
    if choice.plans is not None and fixed is not None:
        note_plan(plan, fixed.places)
    return out, lse, max_scores


def _plan(choice: _Choice, fixed: _Fixed | None, args: AttentionArgs) -> Plan:
    """The plan of a call; equal calls have the same one if their choice and mods are cached."""
    if choice.plans is None or fixed is None:
        return Plan(args)
    plan = choice.plans.get(fixed)
    if plan is None:
        plan = remember(choice.plans, fixed, Plan(args), _MOST_PLANS)
    return plan


def run_cached_with_kernels(args: CachedArgs, call: Call) -> Results:
    """The same for a call that reads a cache."""
    device = args.query.device.type
    if (dtype := wanted_dtype(device)) is not None:
        args = cast_cached(dtype, args)
        with without_autocast(device):
            return run_cached_with_kernels(args, call)
    has_mods = (args.key_mod is not noop_key, args.value_mod is not noop_key)
    scale, options, _ = _choices(
        args, (call, has_mods), lambda: prepare_cached(args, call, has_mods), args.pages
    )
    lifted, _ = _lifted(cached_attention, _call_cached, args.query, args[3:7])
    return cached_attention(
        args.query, args.key, args.value, *lifted.graphs, args.blocks, args.pages, scale, options,
        *lifted.captures,
    )  # fmt: skip


def _choices(
    args: Any, call: Any, check: Callable[[], tuple[float, Any]], more: Sequence[Tensor] = ()
) -> _Choice:
    """Scale and options; a call equal to a checked one is not checked again.

    Checks read shapes, dtypes, devices and whether gradients are needed, but no values.
    """
    tensors = (*args[:3], *args.blocks[:1], *more)
    key = (
        call, is_determinism_required(), torch.is_grad_enabled(),
        *((t.shape, t.dtype, t.device, t.requires_grad, t.is_nested) for t in tensors),
    )  # fmt: skip
    if not _is_hashable(key):  # kernel_options is a dictionary
        return _with_kernels(*check())
    found = _checked.get(key)
    if found is None:
        found = remember(_checked, key, _with_kernels(*check())._replace(plans={}), _MOST)
    return found


def _is_hashable(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


def _with_kernels(scale: float, options: Mapping[str, Any]) -> _Choice:
    return _Choice(scale, {**options, OPTION: True})


def _call_attention(query: Tensor, score_mod: Any, mask_mod: Any) -> Tensor:
    return attention(query, query, query, score_mod, mask_mod, (), _CALL, ())[0]


def _call_cached(
    query: Tensor, score_mod: Any, mask_mod: Any, key_mod: Any, value_mod: Any
) -> Tensor:
    mods = (score_mod, mask_mod, key_mod, value_mod)
    return cached_attention(query, query, query, *mods, (), (), (_CALL, (True, True)))[0]


def _lifted(
    operator: hop.Operator,
    call_with: Any,
    query: Tensor,
    mods: Sequence[Any],
    derives: bool = False,
) -> tuple[Lifted, _Fixed | None]:
    """Mods as graphs, and their captures; and what mods of the same description share.

    Only mods that read more than names need Dynamo again (mods/closures.py).

    Args:
        derives: whether scores need a gradient; Dynamo then records torch.autograd.Functions.
    """
    query = _stand_in(query.device, score_dtype(query), derives)
    described = describe(mods)
    if described is None:
        return lift(operator, call_with, query, mods), None
    # Dynamo traces a torch.autograd.Function as what it does, if no gradient can follow.
    modes = (derives, torch.is_grad_enabled(), is_deriving())
    key = (operator, query.device, query.dtype, modes, described.key)
    known = _fixed.get(key)
    if known is None:
        lifted = lift(operator, call_with, query, mods)
        places = described.places(lifted.captures)
        if places is not None:
            known = remember(_fixed, key, _Fixed(lifted.graphs, places), _MOST)
        return lifted, known
    return Lifted(known.graphs, described.at(known.places)), known


@functools.cache
def _stand_in(device: torch.device, dtype: torch.dtype, requires_grad: bool) -> Tensor:
    """A stand-in query with this device and score dtype."""
    with apart(), torch.inference_mode(False):
        size = (1, 1, 16, 16)
        return torch.zeros(size, dtype=dtype, device=device, requires_grad=requires_grad)
