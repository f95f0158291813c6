"""The portable backward kernels: one for query, one or two for key and value."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx

from flexhop.compat.kernels import inductor
from flexhop.lowering.emission.kernel import Captured, KernelCall, output_like
from flexhop.lowering.operands import block_inputs
from flexhop.lowering.plan import KernelPlan
from flexhop.lowering.portable import kernels
from flexhop.lowering.portable.emit import emit_kernel
from flexhop.lowering.portable.forward import NO_TILE
from flexhop.lowering.portable.names import Kernel
from flexhop.lowering.portable.plan import plan_kernel
from flexhop.lowering.problem import Problem
from flexhop.lowering.products import product
from flexhop.ops.args import AttentionArgs, BackwardArgs
from flexhop.options import KernelOptions

aten = torch.ops.aten


class _Gradients:
    """See lowering/dialect.py."""

    def obstacles(self, problem: Problem, options: KernelOptions) -> Iterator[str]:
        """Why they do not support a call."""
        del options
        if not all(kernels.has_tile(kernel, problem) for kernel in _launched(problem)):
            yield NO_TILE

    def slower(self, problem: Problem, options: KernelOptions) -> Iterator[str]:
        """No dialect comes later."""
        del problem, options
        return iter(())

    def plans(
        self, problem: Problem, options: KernelOptions, passed: str
    ) -> tuple[KernelPlan, ...]:
        """The plans of the kernel for query, then of those for key and value."""
        launched = _launched(problem)
        return tuple(plan_kernel(kernel, problem, options, passed) for kernel in launched)

    def emit(
        self, call: KernelCall, args: BackwardArgs, joint: Sequence[Any], captured: Captured
    ) -> tuple[Any, Any, Any]:
        """The gradients of query, key and value."""
        query: Any = args.query
        delta = _delta(args)
        lse = inductor.contiguous(args.lse)
        operands = (query, args.key, args.value, lse, delta, args.grad_out)
        inputs = [*operands, *block_inputs(args, "kv", delta, query)]
        output = output_like(query, 0, captured.sums)
        grad_query = emit_kernel(call, "grad_query", inputs, output, joint, captured.sites)
        lists = block_inputs(args, "q", delta, query)
        grad_key, grad_value = _emit_key_value(call, operands, lists, joint[:1])
        return grad_query, grad_key, grad_value

    def start(self, call: KernelCall, args: AttentionArgs, joint: fx.GraphModule) -> None:
        """Does nothing: these kernels are compiled with the backward graph."""


GRADIENTS = _Gradients()


def _launched(problem: Problem) -> tuple[Kernel, ...]:
    return ("grad_query", *kernels.key_value_kernels(problem))


def _emit_key_value(
    call: KernelCall, operands: tuple[Any, ...], lists: list[Any], joint: Sequence[Any]
) -> tuple[Any, Any]:
    """Gradients of key and value, by one launch or two."""
    _, key, value, *_ = operands
    if len(kernels.key_value_kernels(call.problem)) == 1:
        strides = output_like(value, 2).layout.stride
        grad_value = inductor.empty(
            value.get_size(), strides, value.get_dtype(), value.get_device()
        )
        inputs = [*operands, grad_value, *lists]
        output = output_like(key, 1, [grad_value])
        return emit_kernel(call, "grad_key_value", inputs, output, joint), grad_value
    # DV is not written: value is a stand-in. Kernels of heads in pieces have none.
    stand_in = [] if call.problem.is_wide else [value]
    inputs = [*operands, *stand_in, *lists]
    grad_key = emit_kernel(call, "grad_key", inputs, output_like(key, 1), joint)
    return grad_key, emit_kernel(call, "grad_value", inputs, output_like(value, 2), joint)


def _delta(args: BackwardArgs) -> Any:
    """rowsum(out * grad_out) - grad_lse, fused by Inductor into one reduction."""
    weighted = product(args.out, args.grad_out)
    delta = inductor.call_lowering(aten.sum.dim_IntList, weighted, [-1])
    if args.grad_lse is not None:
        delta = inductor.call_lowering(aten.sub.Tensor, delta, args.grad_lse)
    return inductor.contiguous(delta)
