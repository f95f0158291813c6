"""The operator `flexhop_attention_backward` and its dispatch rules."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flexhop.compat import hop
from flexhop.compat.indexing import IndexMode
from flexhop.errors import DoubleBackwardError, VmapError
from flexhop.ops.args import BackwardArgs
from flexhop.ops.eager import attend_backward
from flexhop.ops.layout import empty_ordered, ordered
from flexhop.ops.subgraphs import index_examples, joint_examples, score_dtype, score_examples

attention_backward = hop.Operator(
    "flexhop_attention_backward", BackwardArgs, ("score_mod", "joint", "mask_mod")
)


@hop.register_dense(attention_backward)
def _dense(*operands: Any) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, ...]]:
    args = BackwardArgs(*operands)
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
        for i in sorted(set(args.sites[::2]))
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


class _NoSecondDerivative(torch.autograd.Function):
    """Hands gradients on; differentiating them again is refused."""

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        """The first `count` tensors; the rest only makes them depend on something."""
        return tuple(tensor.view_as(tensor) for tensor in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Refuse."""
        raise DoubleBackwardError()


@attention_backward.py_autograd_impl
def _autograd(*operands: Any) -> Any:
    with hop.below_autograd():
        grads = attention_backward(*operands)
    roots = [
        t for t in hop.pytree.tree_leaves(operands) if isinstance(t, Tensor) and t.requires_grad
    ]
    if not (torch.is_grad_enabled() and roots):
        return grads
    flat, structure = hop.pytree.tree_flatten(grads)
    return hop.pytree.tree_unflatten(
        _NoSecondDerivative.apply(len(flat), *flat, *roots), structure
    )


hop.register_undifferentiable(attention_backward)
hop.register_refusal(
    attention_backward, "Vmap", lambda: VmapError(argument="the compiled backward pass")
)


def _count(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    """Five matrix products: scores again, then the gradients of weights, value, key and query."""
    batch, heads, length, width = query.shape
    return 2 * batch * heads * length * key.size(2) * (3 * width + 2 * value.size(3))


hop.register_flops(attention_backward, _count)
