"""Dialects: families of kernels, each in its own folder, and the choice between them.

flexhop/options/__init__.py has the registry. It lists the dialects in order of preference, with
the package of each. The last one supports every GPU and almost every call.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import Any, Literal, NamedTuple, Protocol

from torch import fx

from flexhop import options as registry
from flexhop.errors import OptionConflictError
from flexhop.lowering.emission.kernel import Captured, KernelCall, Output
from flexhop.lowering.plan import KernelPlan
from flexhop.lowering.problem import Device, Problem
from flexhop.ops.args import AttentionArgs, BackwardArgs, CachedArgs
from flexhop.options import KernelOptions

Direction = Literal["forward", "backward"]


class Kernels(Protocol):
    """The kernels of one direction: pure functions of the facts of a call."""

    def obstacles(self, problem: Problem, options: KernelOptions) -> Iterator[str]:
        """Why they do not support a call, most general reason first; empty if they do."""
        ...

    def slower(self, problem: Problem, options: KernelOptions) -> Iterator[str]:
        """Why a later dialect is probably faster; consulted only if the user leaves the choice
        open."""
        ...

    def plans(
        self, problem: Problem, options: KernelOptions, passed: str
    ) -> tuple[KernelPlan, ...]:
        """Describe the kernels: tiles, constants, programs.

        Args:
            problem: the call's problem.
            options: the user's options.
            passed: text to append to a tile's reason: why no earlier dialect was chosen.

        Raises:
            TileError, TileResourceError: a tile from the user does not fit.
        """
        ...


class ForwardKernels(Kernels, Protocol):
    """The kernels that compute the output."""

    def emit(self, call: KernelCall, args: AttentionArgs | CachedArgs, output: Output) -> Any:
        """Emit them.

        Args:
            call: data that all kernels of the call share.
            args: operands with storage.
            output: the result; `written` is lse, and max_scores if they are asked for.

        Returns:
            The output, or None if the machine code turns out to be slow: the next dialect takes
            the call.
        """
        ...


class BackwardKernels(Kernels, Protocol):
    """The kernels that compute gradients."""

    def emit(
        self, call: KernelCall, args: BackwardArgs, joint: Sequence[Any], captured: Captured
    ) -> tuple[Any, Any, Any] | None:
        """Emit them.

        Args:
            call: data that all kernels of the call share.
            args: operands; query, key, value and grad_out have storage.
            joint: the lowered joint graph: its first output, and for sites the others.
            captured: where to add gradients of captured tensors, and which values.

        Returns:
            Gradients of query, key and value, or None as in ForwardKernels.emit.
        """
        ...

    def start(self, call: KernelCall, args: AttentionArgs, joint: fx.GraphModule) -> None:
        """Start compiling them while the forward pass is lowered, if that pays off."""
        ...


class Dialect(Protocol):
    """A family of kernels.

    name: its name in `KernelOptions.backend`. title: its name in reports. architectures: the
    compute capabilities that it supports; None for all.
    """

    name: str
    title: str
    architectures: tuple[tuple[int, int], ...] | None
    forward: ForwardKernels
    backward: BackwardKernels

    def expect(self) -> None:
        """Prepare to compile kernels; called while a graph for such a GPU is traced."""
        ...


class Passed(NamedTuple):
    """A dialect that was passed over, and why."""

    dialect: Dialect
    reason: str


class Choice(NamedTuple):
    """The chosen dialect, and the preferred ones that were passed over."""

    dialect: Dialect
    passed: tuple[Passed, ...]

    def words(self, device: Device) -> str:
        """Why no preferred dialect for this GPU was chosen, to append to a tile's reason."""
        reasons = [
            f"; not the {dialect.title}: {reason}"
            for dialect, reason in self.passed
            if is_made_for(dialect, device)
        ]
        return "".join(reasons)


@functools.cache
def _load(package: str) -> Dialect:
    return import_module(package).DIALECT


def dialects() -> tuple[Dialect, ...]:
    """All dialects, the preferred one first."""
    return tuple(map(_load, registry.DIALECTS.values()))


def is_made_for(dialect: Dialect, device: Device) -> bool:
    """Whether a dialect has kernels for a GPU."""
    return dialect.architectures is None or device.capability in dialect.architectures


def candidates(direction: Direction, problem: Problem, options: KernelOptions) -> Iterator[Choice]:
    """Dialects that support a call, best first; use the next one if one fails to emit.

    backend="name" requires that dialect for the forward kernel. Gradients use it if it supports
    them, and the last dialect otherwise.

    Raises:
        OptionConflictError: the requested dialect does not support the call.
    """
    passed: list[Passed] = []
    for dialect in dialects():
        is_last = dialect is dialects()[-1]
        reason = _reason_against(dialect, direction, problem, options, is_last=is_last)
        if not reason:
            yield Choice(dialect, tuple(passed))
            # Whoever asks for another candidate has rejected the machine code of this one.
            reason = "it spills registers"
        elif direction == "forward" and options.backend == dialect.name and not is_last:
            raise OptionConflictError(
                first=f"backend={dialect.name!r}", second="this call", reason=reason
            )
        passed.append(Passed(dialect, reason))


def _reason_against(
    dialect: Dialect,
    direction: Direction,
    problem: Problem,
    options: KernelOptions,
    *,
    is_last: bool,
) -> str:
    """Why a dialect is not chosen for a call; empty if it is."""
    if options.backend not in ("auto", dialect.name) and not is_last:
        return f"kernel_options select backend {options.backend!r}"
    if not is_made_for(dialect, problem.device):
        made_for = " and ".join(map(_architecture, dialect.architectures or ()))
        gpu = _architecture(problem.device.capability)
        return f"it supports {made_for}, and the GPU is {gpu}"
    kernels: Kernels = dialect.forward if direction == "forward" else dialect.backward
    reason = next(kernels.obstacles(problem, options), "")
    if not reason and options.backend == "auto":
        reason = next(kernels.slower(problem, options), "")
    return reason


def _architecture(capability: tuple[int, int]) -> str:
    return f"sm_{capability[0]}{capability[1]}"


def plan(direction: Direction, problem: Problem, options: KernelOptions) -> tuple[KernelPlan, ...]:
    """Describe a call's kernels; empty if it runs without one.

    Raises:
        OptionConflictError: see `candidates`.
        TileError, TileResourceError: see `Kernels.plans`.
    """
    for choice in candidates(direction, problem, options):
        dialect = choice.dialect
        kernels: Kernels = dialect.forward if direction == "forward" else dialect.backward
        return kernels.plans(problem, options, choice.words(problem.device))
    return ()
