"""Barriers in memory, tensor maps, and asynchronous copies."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from flexhop.offline.ptx.common import (
    Found,
    Maker,
    addresses_of,
    concerns_groups,
    ends_group,
    simple,
    unsigned,
)
from flexhop.offline.ptx.copies import CHUNK, Box, Leaving, TensorMap, load_box
from flexhop.offline.ptx.groups import SIZES, Wait
from flexhop.offline.ptx.memory import bytes_of
from flexhop.offline.ptx.order import Pending
from flexhop.offline.ptx.parse import Address, Instruction, Symbol
from flexhop.offline.ptx.races import Op
from flexhop.offline.ptx.state import Threads

if TYPE_CHECKING:
    from flexhop.offline.ptx.groups import Group
    from flexhop.offline.ptx.machine import Machine

__all__ = ["MAKERS"]


def _mbarrier(instruction: Instruction, machine: Machine) -> Found:
    parts = instruction.opcode.split(".")
    registers, barriers, races = machine.registers, machine.barriers, machine.races
    is_made = parts[1] in ("init", "inval")
    if parts[1] in ("try_wait", "test_wait"):
        return _wait_for_phase(instruction, machine)
    operands = [one for one in instruction.operands if one != Symbol("_")]
    at = next(n for n, one in enumerate(operands) if isinstance(one, Address))
    places = addresses_of(operands[at], machine)
    values = [registers.reader(one, "u32") for one in operands[at + 1 :]]

    def run(threads: Threads) -> None:
        numbers = registers.threads[threads]
        addresses = np.broadcast_to(places(threads), numbers.shape)
        given = [np.broadcast_to(read(threads), numbers.shape) for read in values]
        if races is not None:
            races.access(numbers, addresses, 8, "store" if is_made else "use")
        for number, address in enumerate(addresses.tolist()):
            first = int(given[0][number]) if given else 1
            if parts[1] == "init":
                barriers.init(address, first)
            elif parts[1] == "inval":
                barriers.invalidate(address)
            else:
                if "expect_tx" in parts:
                    barriers.expect(address, first)
                    first = 1
                if parts[1] == "arrive":
                    if races is not None:
                        races.arrive(int(numbers[number]), address)
                    barriers.arrive(address, first)

    return simple(run)


def _wait_for_phase(instruction: Instruction, machine: Machine) -> Found:
    """A thread that must wait does so here, and not in the loop around it."""
    target, place, parity = instruction.operands[:3]
    places = addresses_of(place, machine)
    read = machine.registers.reader(parity, "u32")
    write = machine.registers.writer(target, "pred")
    barriers = machine.barriers

    def choose(group: Group, active: Threads) -> Any:
        addresses, parities = np.broadcast_arrays(places(active), read(active))
        asked = set(zip(addresses.tolist(), parities.tolist(), strict=True))

        def is_over() -> bool:
            return all(barriers.is_over(*one) for one in asked)

        if not is_over():
            return Wait(
                ("phase", group.place),
                lambda: ", ".join(f"{a}, {p}: {barriers.show(a)}" for a, p in asked),
                is_over,
            )
        write(active, np.True_)
        if machine.races is not None:
            numbers = machine.registers.threads[active]
            machine.races.access(numbers, addresses, 8, "use")
            machine.races.wait(numbers, np.broadcast_to(addresses, numbers.shape))
        return None

    return concerns_groups(choose)


def _tensor_map(instruction: Instruction, machine: Machine) -> Found:
    """tensormap.replace and tensormap.cp_fenceproxy."""
    parts = instruction.opcode.split(".")
    if parts[1] == "cp_fenceproxy":
        goal, source = (addresses_of(one, machine) for one in instruction.operands[:2])

        def copy(threads: Threads) -> None:
            machine.maps[int(goal(threads)[0])] = machine.maps[int(source(threads)[0])].copy()

        return simple(copy)
    place, *values = instruction.operands
    places = addresses_of(place, machine)
    reads = [machine.registers.reader(one, unsigned(one)) for one in values]

    def replace(threads: Threads) -> None:
        given = [int(np.atleast_1d(read(threads))[0]) for read in reads]
        tensor = machine.maps.setdefault(int(places(threads)[0]), TensorMap())
        tensor.put(parts[3], given[0] if len(given) > 1 else 0, given[-1])

    return simple(replace)


def _bulk_copy(instruction: Instruction, machine: Machine) -> Found:
    """cp.async.bulk.tensor and cp.reduce.async.bulk.tensor, of one thread."""
    first, second, *more = instruction.operands
    is_load = isinstance(second, Address) and second.coordinates is not None
    tensor, shared = (second, first) if is_load else (first, second)
    assert isinstance(tensor, Address) and tensor.coordinates is not None
    registers = machine.registers
    maps, places = addresses_of(tensor, machine), addresses_of(shared, machine)
    reads = [registers.reader(one, "s32") for one in tensor.coordinates.parts]
    barrier = addresses_of(more[0], machine) if is_load else None
    adds = instruction.opcode.startswith("cp.reduce")

    def run(threads: Threads) -> None:
        for thread in registers.threads[threads].tolist():
            one = slice(thread, thread + 1)
            start = [int(np.atleast_1d(read(one))[0]) for read in reads]
            tensor_map, address = machine.maps[int(maps(one)[0])], int(places(one)[0])
            box = Box(tensor_map, start, machine.memory, machine.shared, address)
            op = _note_box(machine, thread, box, barrier)
            if barrier is None:
                leaving = Leaving(box, adds=adds)
                pending = machine.later.start(leaving.arrive, [op] if op else [], leaving.read)
                machine.stores.setdefault(thread, [[]])[-1].append(pending)
            else:
                machine.later.start(partial(_deliver, machine, box, int(barrier(one)[0]), op))

    return simple(run)


def _note_box(
    machine: Machine, thread: int, box: Box, barrier: Callable[[Threads], np.ndarray] | None
) -> Op | None:
    """A copy between shared and global memory begins; a load uses a barrier."""
    if machine.races is None:
        return None
    nothing, places = np.empty(0, np.int64), bytes_of(box.chunks() * CHUNK, CHUNK)
    if barrier is None:
        return machine.races.begin(thread // 32, places, nothing)
    machine.races.access(np.array([thread]), barrier(slice(thread, thread + 1)), 8, "use")
    return machine.races.begin(thread // 32, nothing, places)


def _deliver(machine: Machine, box: Box, barrier: int, op: Op | None) -> None:
    load_box(box)
    if machine.races is not None and op is not None:
        machine.races.deliver(op, barrier)
    machine.barriers.deliver(barrier, box.tensor.bytes)


def _bulk_group(instruction: Instruction, machine: Machine) -> Found:
    """cp.async.bulk.commit_group and wait_group."""
    return simple(ends_group(instruction, machine, machine.stores, 1))


def _copy(instruction: Instruction, machine: Machine) -> Found:
    """cp.async: a few bytes of each thread; what lies behind those of the source is 0."""
    target, source, size, *rest = instruction.operands
    assert isinstance(size, int)
    goals, places = addresses_of(target, machine), addresses_of(source, machine)
    count = machine.registers.reader(rest[0] if rest else size, "u32")

    def run(threads: Threads) -> None:
        numbers = machine.registers.threads[threads]
        addresses = np.broadcast_to(places(threads), numbers.shape)
        exists = np.broadcast_to(count(threads), numbers.shape)
        if not np.isin(exists, (0, size)).all():
            raise NotImplementedError("the emulator copies all bytes, or none")
        words = np.zeros((len(numbers), size // 4), np.uint32)
        is_read = exists > 0

        def copy() -> None:
            for word in range(size // 4):
                if is_read.any():
                    words[is_read, word] = machine.memory.load(
                        addresses[is_read] + 4 * word, "b32"
                    )
                machine.shared.store(to + 4 * word, "b32", words[:, word])

        to = np.broadcast_to(goals(threads), numbers.shape)
        pending = machine.later.start(copy)
        owners = numbers // SIZES["warp"]
        for warp in np.unique(owners).tolist():
            ops = _note_copy(machine, warp, to[owners == warp], size)
            machine.copies.setdefault(warp, [[]])[-1].append(Pending(pending.finish, ops))

    return simple(run)


def _note_copy(machine: Machine, warp: int, to: np.ndarray, size: int) -> list[Op]:
    """A warp begins to copy; cp.async sees memory as other instructions do."""
    if machine.races is None:
        return []
    nothing = np.empty(0, np.int64)
    return [machine.races.begin(warp, nothing, bytes_of(to, size), is_generic=True)]


def _copy_group(instruction: Instruction, machine: Machine) -> Found:
    """cp.async.commit_group and wait_group, of warps."""
    return simple(ends_group(instruction, machine, machine.copies, SIZES["warp"]))


MAKERS: dict[str, Maker] = {
    "mbarrier": _mbarrier, "tensormap": _tensor_map, "cp.async.bulk.tensor": _bulk_copy,
    "cp.reduce.async.bulk.tensor": _bulk_copy, "cp.async.bulk.commit_group": _bulk_group,
    "cp.async.bulk.wait_group": _bulk_group, "cp.async.ca": _copy, "cp.async.cg": _copy,
    "cp.async.commit_group": _copy_group, "cp.async.wait_group": _copy_group,
}  # fmt: skip
