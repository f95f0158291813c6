"""Attention and its derivatives up to second orders, with the roundings of a careful fused kernel.

Operands of products are rounded, and nothing else: scores, sums of rows, and the tangents and
gradients of both are fp32. Weights are rounded before they are divided by their sum, which a
kernel knows last. The mean over the keys is subtracted from tangents and gradients of scores
before those are rounded; that of gradients is a sum over out (rowsum(out * grad_out), as in
budgets.dense_backward).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from tests.budgets import truncate


@dataclasses.dataclass(frozen=True)
class Rounding:
    """What a product leaves of its operands: a dtype of 16 bits; of fp32, perhaps TF32."""

    dtype: torch.dtype
    truncates: bool = False

    def __call__(self, values: Tensor) -> Tensor:
        if self.truncates:
            return truncate(values)
        return values.to(self.dtype).to(values.dtype)

    def multiply(self, left: Tensor, right: Tensor) -> Tensor:
        return self(left) @ self(right)


class Product(Function):
    """A product of fp32 matrices whose operands are rounded, in all derivatives."""

    @staticmethod
    def forward(left: Tensor, right: Tensor, rounding: Rounding) -> Tensor:
        return rounding.multiply(left, right)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        *factors, ctx.rounding = inputs
        ctx.save_for_backward(*factors)
        ctx.save_for_forward(*factors)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        left, right = ctx.saved_tensors
        return *(
            Product.apply(*p, ctx.rounding) for p in ((grad, right.mT), (left.mT, grad))
        ), None

    @staticmethod
    def jvp(ctx: Any, left_dot: Tensor | None, right_dot: Tensor | None, _: None) -> Tensor:
        left, right = ctx.saved_tensors
        pairs = [(left_dot, right), (left, right_dot)]
        terms = [(a, b) for a, b in pairs if a is not None and b is not None]
        return sum(Product.apply(a, b, ctx.rounding) for a, b in terms)


@dataclasses.dataclass(frozen=True)
class Softmax:
    """What is fixed of a call.

    seen: which scores count. factors: of dropout, which multiply weights after their sum.
    """

    rounding: Rounding
    seen: Tensor
    factors: Tensor | float = 1.0


class At(NamedTuple):
    """Where derivatives are taken; lse [B, H, M] may come from other sums of the same scores."""

    scores: Tensor
    value: Tensor
    lse: Tensor


def attend(at: At, call: Softmax) -> tuple[Tensor, Tensor]:
    """Out and lse, in operations of which PyTorch takes first and second derivatives."""
    return _Attend.apply(*at, call)


class _Attend(Function):
    @staticmethod
    def forward(
        scores: Tensor, value: Tensor, lse: Tensor, call: Softmax
    ) -> tuple[Tensor, Tensor]:
        return _out(At(scores, value, lse), call), lse.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _save(ctx, inputs)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor, grad_lse: Tensor) -> tuple[Tensor | None, ...]:
        return *_Pull.apply(*ctx.saved_tensors, grad_out, grad_lse, ctx.call), None

    @staticmethod
    def jvp(ctx: Any, *dots: Tensor | None) -> tuple[Tensor, Tensor]:
        at = ctx.saved_tensors
        dots = (torch.zeros_like(t) if d is None else d for t, d in zip(at, dots[:3], strict=True))
        return _Push.apply(*at, *dots, ctx.call)


class _Push(Function):
    """Tangents of out and lse along those of scores, value and lse."""

    @staticmethod
    def forward(*inputs: Any) -> tuple[Tensor, Tensor]:
        *tensors, call = inputs
        at, dots = At(*tensors[:3]), At(*tensors[3:])
        return _out_dot(at, dots, call), dots.lse.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _save(ctx, inputs)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor, grad_lse: Tensor) -> tuple[Tensor | None, ...]:
        at, dots = At(*ctx.saved_tensors[:3]), At(*ctx.saved_tensors[3:])
        gradients = _gradients(at, grad_out, grad_lse, ctx.call)
        return *_gradients_dot(at, dots, grad_out, grad_lse, ctx.call), *gradients, None


class _Pull(Function):
    """Gradients of scores and value; lse is one of the scores' own sums, so its part is theirs."""

    @staticmethod
    def forward(*inputs: Any) -> At:
        *tensors, grad_out, grad_lse, call = inputs
        return tuple(_gradients(At(*tensors), grad_out, grad_lse, call))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _save(ctx, inputs)

    @staticmethod
    def backward(ctx: Any, *dots: Tensor) -> tuple[Tensor | None, ...]:
        *tensors, grad_out, grad_lse = ctx.saved_tensors
        at, moved = At(*tensors), At(*dots)
        found = _gradients_dot(at, moved, grad_out, grad_lse, ctx.call)
        return *found, _out_dot(at, moved, ctx.call), moved.lse, None


def _save(ctx: Any, inputs: Any) -> None:
    *tensors, ctx.call = inputs
    ctx.save_for_backward(*tensors)
    ctx.save_for_forward(*tensors)


def _weights(at: At, call: Softmax) -> Tensor:
    return torch.where(call.seen, torch.exp(at.scores - at.lse[..., None]), 0.0)


def _averages(at: At, call: Softmax) -> Callable[[Tensor | float, Tensor], Tensor]:
    """A function of numbers per score, and rows per key: sums of both times weights."""
    is_live = call.seen.any(-1, keepdim=True)
    shift = torch.where(is_live, at.scores.amax(-1, keepdim=True), 0.0)
    weights = torch.where(call.seen, torch.exp(at.scores - shift), 0.0) * call.factors
    total = torch.where(is_live, torch.exp(at.lse[..., None] - shift), 1.0)
    return lambda numbers, rows: call.rounding.multiply(weights * numbers, rows) / total


def _out(at: At, call: Softmax) -> Tensor:
    return _averages(at, call)(1.0, at.value)


def _out_dot(at: At, dots: At, call: Softmax) -> Tensor:
    average = _averages(at, call)
    return average(_change(at, dots, call), at.value) + average(1.0, dots.value)


def _change(at: At, dots: At, call: Softmax) -> Tensor:
    """Tangents of weights, divided by weights."""
    return torch.where(_weights(at, call) != 0, dots.scores - dots.lse[..., None], 0.0)


def _grad_change(at: At, grad_out: Tensor, grad_lse: Tensor, call: Softmax) -> Tensor:
    """Gradients of scores, divided by weights."""
    mean = (grad_out * _out(at, call)).sum(-1) - grad_lse
    return call.rounding.multiply(grad_out, at.value.mT) * call.factors - mean[..., None]


def _gradients(at: At, grad_out: Tensor, grad_lse: Tensor, call: Softmax) -> At:
    weights = _weights(at, call)
    of_value = call.rounding.multiply((weights * call.factors).mT, grad_out)
    of_scores = weights * _grad_change(at, grad_out, grad_lse, call)
    return At(of_scores, of_value, torch.zeros_like(at.lse))


def _gradients_dot(at: At, dots: At, grad_out: Tensor, grad_lse: Tensor, call: Softmax) -> At:
    """Tangents of the gradients, along those of scores, value and lse."""
    weights, change = _weights(at, call), _change(at, dots, call)
    mean_dot = (grad_out * _out_dot(at, dots, call)).sum(-1, keepdim=True)
    moved = call.rounding.multiply(grad_out, dots.value.mT) * call.factors - mean_dot
    of_scores = weights * (change * _grad_change(at, grad_out, grad_lse, call) + moved)
    of_value = call.rounding.multiply((weights * change * call.factors).mT, grad_out)
    return At(of_scores, of_value, torch.zeros_like(at.lse))
