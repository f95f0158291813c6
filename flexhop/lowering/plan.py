"""What was decided for one kernel, and why, in words: for `flexhop.explain` and FLEXHOP_DEBUG."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, Protocol

from flexhop import debug

# What a kernel computes: "grad_key_value" or "grad_key" and "grad_value" beside "grad_query", or
# "backward", which is all of them; "jvp_forward" pushes tangents as well, and
# "jvp_grad_*" are tangents of gradients.
Role = Literal[
    "forward",
    "decode",
    "jvp_forward",
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
    """What one program of a kernel holds; every dialect has its own."""

    def words(self) -> str:
        """For reports."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class KernelPlan:
    """One kernel of one call.

    Args:
        kernel: what it computes.
        tile: what one program does at a time.
        reason: where the tile comes from.
        shared_memory: estimated upper bound, in bytes, of what one program asks for.
        programs: how many programs are launched.
        constants: what the template is specialised on.
        notes: what else `flexhop.explain` says about the kernel, one sentence each.
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
    """Print the plan of a kernel if FLEXHOP_DEBUG asks for kernels; only then it is made."""
    debug.show("kernel", kernel, lambda: str(plan()))
