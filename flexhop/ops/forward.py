"""The operator `flexhop_attention` and its dispatch rules."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flexhop.compat import hop
from flexhop.errors import CaptureMutationError, MaskCaptureGradError
from flexhop.indexing import IndexMode
from flexhop.ops.args import AttentionArgs, BackwardArgs
from flexhop.ops.backward import attention_backward
from flexhop.ops.eager import accumulate_dtype, attend
from flexhop.ops.layout import empty_ordered, ordered
from flexhop.ops.subgraphs import (
    index_examples,
    needs_grad,
    score_dtype,
    score_examples,
    trace_joint,
)

attention = hop.Operator("flexhop_attention", AttentionArgs, ("score_mod", "mask_mod"))


def _examples(*operands: Any) -> tuple[list[Any], list[Any]]:
    """Example inputs of score_mod and of mask_mod."""
    args = AttentionArgs(*operands)
    device, dtype = args.query.device, score_dtype(args.query)
    return (
        [*score_examples(device, dtype), *args.score_captures],
        [*index_examples(device), *args.mask_captures],
    )


@hop.register_dense(attention)
def _dense(*operands: Any) -> tuple[Tensor, Tensor, Tensor]:
    args = AttentionArgs(*operands)
    out, lse, max_scores = attend(args)
    if not args.options.get("return_max"):
        max_scores = lse.new_empty(0)
    return ordered(out, args.query), lse.contiguous(), max_scores


@hop.register_fake(attention)
def _fake(*operands: Any) -> tuple[Tensor, Tensor, Tensor]:
    args = AttentionArgs(*operands)
    batch, heads, length, _ = args.query.shape
    out = empty_ordered((batch, heads, length, args.value.size(-1)), args.query)
    lse = args.query.new_empty((batch, heads, length), dtype=accumulate_dtype(args.query.dtype))
    max_scores = torch.empty_like(lse) if args.options.get("return_max") else lse.new_empty(0)
    return out, lse, max_scores


hop.register_proxy(attention, ("flexhop_score", "flexhop_mask"), _examples, IndexMode)


def _refuse_mutation(pre_dispatch: bool, *operands: Any) -> None:
    """Functionalization would silently drop a write to a capture."""
    args = AttentionArgs(*operands)
    mods = (("score_mod", args.score_mod), ("mask_mod", args.mask_mod))
    for (name, mod), example in zip(mods, _examples(*operands), strict=True):
        with IndexMode():
            if hop.has_input_mutation(mod, example, pre_dispatch):
                raise CaptureMutationError(mod=name, location="its body")


hop.register_functionalize(attention, _refuse_mutation)
hop.register_checkpoint(attention)


def _cast(dtype: torch.dtype, operands: tuple[Any, ...]) -> tuple[Any, ...]:
    """What autocast does to scaled_dot_product_attention: query, key and value in its dtype."""
    args = AttentionArgs(*operands)
    return args._replace(
        query=args.query.to(dtype), key=args.key.to(dtype), value=args.value.to(dtype)
    )


hop.register_autocast(attention, _cast)


class _Attention(torch.autograd.Function):
    """Forward saves its operands and results; backward calls the backward operator."""

    @staticmethod
    def forward(ctx: Any, joint: Any, sites: Any, fixed: AttentionArgs, *inputs: Any) -> Any:
        query, key, value, *captures = inputs
        args = fixed._replace(query=query, key=key, value=value, score_captures=tuple(captures))
        with hop.below_autograd():
            out, lse, max_scores = attention(*args)
        save(ctx, (args._replace(score_mod=None, mask_mod=None), out, lse))
        ctx.functions = (args.score_mod, joint, args.mask_mod, sites)
        ctx.mark_non_differentiable(max_scores)
        return out, lse, max_scores

    @staticmethod
    def backward(ctx: Any, grad_out: Any, grad_lse: Any, _: Any) -> Any:
        args, out, lse = restore(ctx)
        score_mod, joint, mask_mod, sites = ctx.functions
        if grad_out is None:
            grad_out = torch.zeros_like(out)
        grads = attention_backward(
            *BackwardArgs(
                *args[:3], out, lse, grad_out, grad_lse, score_mod, joint, mask_mod,
                args.blocks, args.scale, args.options, args.score_captures, args.mask_captures, sites,
            )
        )  # fmt: skip
        grad_query, grad_key, grad_value, captured = grads
        by_position = dict(zip(sorted(set(sites[::2])), captured, strict=True))
        grad_captures = (by_position.get(i) for i in range(len(args.score_captures)))
        return (None, None, None, grad_query, grad_key, grad_value, *grad_captures)


def save(ctx: Any, values: Any) -> None:
    """Keep tensors by save_for_backward and everything else (ints, SymInts, SymFloats, strings) as is."""
    flat, ctx.spec = hop.pytree.tree_flatten(values)
    ctx.plain = [None if isinstance(value, Tensor) else value for value in flat]
    ctx.positions = [i for i, value in enumerate(flat) if isinstance(value, Tensor)]
    ctx.save_for_backward(*(flat[i] for i in ctx.positions))
    ctx.set_materialize_grads(False)


def restore(ctx: Any) -> Any:
    """What `save` kept."""
    flat = list(ctx.plain)
    for position, tensor in zip(ctx.positions, ctx.saved_tensors, strict=True):
        flat[position] = tensor
    return hop.pytree.tree_unflatten(flat, ctx.spec)


@attention.py_autograd_impl
def _autograd(*operands: Any) -> Any:
    args = AttentionArgs(*operands)
    for position, wanted in enumerate(needs_grad(args.mask_captures)):
        if wanted:
            raise MaskCaptureGradError(index=position)
    differentiable = needs_grad((args.query, args.key, args.value, *args.score_captures))
    if not (torch.is_grad_enabled() and any(differentiable)):
        with hop.below_autograd():
            return attention(*args)
    joint = trace_joint(args.score_mod, args.query, args.score_captures)
    fixed = args._replace(
        query=None, key=None, value=None, score_mod=joint.score_mod, score_captures=()
    )
    inputs = (args.query, args.key, args.value, *joint.captures)
    return _Attention.apply(joint.joint, joint.sites, fixed, *inputs)


def _count(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    """Two matrix products; masked blocks are counted."""
    batch, heads, length, width = query.shape
    return 2 * batch * heads * length * key.size(2) * (width + value.size(3))


hop.register_flops(attention, _count)
