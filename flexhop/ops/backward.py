"""The operator `flexhop_attention_backward` and its dispatch rules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flexhop.compat.mods.indexing import IndexMode
from flexhop.compat.mods.wrapped import is_bare
from flexhop.compat.operators import hop, transforms
from flexhop.compat.operators.autograd import cast
from flexhop.ops.args import (
    BackwardArgs,
    index_examples,
    joint_examples,
    learned_captures,
    score_dtype,
    score_examples,
)
from flexhop.ops.derivatives.operator import (
    differentiate,
    of_backward,
    push_inputs,
    refuse_mask_tangents,
    restore_derivative,
    save_derivative,
)
from flexhop.ops.eager import attend_backward
from flexhop.ops.folding import fold_backward
from flexhop.ops.graphs.subgraphs import needs_grad
from flexhop.ops.layout import empty_ordered, ordered
from flexhop.ops.uncompiled.option import OPTION, run_alone

attention_backward = hop.Operator(
    "flexhop_attention_backward", BackwardArgs, ("score_mod", "joint", "mask_mod"),
    optional="dropout_seed",
)  # fmt: skip


@hop.register_dense(attention_backward)
def _dense(*operands: Any) -> tuple[Any, ...]:
    args = BackwardArgs(*operands)
    if OPTION in args.options:
        return _nested(run_alone(attention_backward, args))
    grad_query, grad_key, grad_value, captured = attend_backward(args)
    return (
        ordered(grad_query, args.query),
        ordered(grad_key, args.key),
        ordered(grad_value, args.value),
        captured,
    )


@hop.register_fake(attention_backward)
def _fake(*operands: Any) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, ...]]:
    args = BackwardArgs(*operands)
    query, key, value = (empty_ordered(t.shape, t) for t in (args.query, args.key, args.value))
    captured = tuple(
        torch.empty(
            args.score_captures[i].shape,
            dtype=args.score_captures[i].dtype,
            device=args.query.device,
        )
        for i in learned_captures(args.sites)
    )
    return query, key, value, captured


def _examples(*operands: Any) -> tuple[list[Any], list[Any], list[Any]]:
    """Example inputs of score_mod, the joint graph and mask_mod."""
    args = BackwardArgs(*operands)
    device, dtype = args.query.device, score_dtype(args.query)
    return (
        [*score_examples(device, dtype), *args.score_captures],
        [*joint_examples(device, dtype), *args.score_captures],
        [*index_examples(device), *args.mask_captures],
    )


hop.register_proxy(
    attention_backward, ("flexhop_score", "flexhop_joint", "flexhop_mask"), _examples, IndexMode
)
hop.register_functionalize(attention_backward, lambda *_: None)  # the forward call was checked
hop.register_checkpoint(attention_backward)


def _cast(dtype: torch.dtype, operands: tuple[Any, ...]) -> BackwardArgs:
    """Apply autocast if torch.func.grad calls it, as in the forward call."""
    args = BackwardArgs(*operands)
    names = ("query", "key", "value", "out", "grad_out")
    return args._replace(**{name: cast(getattr(args, name), dtype) for name in names})


hop.register_autocast(attention_backward, _cast)


class _Backward(torch.autograd.Function):
    """The gradients; their own gradient is the derivative operator.

    Inputs: the operator's other operands; out and lse; then the inputs of `of_backward`. Out and
    lse get no gradient: there they are functions of the inputs.
    """

    @staticmethod
    def forward(fixed: BackwardArgs, out: Tensor, lse: Tensor, *inputs: Any) -> Any:
        args = _with_inputs(fixed, inputs)._replace(out=out, lse=lse)
        *grads, captured = attention_backward(*args)
        return (*grads, *captured)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        fixed, _, _, *rest = inputs
        save_derivative(ctx, of_backward(_with_inputs(fixed, rest)))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        args, _ = restore_derivative(ctx)
        return (None, None, None, *differentiate(args, ctx.needs_input_grad[3:], grads))

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        return push_inputs(restore_derivative(ctx)[0], tangents[3:])[1]


def _inputs(args: BackwardArgs) -> tuple[Any, ...]:
    gradients = () if args.grad_lse is None else (args.grad_lse,)
    return (*args[:3], *args.score_captures, args.grad_out, *gradients)


def _with_inputs(args: BackwardArgs, inputs: Sequence[Any]) -> BackwardArgs:
    query, key, value, *rest = inputs
    count = len(args.score_captures)
    grad_out, *grad_lse = rest[count:]
    return args._replace(
        query=query, key=key, value=value, score_captures=tuple(rest[:count]),
        grad_out=grad_out, grad_lse=grad_lse[0] if grad_lse else None,
    )  # fmt: skip


def _autograd_inputs(*operands: Any) -> tuple[Any, ...]:
    args = BackwardArgs(*operands)
    nothing: Any = None
    fixed = args._replace(
        query=nothing, key=nothing, value=nothing, out=nothing, lse=nothing, grad_out=nothing,
        grad_lse=nothing, score_captures=(None,) * len(args.score_captures),
    )  # fmt: skip
    return (fixed, args.out, args.lse, *_inputs(args))


def _nested(flat: Sequence[Any]) -> tuple[Any, ...]:
    """The operator's results; the gradients of captures are a tuple."""
    return (*flat[:3], tuple(flat[3:]))


def _push(operands: tuple[Any, ...], tangents: Sequence[Tensor | None]) -> transforms.Pushed:
    """Forward mode of the operator; see transforms.register_jvp."""
    args = BackwardArgs(*operands)
    moved: Any = BackwardArgs(*hop.like_tree(operands, tangents))
    refuse_mask_tangents(moved.mask_captures)
    lse = () if args.grad_lse is None else (moved.grad_lse,)
    directions = (*moved[:3], *moved.score_captures, moved.grad_out, *lse)
    return transforms.Pushed(*push_inputs(of_backward(args), directions))


@hop.register_autograd(attention_backward)
def _autograd(*operands: Any) -> Any:
    leaves = hop.pytree.tree_leaves(operands)
    if torch.is_grad_enabled() and any(needs_grad(leaves)):
        return _nested(_Backward.apply(*_autograd_inputs(*operands)))
    if transforms.has_tangents(operands):
        return _nested(transforms.dual_results(_push, operands))
    with hop.below_autograd():
        return attention_backward(*operands)


def backward_of_call(args: BackwardArgs) -> Any:
    """Call the operator; without dispatch if a call runs kernels and no mode is active."""
    if OPTION in args.options:
        inputs = (*args[:3], *args.score_captures, args.grad_out, args.grad_lse)
        needs = torch.is_grad_enabled() and any(needs_grad(inputs))
        if not needs and is_bare((*inputs, args.out, *args.mask_captures, *args.blocks)):
            return _nested(run_alone(attention_backward, args))
    return attention_backward(*hop.unwrap_dead(tuple(args)))


transforms.register_grad(attention_backward, _Backward, _autograd_inputs, _nested)
transforms.register_jvp(attention_backward, _push, _nested)
hop.register_vmap(attention_backward, fold_backward, _nested)


def _count(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    """Five matrix products: recomputed scores, then gradients of weights, value, key and query."""
    batch, heads, length, width = query.shape
    return 2 * batch * heads * length * key.size(2) * (3 * width + 2 * value.size(3))


hop.register_flops(attention_backward, _count)
