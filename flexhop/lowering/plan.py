"""The choices made for one kernel, with reasons: for `flexhop.explain` and FLEXHOP_DEBUG."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, Protocol

from flexhop.options import debug

# Kernel names: "grad_query" comes with "grad_key_value", or with "grad_key" and "grad_value".
# "backward" and "gradients" (few keys) compute all of them. "jvp_forward" also pushes tangents,
# and "jvp_grad_*" are tangents of gradients.
Role = Literal[
    "forward",
    "decode",
    "jvp_forward",
    "gradients",
    "grad_query",
    "grad_key_value",
    "grad_key",
    "grad_value",
    "jvp_grad_query",
    "jvp_grad_key",
    "jvp_grad_value",
    "backward",
]


class AnyTile(Protocol):
    """What one program of a kernel holds; each dialect has its own type."""

    def words(self) -> str:
        """For reports."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class KernelPlan:
    """One kernel of one call.

    Args:
        kernel: name of the kernel.
        tile: what one program processes at a time.
        reason: why this tile.
        shared_memory: estimated upper bound, in bytes per program.
        programs: number of programs launched.
        constants: constants of the template.
        notes: further notes for `flexhop.explain`, one sentence each.
    """

    kernel: Role
    tile: AnyTile
    reason: str
    shared_memory: int
    programs: int
    constants: dict[str, Any]
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [
            f"tile: {self.tile.words()}",
            f"reason: {self.reason}",
            f"shared memory: about {self.shared_memory} bytes",
            f"programs: {self.programs}",
            *(f"{name} = {value}" for name, value in self.constants.items()),
        ]
        return "\n".join(lines)


def show_plan(kernel: Role, plan: Callable[[], KernelPlan]) -> None:
    """Print a kernel's plan if FLEXHOP_DEBUG requests kernels; only then is it created."""
    debug.show("kernel", kernel, lambda: str(plan()))
