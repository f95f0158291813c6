"""What the Hopper backward kernel reads of queries, and the zeros that it adds to.

All of it comes from one kernel of Inductor: for short sequences, each launch counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from flexhop.compat.kernels import gluon, inductor
from flexhop.compat.kernels.pointwise import beside, product
from flexhop.lowering.hopper import backward, schedule
from flexhop.lowering.operands import first_part_of_lse, rest_of_lse
from flexhop.lowering.portable import kernels
from flexhop.lowering.problem import Problem

aten = torch.ops.aten
INF = float("inf")
# More rows of padding would cost the gradient of query more memory than a launch is worth.
_MOST_ROWS = 128


class Prepared(NamedTuple):
    """Tensors computed and cleared before the kernel.

    lse: in base 2, or in the unit of scores if these may be large. rest: in base 2, what fp32
    leaves of it; lse itself if it cannot be large. counter: zeros, of which the kernel uses the
    first ones. grad_query: zeros in fp32, perhaps with more rows than there are queries; if
    programs own heads, memory for each program, [programs, heads per key head, M, D], not cleared.
    """

    lse: Any
    rest: Any
    delta: Any
    counter: Any
    grad_query: Any


class Sizes(NamedTuple):
    """Sizes of these tensors. statistic: of lse, delta and counter."""

    statistic: list[Any]
    grad_query: list[Any]


def prepared_sizes(problem: Problem, query: Any) -> Sizes:
    """Sizes of the tensors that the backward graph computes before the kernel."""
    batch, heads, length, width = query.get_size()
    rows = length + gluon.fill_up(length, _block_rows(problem))
    statistic = [batch, heads, rows]
    if schedule.owns_heads(problem):
        programs = problem.device.multiprocessors
        return Sizes(statistic, [programs, problem.group, length, width])
    return Sizes(statistic, [batch, heads, rows if _clears_rows(problem) else length, width])


def _block_rows(problem: Problem) -> int:
    """The statistics of queries are padded to a multiple of this many rows."""
    tile = backward.table_tile(problem)
    return tile.block_m if problem.blocks is None else problem.blocks.q_size


def _clears_rows(problem: Problem) -> bool:
    """Whether the kernel that reads the rows of out also clears the gradient of query."""
    is_square = problem.head_dim == problem.value_head_dim and not schedule.owns_heads(problem)
    return is_square and _block_rows(problem) <= _MOST_ROWS


def prepare(problem: Problem, args: Any) -> Prepared:
    """Compute lse and delta, [B, Hq, M rounded up to whole blocks], and clear the rest.

    delta = rowsum(out * grad_out) - grad_lse. Queries that see nothing, and padding rows, have an
    lse of +inf, which makes their weights 0; padding rows have a delta of 0.
    """
    call, query = inductor.call_lowering, args.query
    length, rows = query.get_size()[2], _block_rows(problem)
    sizes = prepared_sizes(problem, query)
    missing = gluon.fill_up(length, rows)
    weighted = product(args.out, args.grad_out)
    lse, grad_lse = first_part_of_lse(args), args.grad_lse
    rest = rest_of_lse(args) if problem.has_large_lse else None
    # Padded before the sum, so that one reduction gives statistics and padding.
    if not inductor.is_multiple(length, rows):
        weighted = call(aten.constant_pad_nd.default, weighted, [0, 0, 0, missing], 0.0)
        lse = call(aten.constant_pad_nd.default, lse, [0, missing], -INF)
        if rest is not None:
            rest = call(aten.constant_pad_nd.default, rest, [0, missing], 0.0)
        if grad_lse is not None:
            grad_lse = call(aten.constant_pad_nd.default, grad_lse, [0, missing], 0.0)
    delta = call(aten.sum.dim_IntList, weighted, [-1])
    if grad_lse is not None:
        delta = call(aten.sub.Tensor, delta, grad_lse)
    delta = inductor.contiguous(delta)
    counter = _zeros(sizes.statistic, torch.int32, query)
    if schedule.owns_heads(problem):
        device = inductor.device_of(query)
        grad_query = inductor.empty(sizes.grad_query, None, torch.float32, device)
    else:
        grad_query = _zeros(sizes.grad_query, torch.float32, query)
    if _clears_rows(problem):
        grad_query = beside(grad_query, weighted)
    factor = kernels.LOG2_E if rest is None else 1.0
    lse = inductor.contiguous(beside(_shift(lse, factor), delta))
    if rest is not None:
        rest = beside(call(aten.mul.Tensor, rest, kernels.LOG2_E), delta)
    others = (lse if rest is None else rest, delta, beside(counter, delta), grad_query)
    return Prepared(lse, *map(inductor.contiguous, others))


def _zeros(size: Sequence[Any], dtype: torch.dtype, query: Any) -> Any:
    device = inductor.device_of(query)
    return inductor.call_lowering(aten.full.default, list(size), 0, dtype=dtype, device=device)


def _shift(lse: Any, factor: float) -> Any:
    """lse times a factor; +inf for rows that saw nothing."""
    call = inductor.call_lowering
    scaled = call(aten.mul.Tensor, lse, factor)
    return call(aten.where.self, call(aten.eq.Scalar, lse, -INF), INF, scaled)


def drop_padding(grad_query: Any, length: Any) -> Any:
    """The rows of a gradient that belong to queries."""
    return inductor.call_lowering(aten.slice.Tensor, grad_query, 2, 0, length)
