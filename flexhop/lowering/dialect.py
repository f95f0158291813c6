"""The decision: the portable forward kernel, or the one that is made for this GPU."""

from __future__ import annotations

from typing import Literal, NamedTuple

from flexhop.compat import gluon_versions
from flexhop.errors import OptionConflictError
from flexhop.lowering import hopper
from flexhop.lowering.problem import Problem
from flexhop.options import KernelOptions

Name = Literal["triton", "hopper"]


class Dialect(NamedTuple):
    """Which of the forward kernels. reason: why not the Hopper kernel; empty if it is."""

    name: Name
    reason: str


def choose_dialect(problem: Problem, options: KernelOptions) -> Dialect:
    """The dialect of the forward kernel.

    Raises:
        OptionConflictError: the asked one cannot serve the call.
    """
    if options.backend == "triton":
        return Dialect("triton", "kernel_options say 'triton'")
    reason = next(iter(_obstacles(problem, options)), "")
    if reason and options.backend == "hopper":
        raise OptionConflictError(first="backend='hopper'", second="this call", reason=reason)
    return Dialect("triton", reason) if reason else Dialect("hopper", "")


def _obstacles(problem: Problem, options: KernelOptions) -> list[str]:
    versions = gluon_versions.obstacle()
    return [*hopper.obstacles(problem, options), *([versions] if versions else [])]
