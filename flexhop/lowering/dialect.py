"""The decision: the portable kernels, or those that are made for this GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

from flexhop.compat import gluon_versions
from flexhop.errors import OptionConflictError
from flexhop.lowering.hopper import backward as hopper_grad
from flexhop.lowering.hopper import forward as hopper
from flexhop.lowering.problem import Problem
from flexhop.options import KernelOptions

Name = Literal["triton", "hopper"]


class Dialect(NamedTuple):
    """Which of the kernels. reason: why not the Hopper kernel; empty if it is."""

    name: Name
    reason: str


def choose_dialect(problem: Problem, options: KernelOptions) -> Dialect:
    """The dialect of the forward kernel.

    Raises:
        OptionConflictError: the asked one cannot serve the call.
    """
    if options.backend == "triton":
        return Dialect("triton", "kernel_options say 'triton'")
    reason = _first(hopper.obstacles(problem, options))
    if reason and options.backend == "hopper":
        raise OptionConflictError(first="backend='hopper'", second="this call", reason=reason)
    if not reason and options.backend == "auto":
        reason = next(hopper.slower(problem), "")
    return Dialect("triton", reason) if reason else Dialect("hopper", "")


def choose_grad_dialect(problem: Problem, options: KernelOptions) -> Dialect:
    """The dialect of the backward kernels.

    backend="hopper" demands the forward kernel; its gradients come from the Hopper kernel wherever
    that serves, also where it is likely to be slower.
    """
    if options.backend == "triton":
        return Dialect("triton", "kernel_options say 'triton'")
    reason = _first(hopper_grad.obstacles(problem, options))
    if not reason and options.backend == "auto":
        reason = next(hopper_grad.slower(problem), "")
    return Dialect("triton", reason) if reason else Dialect("hopper", "")


def _first(obstacles: Iterator[str]) -> str:
    return next(obstacles, "") or gluon_versions.obstacle()
