"""The operator `flexhop_attention` and its dispatch rules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from flexhop.compat.compilation import forms_of, once
from flexhop.compat.mods.indexing import IndexMode
from flexhop.compat.operators import hop, transforms
from flexhop.compat.operators.autograd import cast, restore, save
from flexhop.compat.operators.overloads import has_input_mutation
from flexhop.errors import CaptureMutationError, VmapError
from flexhop.ops import wide_lse
from flexhop.ops.args import (
    AttentionArgs,
    AttentionDoor,
    BackwardArgs,
    CachedArgs,
    index_examples,
    learned_captures,
    operands_of,
    score_dtype,
    score_examples,
)
from flexhop.ops.backward import backward_of_call
from flexhop.ops.call import check_gradients
from flexhop.ops.derivatives.operator import push_attention
from flexhop.ops.eager import accumulate_dtype, attend
from flexhop.ops.folding import batch_captures, each_batch, into_batch, unfolded_mod
from flexhop.ops.graphs.subgraphs import hoist_tangents, needs_grad, trace_joint
from flexhop.ops.graphs.tables import push_tables, with_tables
from flexhop.ops.layout import empty_ordered, ordered
from flexhop.ops.replicated import sum_over_all
from flexhop.ops.uncompiled.option import OPTION, run_alone

Results = tuple[Tensor, Tensor, Tensor]

attention = hop.Operator(
    "flexhop_attention", AttentionArgs, ("score_mod", "mask_mod"),
    door=AttentionDoor, optional="dropout_seed",
)  # fmt: skip


def _examples(*operands: Any) -> tuple[list[Any], list[Any]]:
    """Example inputs of score_mod and of mask_mod."""
    args = AttentionArgs(*operands)
    device, dtype = args.query.device, score_dtype(args.query)
    return (
        [*score_examples(device, dtype), *args.score_captures],
        [*index_examples(device), *args.mask_captures],
    )


@hop.register_dense(attention)
def _dense(*operands: Any) -> tuple[Tensor, ...]:
    args = AttentionArgs(*operands)
    if OPTION in args.options:
        return tuple(run_alone(attention, args))
    return real_results(args, attend(args))


@hop.register_fake(attention)
def _fake(*operands: Any) -> tuple[Tensor, Tensor, Tensor]:
    return fake_results(AttentionArgs(*operands))


hop.register_proxy(attention, ("flexhop_score", "flexhop_mask"), _examples, IndexMode)


def _refuse_mutation(pre_dispatch: bool, *operands: Any) -> None:
    args = AttentionArgs(*operands)
    mods = {"score_mod": args.score_mod, "mask_mod": args.mask_mod}
    refuse_mutation(mods, _examples(*operands), pre_dispatch)


hop.register_functionalize(attention, _refuse_mutation)
hop.register_checkpoint(attention)


def cast_operands(dtype: torch.dtype, operands: tuple[Any, ...]) -> AttentionArgs:
    """Apply autocast as scaled_dot_product_attention does: cast query, key and value."""
    args = AttentionArgs(*operands)
    return args._replace(
        query=cast(args.query, dtype), key=cast(args.key, dtype), value=cast(args.value, dtype)
    )


hop.register_autocast(attention, cast_operands)


def _differentiable_inputs(*operands: Any) -> tuple[Any, ...]:
    """Inputs of _Attention: joint graph, sites, operands without and with possible gradients."""
    args = AttentionArgs(*operands)
    check_gradients(args.mask_captures, args.options)
    joint = trace_joint(args.score_mod, args.query, args.score_captures)
    score_mod = joint.score_mod
    if hop.is_tracing(args.query):
        score_mod = hop.share(score_mod)  # the forward lowering reads the backward graphs
    fixed = args._replace(query=None, key=None, value=None, score_mod=score_mod, score_captures=())
    return (joint.joint, joint.sites, fixed, *args[:3], *joint.captures)


def _operands(fixed: tuple[Any, ...], inputs: Sequence[Any]) -> AttentionArgs:
    """The operator's operands, from the last two parts of _differentiable_inputs."""
    query, key, value, *captures = inputs
    args = AttentionArgs(*fixed)
    return args._replace(query=query, key=key, value=value, score_captures=tuple(captures))


def gradients(
    args: AttentionArgs,
    results: tuple[Tensor, Tensor],
    joint: Any,
    sites: tuple[int, ...],
    grad_outputs: Sequence[Any],
) -> tuple[Any, ...]:
    """Gradients of query, key, value and captures, from gradients of the results."""
    grad_out, grad_lse, _ = grad_outputs
    if grad_out is None:
        grad_out = torch.zeros_like(results[0])
    if grad_lse is not None:
        grad_lse = grad_lse.to(accumulate_dtype(args.query.dtype))  # from an lse that is wide
    operands = operands_of(
        BackwardArgs, args, out=results[0], lse=results[1], grad_out=grad_out, grad_lse=grad_lse,
        joint=joint, sites=sites,
    )  # fmt: skip
    grad_query, grad_key, grad_value, captured = backward_of_call(operands)
    if "sum_groups" in args.options:
        captured = [sum_over_all(grad, str(args.options["sum_groups"])) for grad in captured]
    by_position = dict(zip(learned_captures(sites), captured, strict=True))
    grad_captures = (by_position.get(i) for i in range(len(args.score_captures)))
    return (grad_query, grad_key, grad_value, *grad_captures)


class _Attention(torch.autograd.Function):
    """Forward saves its operands and results; backward calls the backward operator."""

    @staticmethod
    def forward(joint: Any, sites: Any, fixed: tuple[Any, ...], *inputs: Any) -> Any:
        return attention(*_operands(fixed, inputs))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        joint, sites, fixed, *rest = inputs
        args = _operands(fixed, rest)
        out, lse, max_scores = output
        save(ctx, (args._replace(score_mod=None, mask_mod=None), out, lse))
        ctx.functions = (args.score_mod, joint, args.mask_mod, sites)
        ctx.mark_non_differentiable(max_scores)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        args, out, lse = restore(ctx)
        score_mod, joint, mask_mod, sites = ctx.functions
        args = args._replace(score_mod=score_mod, mask_mod=mask_mod)
        return (None, None, None, *gradients(args, (out, lse), joint, sites, grad_outputs))

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        """For operands that also need a gradient; others use `_push`, in one pass."""
        args, _, _ = restore(ctx)
        score_mod, _, mask_mod, _ = ctx.functions
        args = args._replace(score_mod=score_mod, mask_mod=mask_mod)
        no: Any = None
        moved = _operands(AttentionArgs(no, no, no, no, no, (), 0.0, {}), tangents[3:])
        return (*push_attention(args, moved)[1], None)


@hop.register_autograd(attention)
def _autograd(*operands: Any) -> Any:
    args = AttentionArgs(*operands)
    has_tangents = transforms.has_tangents(operands)
    if hop.is_tracing(args.query) and not has_tangents:
        args, _ = with_tables(args)
    if not (torch.is_grad_enabled() and any(needs_grad(hop.pytree.tree_leaves(operands)))):
        if has_tangents:
            return transforms.dual_results(_push, operands)
        with hop.below_autograd():
            return attention(*args)
    return _Attention.apply(*_differentiable_inputs(*args))


def _push(operands: tuple[Any, ...], tangents: Sequence[Tensor | None]) -> transforms.Pushed:
    """Forward mode: out, lse and their tangents in one pass over the keys."""
    args = AttentionArgs(*operands)
    check_gradients(args.mask_captures, {})
    moved: Any = AttentionArgs(*hop.like_tree(operands, tangents))
    if hop.is_tracing(args.query):
        args, moved = push_tables(args, moved)
    hoisted = hoist_tangents(args.score_mod, args.query, args.score_captures, moved.score_captures)
    args = args._replace(score_mod=hoisted.score_mod, score_captures=hoisted.captures)
    results, changes = push_attention(args, moved._replace(score_captures=hoisted.tangents))
    max_scores = results[1].new_empty(0)
    if args.options.get("return_max"):
        max_scores = attention(*operands)[2]
    return transforms.Pushed((*results, max_scores), (*changes, None))


def _inputs_of_transform(*operands: Any) -> tuple[Any, ...]:
    """_differentiable_inputs under torch.func.grad: tables are made at this level."""
    args = AttentionArgs(*operands)
    if hop.is_tracing(args.query):
        args, _ = with_tables(args)
    return _differentiable_inputs(*args)


transforms.register_grad(attention, _Attention, _inputs_of_transform)
transforms.register_jvp(attention, _push)


def _fold(count: int, mapped: Any, operands: Any) -> tuple[AttentionArgs, Any]:
    """Fold torch.vmap's dimension into the batch; see hop.register_vmap."""
    args = AttentionArgs(*operands)
    if args.dropout_seed:
        raise VmapError(argument="the dropout of flex_attention")
    is_mapped: Any = AttentionArgs(*mapped)
    batch = args.query.size(1 if is_mapped.query else 0)
    key, value = into_batch(args[1:3], is_mapped[1:3], count, batch)

    folded = args._replace(
        query=each_batch(args.query, is_mapped.query, count, batch), key=key, value=value,
        blocks=into_batch(args.blocks, is_mapped.blocks, count, batch),
        score_mod=unfolded_mod(args.score_mod, 1, batch, is_mapped.score_captures),
        mask_mod=unfolded_mod(args.mask_mod, 0, batch, is_mapped.mask_captures),
        score_captures=(*args.score_captures, *batch_captures(batch)),
        mask_captures=(*args.mask_captures, *batch_captures(batch)),
    )  # fmt: skip

    def unfold(results: tuple[Tensor, ...]) -> list[tuple[Tensor, bool]]:
        # max_scores is empty unless requested.
        return [
            (r.unflatten(0, (count, batch)), True) if r.dim() > 1 else (r, False) for r in results
        ]

    return folded, unfold


hop.register_vmap(attention, _fold)


def _count(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    """Two matrix products; masked blocks count too."""
    batch, heads, length, width = query.shape
    return 2 * batch * heads * length * key.size(2) * (width + value.size(3))


hop.register_flops(attention, _count)


# Dispatch rules that the operator of caches shares; operands have these names in common.


def real_results(args: AttentionArgs | CachedArgs, found: Results) -> Results:
    """(out, lse, max_scores) of the reference, as the operator stores them."""
    out, lse, max_scores = found
    if not args.options.get("return_max"):
        max_scores = max_scores.new_empty(0)
    return ordered(out, args.query), lse.contiguous(), max_scores


def fake_results(args: AttentionArgs | CachedArgs) -> Results:
    """Tensors with the shapes, dtypes and strides of the results."""
    batch, heads, length, _ = args.query.shape
    out = empty_ordered((batch, heads, length, args.value.size(-1)), args.query)
    dtype = accumulate_dtype(args.query.dtype)
    wide = wide_lse.dtype_of(args.options, dtype)
    lse = args.query.new_empty((batch, heads, length), dtype=wide)
    size = (batch, heads, length) if args.options.get("return_max") else 0
    max_scores = args.query.new_empty(size, dtype=dtype)
    return out, lse, max_scores


def refuse_mutation(
    mods: Mapping[str, Any], examples: Sequence[Sequence[Any]], pre_dispatch: bool
) -> None:
    """Raise if a mod writes to a capture; functionalization would silently drop the write.

    Raises:
        CaptureMutationError: one of the named mods writes to one of its example inputs.
    """
    for (name, mod), example in zip(mods.items(), examples, strict=True):
        key = (refuse_mutation, forms_of(example), pre_dispatch)
        if once(key, mod, lambda mod=mod, example=example: _writes(mod, example, pre_dispatch)):
            raise CaptureMutationError(mod=name, location="its body")


def _writes(mod: Any, example: Sequence[Any], pre_dispatch: bool) -> bool:
    with IndexMode():
        return has_input_mutation(mod, example, pre_dispatch)
