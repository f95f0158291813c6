"""The portable kernels by name, and which of them compute and add gradients."""

from __future__ import annotations

from typing import Literal

from flexhop.lowering.problem import Problem

Kernel = Literal[
    "forward", "decode", "jvp_forward", "grad_query", "grad_key_value", "grad_key", "grad_value",
    "jvp_grad_query", "jvp_grad_key", "jvp_grad_value",
]  # fmt: skip


def key_value_kernels(problem: Problem) -> tuple[Kernel, ...]:
    """One kernel for the gradients of key and value, or one for each.

    At 256 columns, two fp32 accumulators of 128 keys take all of a multiprocessor's registers. Two
    kernels compute five products instead of four, but on tiles of 128 keys.
    """
    is_large = max(problem.head_dim, problem.value_head_dim) > 128 and problem.itemsize == 2
    if is_large or problem.is_wide:
        return ("grad_key", "grad_value")
    return ("grad_key_value",)


def adders(problem: Problem) -> tuple[Kernel, ...]:
    """The kernels that add to gradients of captured tensors; see portable/backward.py."""
    reads = set(problem.grad.captured_reads)
    of_keys = key_value_kernels(problem)[:1] if "key" in reads and not problem.is_wide else ()
    others = reads if problem.is_wide else reads - {"key"}
    return (*(("grad_query",) if others else ()), *of_keys)
