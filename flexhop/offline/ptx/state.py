"""Registers of all threads of a program, and the views in which instructions read and write."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from flexhop.offline.ptx.parse import Operand, Program, Register, Symbol, Vector

__all__ = ["DTYPES", "Read", "Registers", "Threads", "Write", "widths"]

# Threads for which an instruction runs: a range of them, or their numbers.
Threads = Any
Read = Callable[[Threads], Any]
Write = Callable[[Threads, Any], None]

DTYPES: dict[str, type[np.generic]] = {
    "b8": np.uint8, "u8": np.uint8, "s8": np.int8,
    "b16": np.uint16, "u16": np.uint16, "s16": np.int16, "f16": np.float16, "bf16": np.uint16,
    "b32": np.uint32, "u32": np.uint32, "s32": np.int32, "f32": np.float32,
    "f16x2": np.uint32, "bf16x2": np.uint32, "u16x2": np.uint32, "s16x2": np.uint32,
    "b64": np.uint64, "f32x2": np.uint64, "u64": np.uint64, "s64": np.int64, "f64": np.float64,
}  # fmt: skip


class Registers:
    """A program's registers: [number, threads] of each kind.

    Args:
        program: what they are of.
        symbols: addresses of arrays, and values of parameters.
    """

    def __init__(self, program: Program, symbols: dict[str, int]) -> None:
        threads = program.threads
        self.threads = np.arange(threads)
        self._special = {"%tid.x": self.threads, "%laneid": self.threads % 32}
        self._symbols = symbols
        counts = program.registers
        self._arrays: dict[str, np.ndarray] = {
            "p": np.zeros((counts["p"], threads), np.bool_),
            "16": np.zeros((counts["16"], threads), np.uint16),
            "32": np.zeros((counts["32"], threads), np.uint32),
            "64": np.zeros((counts["64"], threads), np.uint64),
        }

    def clear(self, special: dict[str, int]) -> None:
        """Forget all numbers.

        Args:
            special: values of special registers that are the same for all threads.
        """
        for kind, array in self._arrays.items():
            array[:] = kind == "p" or np.iinfo(array.dtype).max  # NaN, or far out of range
        for name, value in special.items():
            # Instructions that are ready to run hold the array.
            self._special.setdefault(name, np.empty_like(self.threads))[:] = value

    def view(self, register: Register, kind: str) -> np.ndarray:
        """A register as numbers of a type, of which it has the lowest bits."""
        row = self._arrays[register.kind][register.number]
        if kind == "pred":
            return row
        dtype = np.dtype(DTYPES[kind])
        step = row.dtype.itemsize // dtype.itemsize
        assert step > 0, (register, kind)
        return row.view(dtype)[::step] if step > 1 else row.view(dtype)

    def whole(self, register: Register, kind: str) -> np.ndarray:
        """A register as a target: numbers of a type are extended to all of its bits."""
        row = self._arrays[register.kind][register.number]
        if kind == "pred":
            return row
        dtype = np.dtype(DTYPES[kind])
        if dtype.itemsize == row.dtype.itemsize:
            return row.view(dtype)
        signed = np.issubdtype(dtype, np.signedinteger)
        return row.view(f"i{row.dtype.itemsize}") if signed else row

    def reader(self, operand: Operand, kind: str) -> Read:
        """A function of threads that gives an operand's values."""
        if isinstance(operand, Register):
            row = self.view(operand, kind)
            return row.__getitem__
        if isinstance(operand, int):
            value = constant(operand, kind)
            return lambda threads: value
        if isinstance(operand, Vector):
            return self._packed(operand, kind)
        assert isinstance(operand, Symbol), operand
        return self._named(operand.name, kind)

    def _named(self, name: str, kind: str) -> Read:
        if name in self._special:
            row = self._special[name]
            return lambda threads: row[threads].astype(DTYPES[kind])
        if name not in self._symbols:
            raise NotImplementedError(f"the emulator has no {name}")
        number = constant(self._symbols[name], kind)
        return lambda threads: number

    def _packed(self, vector: Vector, kind: str) -> Read:
        """Parts of a number, the lowest first."""
        bits = np.dtype(DTYPES[kind]).itemsize * 8 // len(vector.parts)
        parts = [self.reader(part, f"b{bits}") for part in vector.parts]
        dtype = np.dtype(f"u{bits * len(parts) // 8}").type

        def read(threads: Threads) -> Any:
            value: Any = 0
            for number, part in enumerate(parts):
                value = value | (np.asarray(part(threads)).astype(dtype) << dtype(bits * number))
            return np.asarray(value, dtype).view(DTYPES[kind])

        return read

    def writer(self, operand: Operand, kind: str) -> Write:
        """A function of threads and values that stores them in an operand."""
        if isinstance(operand, Register):
            row = self.whole(operand, kind)
            return row.__setitem__
        if isinstance(operand, Symbol):
            if operand.name != "_":
                raise NotImplementedError(f"the emulator has no register {operand.name}")
            return lambda threads, values: None
        assert isinstance(operand, Vector), operand
        bits = np.dtype(DTYPES[kind]).itemsize * 8 // len(operand.parts)
        parts = [self.writer(part, f"b{bits}") for part in operand.parts]
        narrow = np.dtype(f"u{bits // 8}").type

        def write(threads: Threads, values: Any) -> None:
            wide = np.asarray(values)
            wide = wide.view(f"u{wide.dtype.itemsize}")
            for number, part in enumerate(parts):
                part(threads, (wide >> wide.dtype.type(bits * number)).astype(narrow))

        return write


def constant(bits: int, kind: str) -> Any:
    """A number of the text: of floats its bits."""
    if kind == "pred":
        return np.bool_(bits)
    dtype = np.dtype(DTYPES[kind])
    size = dtype.itemsize
    return np.array(bits & (256**size - 1), f"u{size}").view(dtype)[()]


def widths(opcode: str) -> list[str]:
    """Types in an opcode, in order."""
    return [part for part in opcode.split(".")[1:] if part in DTYPES or part == "pred"]
