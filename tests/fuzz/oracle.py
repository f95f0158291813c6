"""What a problem's results must be: plain PyTorch, every score at once, a sequence at a time."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

import flexhop
from tests.budgets import Dense, Formula, dense_attention, dense_backward, evaluate_mask_mod
from tests.fuzz.plan import Plan
from tests.fuzz.problem import Problem

Parts = dict[str, Tensor]


class Segment(NamedTuple):
    """Rows that see keys: all of a dense call, or a sequence.

    first: number of its first batch. query, key, value: [B, H, S, D]. visible: what is not hidden
    before mask_mod. rows, keys: its tokens, if the operands are packed.
    """

    first: int
    query: Tensor
    key: Tensor
    value: Tensor
    visible: Tensor
    rows: slice
    keys: slice


def copy_problem(problem: Problem, dtype: torch.dtype | None = None) -> Problem:
    """Fresh leaves of equal value, in `dtype` if given; captures that do not learn stay."""

    def leaf(tensor: Tensor) -> Tensor:
        if not tensor.dtype.is_floating_point or tensor.dtype.itemsize < 2:
            return tensor
        fresh = tensor.detach().clone() if dtype is None else tensor.detach().to(dtype)
        return fresh.requires_grad_(tensor.requires_grad)

    values = dict(vars(problem.captures))
    values |= {name: leaf(values[name]) for name in problem.plan.learned}
    operands = problem.operands
    if problem.plan.around == "autocast":  # which casts them
        cast = (t.detach().to(problem.plan.dtype) for t in operands)
        operands = [t.requires_grad_(o.requires_grad) for t, o in zip(cast, operands, strict=True)]
    first, *others = (leaf(t) for t in operands)
    fresh = copy.copy(problem)
    fresh.operands = (first, others[0], others[1])
    fresh.captures = SimpleNamespace(**values)
    fresh.sinks = None if problem.sinks is None else leaf(problem.sinks)
    return fresh


def segments(problem: Problem) -> list[Segment]:
    """The parts of a call that do not see each other."""
    plan, (query, key, value) = problem.plan, problem.operands
    device, whole = query.device, slice(None)
    if problem.plain is not None:
        key, value = (t.to(query.dtype) for t in problem.plain)
    if not plan.queries:
        visible = torch.ones(query.size(0), 1, 1, key.size(2), dtype=torch.bool, device=device)
        if plan.page:
            lengths = torch.tensor(plan.keys, device=device).view(-1, 1, 1, 1)
            visible = torch.arange(key.size(2), device=device) < lengths
        return [Segment(0, query, key, value, visible, whole, whole)]
    found, row, column = [], 0, 0
    for number, (rows, keys) in enumerate(zip(plan.queries, plan.key_lengths, strict=True)):
        used = keys if plan.used is None else plan.used[number]
        at, to = slice(row, row + rows), slice(column, column + used)
        parts = (query[at], key[to], value[to])
        moved = [t.transpose(0, 1)[None] for t in parts]
        if rows:
            found.append(Segment(number, *moved, _window(problem, rows, used), at, to))
        row, column = row + rows, column + keys
    return found


def _window(problem: Problem, rows: int, keys: int) -> Tensor:
    """What is_causal and window_size leave of a sequence."""
    plan, device = problem.plan, problem.device
    left, right = plan.window
    right = 0 if plan.causal else right
    row = torch.arange(rows, device=device)[:, None]
    row, column = (
        row + (keys - rows if plan.bottom_right else 0),
        torch.arange(keys, device=device),
    )
    visible = torch.ones(rows, keys, dtype=torch.bool, device=device)
    if left is not None:
        visible = visible & (column >= row - left)
    if right is not None:
        visible = visible & (column <= row + right)
    return visible[None, None]


class Order(NamedTuple):
    """Another order of the same sums: of columns of query and key, columns of value, and keys."""

    columns: Tensor
    value_columns: Tensor
    keys: Tensor

    @classmethod
    def of(cls, part: Segment, number: int) -> Order:
        """A random order; number 0 is that of the operands."""
        sizes = (part.query.size(3), part.value.size(3), part.key.size(2))
        if not number:
            return cls(*(torch.arange(n, device=part.query.device) for n in sizes))
        generator = torch.Generator().manual_seed(number)
        return cls(*(torch.randperm(n, generator=generator).to(part.query.device) for n in sizes))

    def apply(self, part: Segment) -> Segment:
        """The same rows and keys, in this order; mods still see the numbers of before."""
        key = part.key[..., self.keys, :][..., self.columns]
        value = part.value[..., self.keys, :][..., self.value_columns]
        visible = part.visible.expand(*part.visible.shape[:-1], part.key.size(2))[..., self.keys]
        return part._replace(
            query=part.query[..., self.columns], key=key, value=value, visible=visible
        )


def compute(
    problem: Problem,
    dtype: torch.dtype | None,
    formula: Formula = "plain",
    order: int = 0,
    disturbed: int | None = None,
) -> Parts:
    """Results and gradients by name, in the dtype; None is that of the problem.

    Names are those of Problem.leaves, and "out", "lse", "max_scores". "unseen_" before a name:
    which rows of it must be exactly 0. order: 0, or the number of another order of all sums.
    disturbed: see _attend_disturbed; which disturbance, if any.
    """
    copied = copy_problem(problem, dtype)
    plan, parts = copied.plan, segments(copied)
    is_short = dtype is None and problem.truncates
    orders = [Order.of(part, order) for part in parts]
    dense = [
        _attend(copied, part, formula, is_short, turned)
        if disturbed is None
        else _attend_disturbed(copied, part, formula, is_short, turned, disturbed)
        for part, turned in zip(parts, orders, strict=True)
    ]
    places = [turned.value_columns.argsort() for turned in orders]
    leaves = [
        (d.out.detach()[..., at], d.lse.detach()) for d, at in zip(dense, places, strict=True)
    ]
    for out, lse in leaves:
        out.requires_grad_(), lse.requires_grad_()
    with_sinks = [_add_sinks(out, lse, copied.sinks) for out, lse in leaves]
    found = _joined(copied, parts, dense, with_sinks)
    if plan.is_differentiated:
        _loss(copied, found["out"], found["lse"]).backward()
        for part, (out, lse), turned in zip(dense, leaves, orders, strict=True):
            assert out.grad is not None
            grad_lse = lse.grad if plan.lse or copied.sinks is not None else None
            columns = turned.value_columns
            dense_backward(part, out.grad[..., columns], grad_lse, columns.argsort())
    for name, leaf in copied.leaves().items():
        found[name] = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
    return {name: tensor.detach() for name, tensor in found.items()}


def _attend_disturbed(
    problem: Problem, part: Segment, formula: Formula, is_short: bool, order: Order, number: int
) -> Dense:
    """Attention whose scores are off by what sums in fp32 round, forward and backward apart.

    A kernel finds a score anew in its backward pass, by products of other shapes. The sum of its
    columns is rounded after every 16 of them at best, each time by up to 2^-24 of what was added.
    """
    generator = torch.Generator().manual_seed(number)
    rounded = math.ceil(problem.plan.shape.head_dim / 16) * 2.0**-24 * abs(scale_of(problem.plan))
    with torch.no_grad():
        key = part.key.repeat_interleave(part.query.size(1) // part.key.size(1), 1)
        bound = (part.query.abs().float() @ key.abs().float().mT) * rounded
    forward, backward = (
        _attend(problem, part, formula, is_short, order, bound * _between(bound, generator))
        for _ in range(2)
    )
    return backward._replace(
        out=forward.out, lse=forward.lse, largest=forward.largest, rest=forward.rest
    )


def scale_of(plan: Plan) -> float:
    """What multiplies products of query and key."""
    return 1 / math.sqrt(plan.shape.head_dim) if plan.scale is None else plan.scale


def _between(like: Tensor, generator: torch.Generator) -> Tensor:
    """Uniform numbers from -1 to 1."""
    return (2 * torch.rand(like.shape, generator=generator) - 1).to(like)


def _attend(
    problem: Problem,
    part: Segment,
    formula: Formula,
    is_short: bool,
    order: Order,
    disturbance: Tensor | float = 0.0,
) -> Dense:
    """Attention of one segment, in an order; is_short: with TF32 products."""
    plan, shape = problem.plan, problem.plan.shape
    score_mod, mask_mod = problem.score_mod(), problem.mask_mod()
    has_keys = part.key.size(2) > 0
    part = order.apply(part)
    if not has_keys:  # without a largest score: one key that nobody sees
        blank = [t.new_zeros(*t.shape[:2], 1, t.size(3)) for t in (part.key, part.value)]
        hidden = torch.zeros(1, 1, part.query.size(2), 1, dtype=torch.bool, device=problem.device)
        part = part._replace(key=blank[0], value=blank[1], visible=hidden)
        score_mod = mask_mod = None
        disturbance = 0.0
    if score_mod is not None and plan.dtype != torch.float64:
        score_mod = _in_fp32(score_mod)
    size = (part.query.size(0), shape.heads, part.query.size(2), part.key.size(2))
    visible = part.visible.expand(size)
    if mask_mod is not None:
        like = torch.empty(size, device=problem.device)
        visible = visible & evaluate_mask_mod(from_batch(mask_mod, part.first, 0, order), like)
    factors = None
    if plan.dropout and has_keys:
        wide = torch.promote_types(part.query.dtype, torch.float32)
        factors = kept_weights(problem, part)[..., order.keys].to(wide) / (1 - plan.dropout)
    query, scale = part.query, scale_of(plan)
    if formula != "plain" and dict(plan.options).get("prescale_qk"):
        query, scale = query * scale, 1.0  # the option rounds the product
    return dense_attention(
        query, part.key, part.value,
        None if score_mod is None else from_batch(score_mod, part.first, 1, order), visible, scale,
        formula=formula, factors=factors, truncates=is_short, disturbance=disturbance,
    )  # fmt: skip


def _in_fp32(mod: Callable[..., Any]) -> Callable[..., Any]:
    """A mod whose scores are infinite if fp32 holds no such number: the sum of two lowest ones."""

    def limited(*args: Any) -> Any:
        score = mod(*args)
        score = torch.where(score > torch.finfo(torch.float32).max, torch.inf, score)
        return torch.where(score < torch.finfo(torch.float32).min, -torch.inf, score)

    return limited


def from_batch(
    mod: Callable[..., Any], first: int, place: int, order: Order
) -> Callable[..., Any]:
    """A mod whose batches count from `first`, of keys in an order."""
    keys = order.keys.int()

    def counted(*args: Any) -> Any:
        values = list(args)
        values[place] = values[place] + first
        values[-1] = keys[values[-1]]
        return mod(*values)

    return counted


def kept_weights(problem: Problem, part: Segment) -> Tensor:
    """Which weights dropout keeps, as flexhop publishes it."""
    plan, shape = problem.plan, problem.plan.shape
    if not plan.queries:
        size = (part.query.size(0), shape.heads, part.query.size(2), part.key.size(2))
        return flexhop.dropout_mask(problem.seed, plan.dropout, size)
    whole = (1, shape.heads, sum(plan.queries), sum(plan.key_lengths))
    kept = flexhop.dropout_mask(problem.seed, plan.dropout, whole)
    return kept[:, :, part.rows, part.keys]


def log_add(lse: Tensor, sink: Tensor) -> Tensor:
    """torch.logaddexp, whose second derivatives are NaN if one number is -3.4e38."""
    largest = torch.maximum(lse, sink).detach()
    return largest + torch.log(torch.exp(lse - largest) + torch.exp(sink - largest))


def _add_sinks(out: Tensor, lse: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    if sinks is None:
        return out, lse
    sink = sinks.to(lse.dtype)[:, None]
    total = log_add(lse, sink)
    return (out * torch.exp(lse - total)[..., None].to(lse.dtype)).to(out.dtype), total


def _joined(
    problem: Problem,
    parts: list[Segment],
    dense: list[Dense],
    results: list[tuple[Tensor, Tensor]],
) -> Parts:
    """The results in the shape in which the call gives them."""
    plan = problem.plan
    empty = [~d.seen.any(-1) for d in dense]
    found = {
        "out": [out for out, _ in results], "lse": [lse for _, lse in results],
        "max_scores": [d.largest for d in dense], "unseen_out": empty,
    }  # fmt: skip
    if not plan.queries:
        joined = {name: values[0] for name, values in found.items()}
    else:
        joined = {n: torch.cat([t[0].transpose(0, 1) for t in ts]) for n, ts in found.items()}
    return joined | {"unseen_grad_q": joined["unseen_out"]}


def _loss(problem: Problem, out: Tensor, lse: Tensor | None) -> Tensor:
    """The scalar that is differentiated."""
    total = (out * problem.grad_out.to(out.dtype)).sum()
    if problem.plan.lse and lse is not None:
        total = total + (lse * problem.grad_lse.to(lse.dtype))[lse.detach().isfinite()].sum()
    return total


def loss_of(problem: Problem) -> Callable[[Any], Tensor]:
    """The same of what the call returns."""

    def loss(result: Any) -> Tensor:
        out, aux = result if isinstance(result, tuple) else (result, None)
        return _loss(problem, out, None if aux is None else aux.lse)

    return loss
