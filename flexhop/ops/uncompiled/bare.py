"""Calls of which only autograd knows: without dispatch, and along a plan.

Under a mode, a transform or a tensor subclass, a call outside torch.compile is the operator. Other
calls run the operator's compiled code themselves. A plan holds what equal calls share.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexhop.compat.operators.alone import Alone, is_leaf
from flexhop.compat.operators.autograd import apply_plain, form_of, restore
from flexhop.mods.closures import Places
from flexhop.ops.args import AttentionArgs
from flexhop.ops.call import check_gradients
from flexhop.ops.forward import attention, gradients
from flexhop.ops.graphs.subgraphs import Joint, needs_grad, trace_joint
from flexhop.ops.uncompiled.option import find_alone

__all__ = ["Plan", "Repeat"]

Operands = tuple[Tensor, Tensor, Tensor]


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
        # Compiled code has one precision of float32 products; users may change it between calls.
        precision = torch.get_float32_matmul_precision()
        alone = self._alone.get(precision)
        if alone is None:
            alone = self._alone[precision] = find_alone(attention, args)
        return alone(leaves)

    def decided(self, leaves: list[Any]) -> Callable[[Sequence[Any]], list[Tensor]] | None:
        """What `compute` runs for such leaves, once it ran."""
        alone = self._alone.get(torch.get_float32_matmul_precision())
        return None if alone is None else alone.decided(leaves)

    def save(self, ctx: Any, args: AttentionArgs, leaves: list[Any], results: Any) -> None:
        """Save operands, out and lse, as ops.saving.save does; only tensors change."""
        out, lse, max_scores = results
        if self._form is None:
            self._form = form_of((args, out, lse))
        self.save_again(ctx, [*_tensors(leaves), out, lse])
        ctx.mark_non_differentiable(max_scores)

    def save_again(self, ctx: Any, tensors: Sequence[Tensor]) -> None:
        """Save the tensors of an equal call, once `save` ran."""
        ctx.plan, ctx.form = self, self._form
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)


def leaves_of(args: AttentionArgs) -> list[Any]:
    """Tensors and numbers that change from call to call, in the order of the operands."""
    return _changing([
        *args[:3], *args.blocks, *args.score_captures, *args.mask_captures, *args.dropout_seed
    ])  # fmt: skip


class _Bare(torch.autograd.Function):
    """Autograd's rule, in PyTorch's form that is faster and does not know torch.func."""

    @staticmethod
    def forward(ctx: Any, plan: Plan, args: AttentionArgs, *inputs: Any) -> Any:
        assert plan.joint is not None
        # Autograd passes tensors that take part in its graph, so these replace those of `args`.
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


class Repeat(NamedTuple):
    """A plan for calls whose tensors have the same sizes, strides, dtypes and devices."""

    plan: Plan
    score: tuple[tuple[bool, Any], ...]  # captures among the tensors that mods read, as in Places
    mask: tuple[tuple[bool, Any], ...]
    compute: Callable[[Sequence[Any]], list[Tensor]]
    has_numbers: bool  # whether not all captures are tensors

    @classmethod
    def of(
        cls, plan: Plan, places: Places, operands: Operands, blocks: Sequence[Tensor],
        held: Sequence[Tensor],
    ) -> Repeat | None:  # fmt: skip
        """The plan of a call that ran; None if its compiled code is not fixed."""
        score, mask = (_at(each, held) for each in places)
        if plan.joint is not None:
            score = plan.joint.hoist(score)
        leaves = [*operands, *blocks, *score, *mask]
        has_numbers = not all(isinstance(leaf, Tensor) for leaf in leaves)
        compute = plan.decided(_changing(leaves))
        return None if compute is None else cls(plan, places[0], places[1], compute, has_numbers)

    def run(self, operands: Operands, blocks: Sequence[Tensor], held: Sequence[Tensor]) -> Tensor:
        """The output of an equal call.

        Args:
            operands: query, key and value.
            blocks: as in AttentionArgs.
            held: the tensors that mods read.
        """
        score, joint = _at(self.score, held), self.plan.joint
        if joint is not None:
            score = joint.hoist(score)
        leaves = [*operands, *blocks, *score, *_at(self.mask, held)]
        if self.has_numbers:
            leaves = _changing(leaves)
        if joint is None:
            return self.compute(leaves)[0]
        return apply_plain(_Output, self, leaves, *operands, *score)


def _at(places: Sequence[tuple[bool, Any]], held: Sequence[Tensor]) -> Sequence[Any]:
    return [held[at] if is_tensor else at for is_tensor, at in places] if places else ()


def _tensors(leaves: Sequence[Any]) -> list[Tensor]:
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def _changing(leaves: list[Any]) -> list[Any]:
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) or is_leaf(leaf)]


class _Output(torch.autograd.Function):
    """Like _Bare, for the output alone."""

    @staticmethod
    def forward(ctx: Any, repeat: Repeat, leaves: list[Any], *inputs: Any) -> Tensor:
        out, lse, _ = repeat.compute(leaves)
        tensors = _tensors(leaves) if repeat.has_numbers else leaves
        repeat.plan.save_again(ctx, [*tensors, out, lse])
        return out

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        return _Bare.backward(ctx, *grad_outputs, None, None)
