"""Inline assembly whose registers hold several numbers, in numpy: a few instructions of PTX."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import numpy as np
import torch

__all__ = ["run_packed"]

_REGISTER_BYTES = 4
_STATEMENT = re.compile(r"([a-z][\w.]*)\s+(.*)")
_OPERAND = re.compile(r"\{[^}]*\}|[^,\s]+")


def run_packed(
    text: str, pack: int, args: Sequence[np.ndarray], results: Sequence[np.dtype]
) -> list[np.ndarray]:
    """Run assembly on all elements, `pack` of which share the registers of an argument.

    Args:
        text: statements that end with semicolons; $0, $1, ... are 32-bit registers, of the results
            first.
        pack: as in `tl.inline_asm_elementwise`.
        args: of equal shape.
        results: dtype of each result, of args' shape.

    Raises:
        NotImplementedError: an instruction that is not in the table.
    """
    registers: dict[str, np.ndarray] = {}
    widths = [pack * dtype.itemsize // _REGISTER_BYTES for dtype in results]
    position = sum(widths)
    for arg in args:
        words = np.ascontiguousarray(arg).reshape(-1, pack).view(np.uint32)
        for column in words.T:
            registers[f"${position}"] = column
            position += 1
    for statement in text.strip().removeprefix("{").removesuffix("}").split(";"):
        if statement.strip() and not statement.strip().startswith(".reg"):
            _run(statement.strip(), registers)
    found: list[np.ndarray] = []
    first = 0
    for width, dtype in zip(widths, results, strict=True):
        words = np.stack([registers[f"${first + i}"] for i in range(width)], 1)
        found.append(np.ascontiguousarray(words).view(dtype).reshape(args[0].shape))
        first += width
    return found


def _run(statement: str, registers: dict[str, np.ndarray]) -> None:
    match = _STATEMENT.fullmatch(statement)
    if match is None or match[1] not in _INSTRUCTIONS:
        raise NotImplementedError(
            f"The interpreter knows {sorted(_INSTRUCTIONS)} in packed assembly, not: {statement}"
        )
    target, *operands = _OPERAND.findall(match[2])
    value = _INSTRUCTIONS[match[1]](*(_read(operand, registers) for operand in operands))
    if target.startswith("{"):
        low, high = target.strip("{}").replace(" ", "").split(",")
        registers |= {low: value & np.uint32(0xFFFF), high: value >> np.uint32(16)}
    else:
        registers[target] = value


def _read(operand: str, registers: dict[str, np.ndarray]) -> np.ndarray:
    return registers[operand] if operand in registers else np.array([int(operand, 0)], np.uint32)


def _permute(a: np.ndarray, b: np.ndarray, selector: np.ndarray) -> np.ndarray:
    """Byte i of the result is the one of b:a that digit i of the selector says."""
    both = a.astype(np.uint64) | b.astype(np.uint64) << np.uint64(32)
    result = np.zeros_like(both)
    for i in range(4):
        digit = int(selector[0]) >> 4 * i & 0xF
        if digit > 7:
            raise NotImplementedError(f"prmt with the sign of a byte: {int(selector[0]):#x}")
        result |= (both >> np.uint64(8 * digit) & np.uint64(0xFF)) << np.uint64(8 * i)
    return result.astype(np.uint32)


def _subtract_halves(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    a, b = np.broadcast_arrays(a, b)
    halves = [np.ascontiguousarray(x).view(np.float16) for x in (a, b)]
    return np.asarray(halves[0] - halves[1]).view(np.uint32)


def _convert_e4m3(pair: np.ndarray) -> np.ndarray:
    stored = torch.from_numpy(pair.astype(np.uint16).view(np.uint8)).view(torch.float8_e4m3fn)
    return stored.half().numpy().view(np.uint32)


_INSTRUCTIONS: dict[str, Callable[..., np.ndarray]] = {
    "cvt.rn.f16x2.e4m3x2": _convert_e4m3,
    "mov.b32": lambda x: x,
    "prmt.b32": _permute,
    "sub.f16x2": _subtract_halves,
    "xor.b32": np.bitwise_xor,
}
