"""Loads, stores and atomic operations."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from flexhop.offline.ptx.common import Found, Maker, addresses_of, parts_of, simple, space_of
from flexhop.offline.ptx.memory import GlobalMemory, SharedMemory, combine
from flexhop.offline.ptx.parse import Address, Instruction, Operand, Symbol
from flexhop.offline.ptx.races import Use
from flexhop.offline.ptx.state import DTYPES, Threads, widths

if TYPE_CHECKING:
    from flexhop.offline.ptx.machine import Machine

__all__ = ["MAKERS"]


def _load(instruction: Instruction, machine: Machine) -> Found:
    target, source = instruction.operands[:2]  # a policy of caches may follow
    kind, space = widths(instruction.opcode)[-1], space_of(instruction.opcode)
    writes = [machine.registers.writer(one, kind) for one in parts_of(target)]
    if space == "param":
        assert isinstance(source, Address) and isinstance(source.base, Symbol)
        read = machine.registers.reader(source.base, kind)
        return simple(lambda threads: writes[0](threads, read(threads)))
    places, memory = _memory(source, space, machine)
    size = np.dtype(DTYPES[kind]).itemsize
    watch = _watcher(memory, machine)

    def run(threads: Threads) -> None:
        addresses = places(threads)
        if watch:
            watch(threads, addresses, size * len(writes), "load")
        for number, write in enumerate(writes):
            write(threads, memory.load(addresses + number * size, kind))

    return simple(run)


def _memory(
    operand: Operand, space: str, machine: Machine
) -> tuple[Callable[[Threads], np.ndarray], GlobalMemory | SharedMemory]:
    """Addresses of threads, and what has them: without a space, arrays of threads, if any."""
    places = addresses_of(operand, machine)
    if space == "local" or (not space and machine.program.local):
        own = machine.registers.threads * sum(machine.program.local.values())
        return lambda threads: places(threads) + own[threads], machine.local
    return places, machine.shared if space == "shared" else machine.memory


def _watcher(memory: GlobalMemory | SharedMemory, machine: Machine) -> Callable[..., None] | None:
    """A function that notes accesses of shared memory, if somebody asks for races."""
    races, numbers = machine.races, machine.registers.threads
    if memory is not machine.shared or races is None:
        return None

    def watch(
        threads: Threads, addresses: np.ndarray, size: int, use: Use,
        values: list[np.ndarray] | None = None,
    ) -> None:  # fmt: skip
        count = len(numbers[threads])
        bits = values and np.stack([np.broadcast_to(one, (count,)) for one in values], 1)
        data = None if bits is None else np.ascontiguousarray(bits).view(np.uint8)
        races.access(numbers[threads], addresses, size, use, data)

    return watch


def _store(instruction: Instruction, machine: Machine) -> Found:
    target, source = instruction.operands[:2]
    kind, space = widths(instruction.opcode)[-1], space_of(instruction.opcode)
    if space == "param":  # arguments of a call, which ends the run
        return simple(lambda threads: None)
    reads = [machine.registers.reader(one, kind) for one in parts_of(source)]
    places, memory = _memory(target, space, machine)
    size = np.dtype(DTYPES[kind]).itemsize
    watch = _watcher(memory, machine)

    def run(threads: Threads) -> None:
        addresses = places(threads)
        values = [read(threads) for read in reads]
        if watch:
            watch(threads, addresses, size * len(reads), "store", values)
        for number, value in enumerate(values):
            memory.store(addresses + number * size, kind, value)

    return simple(run)


def _atomic(instruction: Instruction, machine: Machine) -> Found:
    """atom and red: thread by thread."""
    operands = list(instruction.operands)
    target = operands.pop(0) if instruction.opcode.startswith("atom") else None
    place, *values = operands
    kind = widths(instruction.opcode)[-1]
    parts = instruction.opcode.split(".")
    names = ("add", "min", "max", "and", "or", "xor", "exch", "cas")
    name = next(part for part in parts if part in names)
    places, registers = addresses_of(place, machine), machine.registers
    reads = [registers.reader(one, kind) for one in values]
    write = registers.writer(target, kind) if target is not None else None
    memory = machine.shared if space_of(instruction.opcode) == "shared" else machine.memory
    watch, size = _watcher(memory, machine), np.dtype(DTYPES[kind]).itemsize

    def run(threads: Threads) -> None:
        count = len(registers.threads[threads])
        addresses = np.broadcast_to(places(threads), (count,))
        if watch:
            watch(threads, addresses, size, "use")
        given = [np.broadcast_to(read(threads), (count,)) for read in reads]
        old = np.empty(count, given[0].dtype)
        for number in range(count):
            here = addresses[number : number + 1]
            old[number] = memory.load(
                here, kind, *(() if memory is machine.shared else ("atomic",))
            )[0]
            memory.store(here, kind, combine(old[number], name, [v[number] for v in given]))
        if write is not None:
            write(threads, old)

    return simple(run)


MAKERS: dict[str, Maker] = {"ld": _load, "st": _store, "atom": _atomic, "red": _atomic}
