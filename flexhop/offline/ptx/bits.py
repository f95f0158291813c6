"""Instructions that move bits: fields, masks, truth tables, bytes, and shifts of two registers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from flexhop.offline.ptx.parse import Instruction
from flexhop.offline.ptx.state import Registers, Threads, widths

__all__ = ["MAKERS"]

Run = Callable[[Threads], None]


def _field(x: Any, start: Any, length: Any) -> Any:
    start, length = (
        np.asarray(part).astype(np.uint64) & np.uint64(255) for part in (start, length)
    )
    mask = (np.uint64(1) << length) - np.uint64(1)
    found = (np.asarray(x).astype(np.int64).astype(np.uint64) >> start) & mask
    if np.issubdtype(np.asarray(x).dtype, np.signedinteger):
        sign = np.uint64(1) << (np.maximum(length, np.uint64(1)) - np.uint64(1))
        found = ((found ^ sign) - sign).astype(np.int64)
    return found.astype(np.asarray(x).dtype)


def _extract(instruction: Instruction, registers: Registers) -> Run:
    kind = widths(instruction.opcode)[-1]
    target, *sources = instruction.operands
    kinds = (kind, "u32", "u32")
    reads = [registers.reader(one, k) for one, k in zip(sources, kinds, strict=True)]
    write = registers.writer(target, kind)
    return lambda threads: write(threads, _field(*(read(threads) for read in reads)))


def _insert(instruction: Instruction, registers: Registers) -> Run:
    kind = widths(instruction.opcode)[-1]
    target, *sources = instruction.operands
    reads = [
        registers.reader(one, k)
        for one, k in zip(sources, (kind, kind, "u32", "u32"), strict=True)
    ]
    write = registers.writer(target, kind)

    def run(threads: Threads) -> None:
        new, old, start, length = (np.asarray(read(threads)) for read in reads)
        one = old.dtype.type(1)
        mask = ((one << length.astype(old.dtype)) - one) << start.astype(old.dtype)
        write(threads, (old & ~mask) | ((new << start.astype(old.dtype)) & mask))

    return run


def _logic(instruction: Instruction, registers: Registers) -> Run:
    """lop3: a truth table of three bits."""
    target, *sources, table = instruction.operands
    assert isinstance(table, int)
    reads = [registers.reader(one, "b32") for one in sources]
    write = registers.writer(target, "b32")

    def run(threads: Threads) -> None:
        a, b, c = (np.asarray(read(threads)) for read in reads)
        found = np.uint32(0)
        for row in range(8):
            if table >> row & 1:
                term = [v if row >> s & 1 else ~v for v, s in ((a, 2), (b, 1), (c, 0))]
                found = found | (term[0] & term[1] & term[2])
        write(threads, found)

    return run


def _permute(instruction: Instruction, registers: Registers) -> Run:
    """prmt: four bytes of two registers."""
    target, *sources = instruction.operands
    reads = [registers.reader(one, "b32") for one in sources]
    write = registers.writer(target, "b32")

    def run(threads: Threads) -> None:
        low, high, selector = (np.asarray(read(threads)).astype(np.uint64) for read in reads)
        both = low | (high << np.uint64(32))
        found = np.uint64(0)
        for number in range(4):
            choice = (selector >> np.uint64(4 * number)) & np.uint64(15)
            byte = (both >> ((choice & np.uint64(7)) * np.uint64(8))) & np.uint64(255)
            sign = (byte >> np.uint64(7)) * np.uint64(255)
            byte = np.where(choice > 7, sign, byte)
            found = found | (byte << np.uint64(8 * number))
        write(threads, found.astype(np.uint32))

    return run


def _funnel(instruction: Instruction, registers: Registers) -> Run:
    """shf: 32 bits of two registers, shifted."""
    target, *sources = instruction.operands
    reads = [registers.reader(one, "b32") for one in sources]
    write = registers.writer(target, "b32")
    parts = instruction.opcode.split(".")

    def run(threads: Threads) -> None:
        low, high, count = (np.asarray(read(threads)).astype(np.uint64) for read in reads)
        count = count & np.uint64(31) if "wrap" in parts else np.minimum(count, np.uint64(32))
        both = low | (high << np.uint64(32))
        shifted = both >> count if "r" in parts else (both << count) >> np.uint64(32)
        write(threads, shifted.astype(np.uint32))

    return run


def _mask(instruction: Instruction, registers: Registers) -> Run:
    """bmsk.clamp: bits that are set, from one on."""
    target, *sources = instruction.operands
    if ".clamp" not in instruction.opcode:
        raise NotImplementedError(f"the emulator has no {instruction.opcode}")
    first, count = (registers.reader(one, "u32") for one in sources)
    write = registers.writer(target, "b32")

    def run(threads: Threads) -> None:
        start, number = (
            np.minimum(np.uint64(one(threads)), np.uint64(32)) for one in (first, count)
        )
        bits = (np.uint64(1) << number) - np.uint64(1)
        write(threads, (bits << start).astype(np.uint32))

    return run


MAKERS: dict[str, Callable[[Instruction, Registers], Run]] = {
    "bfe": _extract, "bfi": _insert, "lop3": _logic, "prmt": _permute, "shf": _funnel,
    "bmsk": _mask,
}  # fmt: skip
