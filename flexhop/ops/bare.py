"""Calls of which only autograd knows: without dispatch, and along a plan.

Under a mode, a transform or a tensor subclass, a call outside torch.compile is the operator. Other
calls run the operator's compiled code themselves. A plan holds what equal calls share.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flexhop.compat.alone import Alone, is_leaf
from flexhop.ops.args import AttentionArgs
from flexhop.ops.call import check_gradients
from flexhop.ops.eager_kernels import find_alone
from flexhop.ops.forward import attention, gradients
from flexhop.ops.saving import form_of, restore
from flexhop.ops.subgraphs import Joint, needs_grad, trace_joint

__all__ = ["Plan"]


class Plan:
    """How to run a call, and those that differ from it only in the values of tensors.

    Equal are: shapes, dtypes and devices of query, key and value; scale and options; the graphs of
    mods; numbers and kinds of tensors among captures; which tensors require gradients, and whether
    gradients are enabled.
    """

    def __init__(self, args: AttentionArgs) -> None:
        """Plan a call with these operands, whose mods are graphs."""
        self.joint: Joint | None = None
        inputs = (*args[:3], *args.score_captures, *args.mask_captures)
        if torch.is_grad_enabled() and any(needs_grad(inputs)):
            check_gradients(args.mask_captures, args.options)
            self.joint = trace_joint(args.score_mod, args.query, args.score_captures)
        self._alone: dict[str, Alone] = {}
        self._form: Any = None

    def run(self, args: AttentionArgs) -> tuple[Tensor, ...]:
        """Run a call: out, lse and max_scores."""
        if self.joint is None:
            return tuple(self.compute(args, leaves_of(args)))
        return _Bare.apply(self, args, *args[:3], *self.joint.hoist(args.score_captures))

    def compute(self, args: AttentionArgs, leaves: list[Any]) -> list[Tensor]:
        """Run the compiled code."""
        precision = torch.get_float32_matmul_precision()
        alone = self._alone.get(precision)
        if alone is None:
            alone = self._alone[precision] = find_alone(attention, args)
        return alone(leaves)

    def save(self, ctx: Any, args: AttentionArgs, leaves: list[Any], results: Any) -> None:
        """Save operands, out and lse, as ops.saving.save does; only tensors change."""
        out, lse, max_scores = results
        if self._form is None:
            self._form = form_of((args, out, lse))
        ctx.plan, ctx.form = self, self._form
        ctx.save_for_backward(*[t for t in leaves if isinstance(t, Tensor)], out, lse)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(max_scores)


def leaves_of(args: AttentionArgs) -> list[Any]:
    """Tensors and numbers that change from call to call, in the order of the operands."""
    leaves = [
        *args[:3], *args.blocks, *args.score_captures, *args.mask_captures, *args.dropout_seed
    ]  # fmt: skip
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) or is_leaf(leaf)]


class _Bare(torch.autograd.Function):
    """Autograd's rule, in PyTorch's form that is faster and does not know torch.func."""

    @staticmethod
    def forward(ctx: Any, plan: Plan, args: AttentionArgs, *inputs: Any) -> Any:
        assert plan.joint is not None
        query, key, value, *captures = inputs
        args = AttentionArgs(
            query, key, value, plan.joint.score_mod, args.mask_mod, args.blocks, args.scale,
            args.options, tuple(captures), args.mask_captures, args.dropout_seed,
        )  # fmt: skip
        leaves = leaves_of(args)
        results = tuple(plan.compute(args, leaves))
        plan.save(ctx, args, leaves, results)
        return results

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        args, out, lse = restore(ctx)
        joint = ctx.plan.joint
        return (None, None, *gradients(args, (out, lse), joint.joint, joint.sites, grad_outputs))
