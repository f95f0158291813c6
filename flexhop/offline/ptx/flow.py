"""Branches, barriers, and what lanes of a warp tell each other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from flexhop.offline.ptx.common import Found, Maker, by_warps, concerns_groups, simple
from flexhop.offline.ptx.memory import combine
from flexhop.offline.ptx.parse import Instruction, Symbol
from flexhop.offline.ptx.state import Threads, widths

if TYPE_CHECKING:
    from flexhop.offline.ptx.groups import Group
    from flexhop.offline.ptx.machine import Machine

__all__ = ["MAKERS"]


def _branch(instruction: Instruction, machine: Machine) -> Found:
    (label,) = instruction.operands
    assert isinstance(label, Symbol)
    goal = machine.program.labels[label.name]

    def choose(group: Group, active: Threads) -> Any:
        if active is group.threads:
            return goal
        rest = np.setdiff1d(group.numbers, active, assume_unique=True)
        return machine.split(group, [(active, goal), (rest, group.place + 1)])

    return concerns_groups(choose)


def _indexed_branch(instruction: Instruction, machine: Machine) -> Found:
    index, table = instruction.operands
    assert isinstance(table, Symbol)
    goals = np.array([machine.program.labels[name] for name in machine.program.tables[table.name]])
    read = machine.registers.reader(index, "u32")

    def choose(group: Group, active: Threads) -> Any:
        numbers = machine.registers.threads[active]
        goal = goals[np.broadcast_to(read(active), numbers.shape)]
        if (goal == goal[0]).all():
            return int(goal[0])
        return machine.split(group, [(numbers[goal == one], int(one)) for one in np.unique(goal)])

    return concerns_groups(choose)


def _end(instruction: Instruction, machine: Machine) -> Found:
    def choose(group: Group, active: Threads) -> Any:
        rest = np.setdiff1d(group.numbers, machine.registers.threads[active], assume_unique=True)
        return machine.split(group, [(rest, group.place + 1)])

    return concerns_groups(choose)


def _fail(instruction: Instruction, machine: Machine) -> Found:
    """A call of the function that assertions call, or a trap."""

    def run(threads: Threads) -> None:
        raise AssertionError("an assertion of the kernel failed, such as an index out of bounds")

    return simple(run)


def _barrier(instruction: Instruction, machine: Machine) -> Found:
    """bar.sync and barrier.sync; a barrier of a warp is where its threads meet."""
    if instruction.opcode.startswith("bar.warp"):
        return by_warps(lambda threads: None)
    if not instruction.opcode.startswith(("bar.sync", "barrier.sync")):
        raise NotImplementedError(f"the emulator has no {instruction.opcode}")
    reads = [machine.registers.reader(one, "u32") for one in instruction.operands]

    def choose(group: Group, active: Threads) -> Any:
        name, *count = (int(np.atleast_1d(read(active))[0]) for read in reads)
        return machine.meet(group, name, count[0] if count else machine.program.threads)

    return concerns_groups(choose, "warp")


def _fence(instruction: Instruction, machine: Machine) -> Found:
    """Of the asynchronous proxy; accesses happen in order here, so only races depend on it."""
    races, numbers = machine.races, machine.registers.threads

    def run(threads: Threads) -> None:
        if races is not None:
            races.fence(numbers[threads])

    return simple(run)


def _shuffle(instruction: Instruction, machine: Machine) -> Found:
    target, *operands = instruction.operands
    valid = operands.pop(0) if len(operands) == 5 else None
    source, lane, clamp, _mask = operands
    registers = machine.registers
    read, write = registers.reader(source, "b32"), registers.writer(target, "b32")
    lanes, limits = registers.reader(lane, "u32"), registers.reader(clamp, "u32")
    note = registers.writer(valid, "pred") if valid is not None else None
    mode = instruction.opcode.split(".")[2]

    def run(threads: Threads) -> None:
        numbers = registers.threads[threads]
        own = numbers % 32
        other, limit = np.int64(lanes(threads)), np.int64(limits(threads))
        segment, end = limit >> 8 & 31, limit & 31
        low = own & segment
        high = low | (end & ~segment)
        wanted = {
            "idx": low | (other & ~segment), "bfly": own ^ other, "up": own - other,
            "down": own + other,
        }[mode]  # fmt: skip
        fits = wanted >= high if mode == "up" else wanted <= high
        chosen = np.where(fits, wanted, own)
        # Positions of those lanes among the threads that run.
        position = np.searchsorted(numbers, numbers - own + chosen)
        write(threads, np.broadcast_to(read(threads), numbers.shape)[position])
        if note is not None:
            note(threads, np.broadcast_to(fits, numbers.shape))

    return by_warps(run)


def _elect(instruction: Instruction, machine: Machine) -> Found:
    lane, elected, _mask = instruction.operands
    write, note = machine.registers.writer(lane, "b32"), machine.registers.writer(elected, "pred")

    def run(threads: Threads) -> None:
        write(threads, np.uint32(0))
        note(threads, machine.registers.threads[threads] % 32 == 0)

    return by_warps(run)


def _vote(instruction: Instruction, machine: Machine) -> Found:
    target, source, _mask = instruction.operands
    mode = instruction.opcode.split(".")[2]
    read = machine.registers.reader(source, "pred")
    write = machine.registers.writer(target, "b32" if mode == "ballot" else "pred")

    def run(threads: Threads) -> None:
        count = len(machine.registers.threads[threads])
        holds = np.broadcast_to(read(threads), (count,)).reshape(-1, 32)
        if mode == "ballot":
            found = (holds.astype(np.uint32) << np.arange(32, dtype=np.uint32)).sum(1, np.uint32)
        else:
            found = {"any": holds.any, "all": holds.all}[mode](1)
        write(threads, np.repeat(found, 32))

    return by_warps(run)


def _reduce(instruction: Instruction, machine: Machine) -> Found:
    """redux.sync: one number of a warp."""
    target, source, _mask = instruction.operands
    kind, name = widths(instruction.opcode)[-1], instruction.opcode.split(".")[2]
    read, write = machine.registers.reader(source, kind), machine.registers.writer(target, kind)

    def run(threads: Threads) -> None:
        count = len(machine.registers.threads[threads])
        rows = np.broadcast_to(read(threads), (count,)).reshape(-1, 32)
        found = rows[:, 0]
        for column in rows.T[1:]:
            found = combine(found, name, [column])
        write(threads, np.repeat(found, 32))

    return by_warps(run)


MAKERS: dict[str, Maker] = {
    "bra": _branch, "brx": _indexed_branch, "ret": _end, "exit": _end, "call": _fail,
    "trap": _fail, "bar": _barrier, "barrier": _barrier,
    "fence.proxy.async": _fence, "fence.mbarrier_init": _fence, "shfl": _shuffle, "elect": _elect,
    "vote": _vote, "redux": _reduce,
}  # fmt: skip
