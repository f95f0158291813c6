"""The portable forward kernels: one for usual queries, one for short ones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from flexhop.lowering.emission.kernel import KernelCall, Output
from flexhop.lowering.operands import block_inputs
from flexhop.lowering.plan import KernelPlan
from flexhop.lowering.portable import decode, kernels
from flexhop.lowering.portable.emit import emit_kernel
from flexhop.lowering.portable.plan import plan_kernel
from flexhop.lowering.problem import Problem
from flexhop.ops.args import AttentionArgs, CachedArgs
from flexhop.options import KernelOptions

NO_TILE = "its smallest tile does not fit the GPU's shared memory"


class _Attention:
    """See lowering/dialect.py."""

    def obstacles(self, problem: Problem, options: KernelOptions) -> Iterator[str]:
        """Raises OptionConflictError if decode is requested with too many rows."""
        if not kernels.has_tile(kernels.forward_kernel(problem, options), problem):
            yield NO_TILE

    def slower(self, problem: Problem, options: KernelOptions) -> Iterator[str]:
        """No dialect comes later."""
        del problem, options
        return iter(())

    def plans(
        self, problem: Problem, options: KernelOptions, passed: str
    ) -> tuple[KernelPlan, ...]:
        """The plan of the kernel, without the one that combines splits."""
        kernel = kernels.forward_kernel(problem, options)
        return (plan_kernel(kernel, problem, options, passed),)

    def emit(self, call: KernelCall, args: AttentionArgs | CachedArgs, output: Output) -> Any:
        """The output."""
        lse, max_scores = output.written[0], output.written[-1]
        lists = block_inputs(args, "kv", lse, args.query)
        if kernels.forward_kernel(call.problem, call.options) == "decode":
            return decode.emit_decode(call, args, lists, output)
        operands = (args.query, args.key, args.value)
        return emit_kernel(call, "forward", [*operands, lse, max_scores, *lists], output)


ATTENTION = _Attention()
