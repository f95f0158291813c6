"""Derivatives beyond the gradient, of a call and of plain PyTorch.

tangent: of out and lse along a direction (forward mode). second: gradients of a product of all
first gradients with directions. flow: gradients of a loss on out and its tangent, for leaves and
directions, as MeanFlow's without a detached target. All of them are functions of the values of a
problem's leaves, so that torch.compile sees every derivative.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from tests.budgets import (
    Formula,
    Truncated,
    evaluate_mask_mod,
    evaluate_score_mod,
)
from tests.fuzz import fused
from tests.fuzz.functions import chain_scores
from tests.fuzz.fused import Product, Rounding, Softmax
from tests.fuzz.oracle import (
    Order,
    Parts,
    Segment,
    copy_problem,
    from_batch,
    kept_weights,
    log_add,
    scale_of,
    segments,
)
from tests.fuzz.problem import Problem, bare_call
from tests.fuzz.scores import SCORES

Tensors = tuple[Tensor, ...]
Attend = Callable[..., tuple[Tensor, Tensor]]  # of leaves: out and lse
Gradient = Callable[[Callable[..., Tensor]], Callable[..., Tensors]]
MOVED = "moved_"  # before the name of a leaf: its direction, and the gradient of that


class Captured:
    """Captured values as attributes; Dynamo makes objects of such classes inside of graphs."""

    def __init__(self, values: dict[str, Any]) -> None:
        for name, value in values.items():
            setattr(self, name, value)


def make_derivative(problem: Problem, *, by_autograd: bool = False) -> Callable[..., Tensors]:
    """The problem's derivative by flexhop, as a function of leaves and then of directions.

    by_autograd: gradients by torch.autograd, which cannot be compiled, instead of torch.func.
    """
    gradient = by_graph if by_autograd else by_transform
    return derivative(problem, call_of_leaves(problem), gradient)


def inputs_of(problem: Problem) -> list[Tensor]:
    """Leaves, and directions of equal dtypes."""
    leaves = [leaf.detach() for leaf in problem.leaves().values()]
    if problem.plan.derivative != "second":
        # Forward mode of PyTorch takes no expanded tensors; compiled, it takes no views.
        leaves = [t.clone(memory_format=torch.contiguous_format) for t in leaves]
    generator = torch.Generator().manual_seed(len(leaves))
    moved = [torch.randn(t.shape, generator=generator, dtype=torch.float64) for t in leaves]
    return leaves + [m.to(t) for m, t in zip(moved, leaves, strict=True)]


@contextlib.contextmanager
def leaving_forward_mode() -> Iterator[None]:
    """Dynamo stays in forward mode after an error; the next problem could not enter it."""
    try:
        yield
    except Exception:
        with contextlib.suppress(RuntimeError):
            forward_ad.exit_dual_level()
        raise


def named_results(problem: Problem, results: Sequence[Tensor]) -> dict[str, Tensor]:
    """Results of a derivative by name."""
    leaves = list(problem.leaves())
    names = {
        "tangent": ["out_dot", "lse_dot"],
        "second": leaves,
        "flow": [*leaves, *(f"{MOVED}{name}" for name in leaves)],
    }[problem.plan.derivative]
    return dict(zip(names, results, strict=True))


def call_of_leaves(problem: Problem) -> Attend:
    """The call as a function of the values of its leaves."""
    plan, names, call = problem.plan, list(problem.leaves()), bare_call(problem)
    entries = [SCORES[name] for name in plan.scores]
    captures, sinks = vars(problem.captures), problem.sinks

    def attend(*leaves: Tensor) -> tuple[Tensor, Tensor]:
        named = dict(zip(names, leaves, strict=True))
        query, key, value = (
            named.get(f"grad_{n}", t) for n, t in zip("qkv", problem.operands, strict=True)
        )
        others: dict[str, Any] = {}
        if plan.learned:
            own = Captured({name: named.get(name, value) for name, value in captures.items()})
            others["score_mod"] = chain_scores(entries)(own)
        if sinks is not None:
            others["sinks"] = named.get("sinks", sinks)
        found = call(query, key, value, **others)
        out, lse = (found[0], found[1].lse) if isinstance(found, tuple) else (found, None)
        return out, out.new_zeros(()) if lse is None else _finite(lse)

    return attend


def _finite(lse: Tensor) -> Tensor:
    """Without the infinities of rows without keys, which have no derivative."""
    return torch.where(lse.detach().isfinite(), lse, 0.0)


# What is derived


def derivative(problem: Problem, attend: Attend, gradient: Gradient) -> Callable[..., Tensors]:
    """The derivative that the plan names, of any implementation of its call."""
    make = {"tangent": _tangent, "second": _second, "flow": _flow}[problem.plan.derivative]
    return make(problem, attend, gradient)


def by_transform(function: Callable[..., Tensor]) -> Callable[..., Tensors]:
    """Gradients for all inputs, by torch.func."""
    return lambda *x: torch.func.grad(function, argnums=tuple(range(len(x))))(*x)


def by_graph(function: Callable[..., Tensor]) -> Callable[..., Tensors]:
    """The same by torch.autograd."""

    def gradients(*x: Tensor) -> Tensors:
        x = tuple(t if t.requires_grad else t.detach().requires_grad_() for t in x)
        total = function(*x)
        if not total.requires_grad:
            return tuple(torch.zeros_like(t) for t in x)
        found = torch.autograd.grad(total, x, create_graph=True, allow_unused=True)
        return tuple(
            torch.zeros_like(t) if g is None else g for t, g in zip(x, found, strict=True)
        )

    return gradients


def _tangent(problem: Problem, attend: Attend, gradient: Gradient) -> Callable[..., Tensors]:
    def run(*x: Tensor) -> Tensors:
        leaves, moved = _halves(x)
        return torch.func.jvp(attend, leaves, moved)[1]

    return run


def _second(problem: Problem, attend: Attend, gradient: Gradient) -> Callable[..., Tensors]:
    def loss(*leaves: Tensor) -> Tensor:
        return _product(attend(*leaves), _weights(problem))

    def run(*x: Tensor) -> Tensors:
        leaves, moved = _halves(x)
        return gradient(lambda *y: _product(gradient(loss)(*y), moved))(*leaves)

    return run


def _flow(problem: Problem, attend: Attend, gradient: Gradient) -> Callable[..., Tensors]:
    def loss(*x: Tensor) -> Tensor:
        results, tangents = torch.func.jvp(attend, *_halves(x))
        weights = _weights(problem)
        return _product(tangents, weights) - _product(results, weights) * 0.5

    return lambda *x: gradient(loss)(*x)


def _halves(x: Tensors) -> tuple[Tensors, Tensors]:
    return x[: len(x) // 2], x[len(x) // 2 :]


def _weights(problem: Problem) -> Tensors:
    grad_lse = problem.grad_lse
    return problem.grad_out, grad_lse if problem.plan.lse else grad_lse.new_zeros(())


def _product(values: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
    """A sum over all elements, at least in fp32."""
    wide = [torch.promote_types(t.dtype, torch.float32) for t in values]
    terms = [(t.to(w) * a.to(w)).sum() for t, a, w in zip(values, weights, wide, strict=True)]
    return sum(terms[1:], terms[0])


# What it must be


def compute_derivative(
    problem: Problem, dtype: torch.dtype | None, formula: Formula = "plain", order: int = 0
) -> Parts:
    """The derivative of plain PyTorch by name; arguments as for oracle.compute.

    order: if negative, scores are summed twice, in this order and in that of the operands.
    """
    copied = copy_problem(problem, dtype)
    is_short = dtype is None and problem.truncates

    def attend(*leaves: Tensor) -> tuple[Tensor, Tensor]:
        return dense(copied.with_leaves(leaves), formula, is_short, order)

    inputs = inputs_of(problem)
    if dtype is not None:
        inputs = [t.to(dtype) for t in inputs]
    results = derivative(copied, attend, by_transform)(*inputs)
    return named_results(copied, results)


def dense(
    problem: Problem, formula: Formula = "plain", is_short: bool = False, order: int = 0
) -> tuple[Tensor, Tensor]:
    """Out and lse, every score at once, in operations that PyTorch derives as often as wanted."""
    found = []
    for part in segments(problem):
        turned = Order.of(part, abs(order))
        again = (part, Order.of(part, 0)) if order < 0 else None
        out, lse = _attend(problem, turned.apply(part), formula, is_short, turned, again)
        out = out[..., turned.value_columns.argsort()]
        if problem.sinks is not None:
            out, lse = _with_sinks(out, lse, problem.sinks)
        found.append((out, lse))
    if problem.plan.queries:
        out, lse = (
            torch.cat([t[0].transpose(0, 1) for t in ts]) for ts in zip(*found, strict=True)
        )
    else:
        ((out, lse),) = found
    return out, _finite(lse) if problem.plan.lse else out.new_zeros(())


def _attend(
    problem: Problem,
    part: Segment,
    formula: Formula,
    is_short: bool,
    order: Order,
    again: tuple[Segment, Order] | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of one segment, in an order.

    formula: "plain" rounds as budgets.dense_attention; any other is that of fused.py.
    again: the same segment in another order, of which weights take the statistic. A kernel finds
    scores anew in a later pass, by products of other shapes, and their derivatives likewise.
    Differences that are 0 in exact numbers, as those of a row with one key, are then sums of
    rounded terms. One pass of plain PyTorch computes both terms alike, and finds 0 by luck.
    """
    wide = torch.promote_types(part.query.dtype, torch.float32)
    size = (part.query.size(0), problem.plan.shape.heads, part.query.size(2), part.key.size(2))
    if not size[3]:
        still = part.query.sum() * 0  # so that it has a derivative
        lse = part.query.new_full(size[:3], -math.inf, dtype=wide)
        return part.value.new_zeros(*size[:3], problem.plan.shape.value_head_dim) + still, lse
    scores, seen = _scores(problem, part, formula, is_short, order)
    lse = _statistic(
        *(_scores(problem, again[0], formula, is_short, again[1]) if again else (scores, seen))
    )
    factors = 1.0
    if problem.plan.dropout:
        kept = kept_weights(problem, part)[..., order.keys]
        factors = kept.to(wide) / (1 - problem.plan.dropout)
    if formula != "plain":
        value = _per_head(problem, part, part.value.to(wide))
        rounding = Rounding(part.query.dtype, is_short)
        out, lse = fused.attend(fused.At(scores, value, lse), Softmax(rounding, seen, factors))
        return out.to(part.query.dtype), lse
    is_live = seen.any(-1)
    shift = torch.where(is_live, scores.detach().amax(-1) if again is None else lse, 0.0)
    weights = torch.where(seen, torch.exp(torch.where(seen, scores, 0.0) - shift[..., None]), 0.0)
    if again is None:
        weights = weights / torch.where(is_live, weights.sum(-1), 1.0)[..., None]
    product = Truncated.apply if is_short else torch.matmul
    return product(
        (weights * factors).to(part.query.dtype), _per_head(problem, part, part.value)
    ), lse


def _statistic(scores: Tensor, seen: Tensor) -> Tensor:
    """lse; -inf for rows without keys."""
    is_live = seen.any(-1)
    shift = torch.where(is_live, scores.detach().amax(-1), 0.0)
    weights = torch.where(seen, torch.exp(torch.where(seen, scores, 0.0) - shift[..., None]), 0.0)
    total = torch.where(is_live, weights.sum(-1), 1.0)
    return torch.where(is_live, shift + torch.log(total), -math.inf)


def _per_head(problem: Problem, part: Segment, rows: Tensor) -> Tensor:
    """Keys or values of every batch and query head."""
    group = problem.plan.shape.heads // rows.size(1)
    return rows.expand(part.query.size(0), -1, -1, -1).repeat_interleave(group, 1)


def _scores(
    problem: Problem, part: Segment, formula: Formula, is_short: bool, order: Order
) -> tuple[Tensor, Tensor]:
    """Modified scores, and which of them count."""
    score_mod, mask_mod = problem.score_mod(), problem.mask_mod()
    query, key = part.query, part.key
    wide = torch.promote_types(query.dtype, torch.float32)
    if formula == "plain":
        product = Truncated.apply if is_short else torch.matmul
        scores = product(query, _per_head(problem, part, key).mT).to(wide)
    else:
        key = _per_head(problem, part, key.to(wide))
        scores = Product.apply(query.to(wide), key.mT, Rounding(query.dtype, is_short))
    scores = scores * scale_of(problem.plan)
    seen = part.visible.expand(scores.shape)
    if mask_mod is not None:
        own = from_batch(mask_mod, part.first, 0, order)
        seen = seen & evaluate_mask_mod(own, torch.empty(scores.shape, device=scores.device))
    if score_mod is not None:
        # A derivative may be infinite or NaN where the mask hides the score.
        scores = torch.where(seen, scores, scores.detach())
        own = from_batch(score_mod, part.first, 1, order)
        scores = evaluate_score_mod(own, scores).to(scores.dtype)
    seen = seen & (scores.detach() != -math.inf)
    return torch.where(seen, scores, -math.inf), seen


def _with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """With derivatives of rows without keys."""
    sink = sinks.to(lse.dtype)[:, None].expand(lse.shape)
    is_live = lse.detach() != -math.inf
    safe = torch.where(is_live, lse, 0.0)
    total = torch.where(is_live, log_add(safe, sink), sink)
    factor = torch.where(is_live, torch.exp(safe - total), 0.0)
    return (out * factor[..., None]).to(out.dtype), total
