"""What the makers of instructions share."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from flexhop.offline.ptx.order import Pending, finish_groups, read_groups
from flexhop.offline.ptx.parse import Address, Instruction, Operand, Register, Vector
from flexhop.offline.ptx.state import Threads

if TYPE_CHECKING:
    from flexhop.offline.ptx.machine import Machine

__all__ = [
    "Found", "Maker", "addresses_of", "by_warps", "concerns_groups", "ends_group", "parts_of",
    "simple", "space_of", "unsigned",
]  # fmt: skip


# What runs an instruction for threads; or what it does to their group; and of which unit, a "warp"
# or a "warpgroup", all threads must be there.
Found = tuple[Callable[[Threads], None] | None, Callable[..., Any] | None, str]
Maker = Callable[[Instruction, "Machine"], Found]


def simple(run: Callable[[Threads], None]) -> Found:
    """An instruction that each thread executes by itself."""
    return run, None, ""


def by_warps(run: Callable[[Threads], None], unit: str = "warp") -> Found:
    """An instruction that all threads of a unit execute together."""
    return run, None, unit


def concerns_groups(choose: Callable[..., Any], unit: str = "") -> Found:
    """An instruction after which threads go on elsewhere, or later."""
    return None, choose, unit


def unsigned(operand: Operand) -> str:
    """The type of a whole register, as a number."""
    return "u32" if isinstance(operand, Register) and operand.kind == "32" else "u64"


def addresses_of(operand: Operand, machine: Machine) -> Callable[[Threads], np.ndarray]:
    """A function of threads that gives addresses [threads], or [1] if all are the same."""
    assert isinstance(operand, Address), operand
    offset = operand.offset
    read = machine.registers.reader(operand.base, unsigned(operand.base))
    return lambda threads: np.atleast_1d(read(threads)).astype(np.int64) + offset


def parts_of(operand: Operand) -> tuple[Operand, ...]:
    """The parts of a vector, or the operand alone."""
    return operand.parts if isinstance(operand, Vector) else (operand,)


def ends_group(
    instruction: Instruction, machine: Machine, begun: dict[int, list[list[Pending]]], size: int
) -> Callable[[Threads], None]:
    """commit_group, or wait_group for all but the last few groups.

    begun: what every `size` threads have begun, by their number.
    """
    numbers, operands = machine.registers.threads, instruction.operands
    kept = operands[0] if operands else 0
    assert isinstance(kept, int)

    def run(threads: Threads) -> None:
        for owner in np.unique(numbers[threads] // size).tolist():
            if owner not in begun:
                continue
            if "commit_group" in instruction.opcode:
                begun[owner].append([])
            else:
                is_read = instruction.opcode.endswith(".read")
                ended = (read_groups if is_read else finish_groups)(begun[owner], kept)
                if machine.races is not None:
                    for pending in ended:
                        machine.races.finish(pending.ops)

    return run


def space_of(opcode: str) -> str:
    """The memory that an opcode names, or ""."""
    for part in opcode.replace("::", ".").split("."):
        if part in ("global", "shared", "local", "param"):
            return part
    return ""
