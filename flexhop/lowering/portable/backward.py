"""The portable backward kernels: one for query, one or two for key and value."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx

from flexhop.compat.kernels import inductor
from flexhop.compat.kernels.pointwise import beside, product
from flexhop.lowering.emission.kernel import Captured, KernelCall, empty_like, output_like
from flexhop.lowering.operands import block_inputs, both_parts_of_lse, first_part_of_lse
from flexhop.lowering.plan import KernelPlan
from flexhop.lowering.portable import kernels
from flexhop.lowering.portable.emit import begin_kernel, emit_kernel
from flexhop.lowering.portable.forward import NO_TILE
from flexhop.lowering.portable.plan import plan_kernel
from flexhop.lowering.portable.rules import (
    backward_kernels,
    has_few_keys,
    key_value_kernels,
)
from flexhop.lowering.portable.shared import is_float32, weighing
from flexhop.lowering.problem import Problem
from flexhop.ops.args import AttentionArgs, BackwardArgs
from flexhop.options import KernelOptions

aten = torch.ops.aten


class _Gradients:
    """See lowering/dialect.py."""

    def obstacles(self, problem: Problem, options: KernelOptions) -> Iterator[str]:
        """Why they do not support a call."""
        launched = backward_kernels(problem, options)
        if not all(kernels.has_tile(kernel, problem) for kernel in launched):
            yield NO_TILE

    def slower(self, problem: Problem, options: KernelOptions) -> Iterator[str]:
        """No dialect comes later."""
        del problem, options
        return iter(())

    def plans(
        self, problem: Problem, options: KernelOptions, passed: str
    ) -> tuple[KernelPlan, ...]:
        """The plans of the kernel for query, then of those for key and value."""
        launched = backward_kernels(problem, options)
        return tuple(plan_kernel(kernel, problem, options, passed) for kernel in launched)

    def emit(
        self, call: KernelCall, args: BackwardArgs, joint: Sequence[Any], captured: Captured
    ) -> tuple[Any, Any, Any]:
        """The gradients of query, key and value."""
        query: Any = args.query
        delta = _delta(args)
        lse = _lse(call.problem, args, delta)
        operands = (query, args.key, args.value, lse, delta, args.grad_out)
        if has_few_keys(call.problem, call.options):
            lists = block_inputs(args, "q", delta, query)
            return _emit_together(call, operands, lists, joint, captured)
        inputs = [*operands, *block_inputs(args, "kv", delta, query)]
        of_queries, of_keys = _by_owner(call.problem, captured)
        output = output_like(query, 0, of_queries.sums)
        finish_query = begin_kernel(call, "grad_query", inputs, output, joint, of_queries.sites)
        lists = block_inputs(args, "q", delta, query)
        finish_keys = _begin_key_value(call, operands, lists, joint, of_keys)
        # Both are compiling by now, if either may spill.
        return finish_query(), *finish_keys()

    def start(self, call: KernelCall, args: AttentionArgs, joint: fx.GraphModule) -> None:
        """Does nothing: these kernels are compiled with the backward graph."""


GRADIENTS = _Gradients()


def _by_owner(problem: Problem, captured: Captured) -> tuple[Captured, Captured]:
    """What the kernels for query, and those for key and value, add to captured gradients.

    A program owns queries, or keys. What all scores of such a row add to, it sums in registers.
    Kernels of heads in pieces have none to spare, nor has any for the elements of a long row.
    """
    if problem.is_wide:
        return captured, Captured((), ())
    sums = captured.sums
    dtype = "tl.float64" if is_float32(problem) else "tl.float32"
    by_query, by_key = [], []
    for site in captured.sites:
        is_of_pairs = site.uses_q_idx and site.uses_kv_idx
        if not is_of_pairs and site.loop is None:
            site = site._replace(kept=dtype)
        (by_query if is_of_pairs or not site.uses_kv_idx else by_key).append(site)
    return Captured(sums if by_query else (), by_query), Captured(sums if by_key else (), by_key)


def _emit_together(
    call: KernelCall, operands: tuple[Any, ...], lists: list[Any], joint: Sequence[Any],
    captured: Captured,
) -> tuple[Any, Any, Any]:  # fmt: skip
    """The gradients of query, key and value, by one kernel whose programs have all keys of a head.

    Sums over the scores of a key stay in registers, as where programs own keys.
    """
    query, key, value, *_ = operands
    by_pairs, by_keys = _by_owner(call.problem, captured)
    sites = [*by_pairs.sites, *by_keys.sites]
    grad_query, grad_value = empty_like(query, 0), empty_like(value, 2)
    inputs = [*operands, grad_value, grad_query, *lists]
    output = output_like(key, 1, [grad_value, grad_query, *captured.sums])
    grad_key = emit_kernel(call, "gradients", inputs, output, joint, sites)
    return grad_query, grad_key, grad_value


def _begin_key_value(
    call: KernelCall,
    operands: tuple[Any, ...],
    lists: list[Any],
    joint: Sequence[Any],
    captured: Captured,
) -> Callable[[], tuple[Any, Any]]:
    """Gradients of key and value, by one launch or two, the first of which adds to `captured`.

    Returns what finishes them.
    """
    own = joint if captured.sites else joint[:1]
    _, key, value, *_ = operands
    if len(key_value_kernels(call.problem)) == 1:
        grad_value = empty_like(value, 2)
        inputs = [*operands, grad_value, operands[0], *lists]
        output = output_like(key, 1, [grad_value, *captured.sums])
        finish_key = begin_kernel(call, "grad_key_value", inputs, output, own, captured.sites)
        return lambda: (finish_key(), grad_value)
    # DV and DQ are not written: others stand in. Kernels of heads in pieces have none.
    stand_in = [] if call.problem.is_wide else [value, operands[0]]
    inputs = [*operands, *stand_in, *lists]
    output = output_like(key, 1, captured.sums)
    finish_key = begin_kernel(call, "grad_key", inputs, output, own, captured.sites)
    finish_value = begin_kernel(call, "grad_value", inputs, output_like(value, 2), joint[:1])
    return lambda: (finish_key(), finish_value())


def _lse(problem: Problem, args: BackwardArgs, delta: Any) -> Any:
    """Lse as kernels load it (lse.py.jinja), by the kernel that computes `delta`.

    Kernels load it again for every tile. To take a wide one apart (ops/wide_lse.py), each would
    convert to and from fp64 and divide, which took longer than the rest of a tile of 32 columns.
    """
    if not problem.is_lse_wide:
        return inductor.contiguous(args.lse)
    is_fused = weighing(problem) == "fused"
    lse = first_part_of_lse(args) if is_fused else both_parts_of_lse(args)
    return inductor.contiguous(beside(lse, delta))


def _delta(args: BackwardArgs) -> Any:
    """rowsum(out * grad_out) - grad_lse, fused by Inductor into one reduction."""
    weighted = product(args.out, args.grad_out)
    delta = inductor.call_lowering(aten.sum.dim_IntList, weighted, [-1])
    if args.grad_lse is not None:
        delta = inductor.call_lowering(aten.sub.Tensor, delta, args.grad_lse)
    return inductor.contiguous(delta)
