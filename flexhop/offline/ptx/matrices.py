"""Loads and stores of matrices, and products of warpgroups."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from flexhop.offline.ptx import products
from flexhop.offline.ptx.common import (
    Found,
    Maker,
    addresses_of,
    by_warps,
    ends_group,
    parts_of,
)
from flexhop.offline.ptx.groups import SIZES
from flexhop.offline.ptx.memory import SharedMemory, bytes_of
from flexhop.offline.ptx.order import Pending
from flexhop.offline.ptx.parse import Instruction, Register, Vector
from flexhop.offline.ptx.races import Op, Use
from flexhop.offline.ptx.state import Read, Threads

if TYPE_CHECKING:
    from flexhop.offline.ptx.machine import Machine

__all__ = ["MAKERS"]


def _load_matrix(instruction: Instruction, machine: Machine) -> Found:
    target, source = instruction.operands
    parts = parts_of(target)
    writes = [machine.registers.writer(one, "b32") for one in parts]
    places, is_transposed = addresses_of(source, machine), ".trans" in instruction.opcode

    def run(threads: Threads) -> None:
        addresses = places(threads)
        _watch(machine, threads, addresses, len(writes))
        found = products.load_matrices(machine.shared, addresses, len(writes), is_transposed)
        for write, row in zip(writes, found, strict=True):
            write(threads, row)

    return by_warps(run)


def _store_matrix(instruction: Instruction, machine: Machine) -> Found:
    target, source = instruction.operands
    parts = parts_of(source)
    reads = [machine.registers.reader(one, "b32") for one in parts]
    places, is_transposed = addresses_of(target, machine), ".trans" in instruction.opcode

    def run(threads: Threads) -> None:
        addresses = places(threads)
        rows = np.stack([np.broadcast_to(read(threads), addresses.shape) for read in reads])
        matrices = products.matrices_of(rows, is_transposed)
        _watch(machine, threads, addresses, len(reads), matrices)
        products.store_matrices(machine.shared, addresses, matrices)

    return by_warps(run)


def _watch(
    machine: Machine, threads: Threads, addresses: np.ndarray, number: int,
    stored: np.ndarray | None = None,
) -> None:  # fmt: skip
    """Rows of 16 bytes, whose addresses the first threads of each warp have; stored or loaded."""
    if machine.races is not None:
        numbers = machine.registers.threads[threads]
        has_row = numbers % 32 < 8 * number
        use: Use = "load" if stored is None else "store"
        values = None if stored is None else stored.reshape(-1, 8).view(np.uint8)
        machine.races.access(numbers[has_row], addresses[has_row], 16, use, values)


class _Product(NamedTuple):
    """A product that was started: left [64, terms] times right [terms, columns], plus a sum.

    rows: the registers of the sum, of a warpgroup. left, right: where factors are in shared
    memory, or four registers of a factor, as they were when it was started.
    """

    shape: products.Shape
    shared: SharedMemory
    rows: list[np.ndarray]
    left: np.ndarray | int
    right: int
    is_flipped: tuple[bool, bool]
    adds: bool

    def reads(self) -> np.ndarray:
        """Addresses of the bytes of its factors in shared memory."""
        sides = [(self.right, self.shape.columns, self.is_flipped[1])]
        if isinstance(self.left, int):
            sides.append((self.left, 64, self.is_flipped[0]))
        found = [
            products.places(side, size, self.shape, is_flipped=is_flipped)
            for side, size, is_flipped in sides
        ]
        return bytes_of(np.concatenate([one.reshape(-1) for one in found]), self.shape.width)

    def run(self) -> None:
        if isinstance(self.left, int):
            left = products.operand(
                self.shared, self.left, 64, self.shape, is_flipped=self.is_flipped[0]
            )
        else:
            left = products.gather_factor(self.left, self.shape)
        right = products.operand(
            self.shared, self.right, self.shape.columns, self.shape, is_flipped=self.is_flipped[1]
        )
        total = left @ right.T
        if self.adds:
            total += products.gather_sum(np.stack(self.rows))
        for row, values in zip(self.rows, products.scatter_sum(total), strict=True):
            row[:] = values


def _product(instruction: Instruction, machine: Machine) -> Found:
    """wgmma.mma_async: factors in registers are read now, those in shared memory later."""
    result, left, right, scale, *numbers = instruction.operands
    shape = products.read_shape(instruction.opcode)
    if list(numbers[:2]) != [1, 1]:
        raise NotImplementedError("the emulator negates no factor")
    flips = [bool(number) for number in numbers[2:]]
    # A factor in registers cannot be transposed.
    is_flipped = (flips[0], flips[1]) if len(flips) > 1 else (False, any(flips))
    registers = machine.registers
    assert isinstance(result, Vector)
    rows = [registers.view(one, "f32") for one in result.parts if isinstance(one, Register)]
    left_kind = "b32" if isinstance(left, Vector) else "u64"
    reads = [registers.reader(one, left_kind) for one in parts_of(left)]
    place, adds = registers.reader(right, "u64"), registers.reader(scale, "pred")

    def run(threads: Threads) -> None:
        for first in registers.threads[threads][::128].tolist():
            group = slice(first, first + 128)
            given = [np.atleast_1d(read(group)) for read in reads]
            product = _Product(
                shape, machine.shared, [row[group] for row in rows],
                int(given[0][0]) if left_kind == "u64" else np.stack(given),
                int(np.atleast_1d(place(group))[0]), is_flipped,
                bool(np.atleast_1d(adds(group))[0]),
            )  # fmt: skip
            _begin(machine, first, product)

    return by_warps(run, "warpgroup")


def _begin(machine: Machine, first: int, product: _Product) -> None:
    """Products of a warpgroup run one after the other."""
    ops: list[Op] = []
    if machine.races is not None:  # each warp multiplies its rows
        nothing, places, warp = np.empty(0, np.int64), product.reads(), first // SIZES["warp"]
        ops = [machine.races.begin(warp + n, places, nothing, "product") for n in range(4)]
    pending = Pending(product.run, ops)
    machine.products.setdefault(first // SIZES["warpgroup"], [[]])[-1].append(pending)
    if machine.later.when == "early":
        pending.finish()


def _product_group(instruction: Instruction, machine: Machine) -> Found:
    run = ends_group(instruction, machine, machine.products, SIZES["warpgroup"])
    return by_warps(run, "warpgroup")


def _warp_product(instruction: Instruction, machine: Machine) -> Found:
    """mma.sync: each warp multiplies by itself, at once."""
    parts = [one.parts for one in instruction.operands if isinstance(one, Vector)]
    shape, registers = products.read_shape(instruction.opcode), machine.registers
    writes = [registers.writer(one, "f32") for one in parts[0]]
    left, right = ([registers.reader(one, "b32") for one in factor] for factor in parts[1:3])
    sums = [registers.reader(one, "f32") for one in parts[3]]

    def run(threads: Threads) -> None:
        count = len(registers.threads[threads])

        def stack(reads: list[Read]) -> np.ndarray:
            return np.stack([np.broadcast_to(read(threads), (count,)) for read in reads])

        one, other = (products.gather_warps(stack(reads), shape.dtype) for reads in (left, right))
        total = products.multiply_warps(one, other, stack(sums))
        for write, row in zip(writes, total, strict=True):
            write(threads, row)

    return by_warps(run)


MAKERS: dict[str, Maker] = {
    "mma.sync": _warp_product,
    "ldmatrix": _load_matrix, "stmatrix": _store_matrix, "wgmma.mma_async": _product,
    "wgmma.commit_group": _product_group, "wgmma.wait_group": _product_group,
}  # fmt: skip
