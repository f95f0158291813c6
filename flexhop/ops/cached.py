"""The operator `flexhop_cached_attention` and its dispatch rules: forward only."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from flexhop.compat.mods.indexing import IndexMode
from flexhop.compat.operators import hop
from flexhop.compat.operators.autograd import cast
from flexhop.errors import VmapError
from flexhop.ops.args import (
    CachedArgs,
    CachedDoor,
    index_examples,
    index_sizes,
    key_examples,
    score_dtype,
    score_examples,
)
from flexhop.ops.cached_call import gradient_refusal
from flexhop.ops.cached_eager import attend_cached
from flexhop.ops.forward import fake_results, real_results, refuse_mutation
from flexhop.ops.graphs.subgraphs import needs_grad
from flexhop.ops.graphs.tables import with_tables
from flexhop.ops.uncompiled.option import OPTION, run_alone

MODS = ("score_mod", "mask_mod", "key_mod", "value_mod")
cached_attention = hop.Operator("flexhop_cached_attention", CachedArgs, MODS, door=CachedDoor)


def examples(*operands: Any) -> tuple[list[Any], ...]:
    """Example inputs of the four mods."""
    args = CachedArgs(*operands)
    device, dtype = args.query.device, score_dtype(args.query)
    return (
        [*score_examples(device, dtype), *args.score_captures],
        [*index_examples(device), *args.mask_captures],
        [*key_examples(device, dtype), *args.key_captures],
        [*key_examples(device, dtype), *args.value_captures],
    )


@hop.register_dense(cached_attention)
def _dense(*operands: Any) -> tuple[Tensor, ...]:
    args = CachedArgs(*operands)
    if OPTION in args.options:
        return tuple(run_alone(cached_attention, args))
    return real_results(args, attend_cached(args))


@hop.register_fake(cached_attention)
def _fake(*operands: Any) -> tuple[Tensor, Tensor, Tensor]:
    return fake_results(CachedArgs(*operands))


hop.register_proxy(
    cached_attention,
    ("flexhop_score", "flexhop_mask", "flexhop_key", "flexhop_value"),
    examples,
    IndexMode,
)


def _refuse_mutation(pre_dispatch: bool, *operands: Any) -> None:
    args = CachedArgs(*operands)
    mods = {name: getattr(args, name) for name in MODS}
    refuse_mutation(mods, examples(*operands), pre_dispatch)


hop.register_functionalize(cached_attention, _refuse_mutation)
hop.register_checkpoint(cached_attention)


def cast_cached(dtype: torch.dtype, operands: tuple[Any, ...]) -> CachedArgs:
    """Query in autocast's dtype, and a cache that has query's dtype."""
    args = CachedArgs(*operands)
    alike = [cast(t, dtype) if t.dtype == args.query.dtype else t for t in (args.key, args.value)]
    return args._replace(query=cast(args.query, dtype), key=alike[0], value=alike[1])


hop.register_autocast(cached_attention, cast_cached)


@hop.register_autograd(cached_attention)
def _autograd(*operands: Any) -> Any:
    if torch.is_grad_enabled() and any(needs_grad(hop.pytree.tree_leaves(operands))):
        raise gradient_refusal()
    args = CachedArgs(*operands)
    if hop.is_tracing(args.query):
        args, _ = with_tables(args)
    with hop.below_autograd():
        return cached_attention(*args)


hop.register_refusal(cached_attention, "Grad", gradient_refusal)
hop.register_refusal(cached_attention, "Jvp", gradient_refusal)
hop.register_refusal(
    cached_attention,
    "Vmap",
    lambda: VmapError(argument="page_table, k_mod or v_mod of flex_attention"),
)


def _count(*operands: Any, **_: Any) -> int:
    """Two matrix products over all keys that the pages hold."""
    args = CachedArgs(*operands)
    return 2 * math.prod(index_sizes(args)) * (args.query.size(3) + args.value.size(3))


hop.register_flops(cached_attention, _count)
