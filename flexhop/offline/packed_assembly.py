"""Inline assembly of several instructions, or of registers that hold several numbers, in numpy."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

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
    if operand in registers:
        return registers[operand]
    number = int(operand[2:], 16) if operand.startswith("0f") else int(operand, 0)
    return np.array([number & 0xFFFFFFFF], np.uint32)


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


def _of_floats(function: Callable[..., np.ndarray], *, flushes: bool = False) -> Any:
    """An instruction on fp32, whose registers are words; `flushes`: subnormal numbers are 0."""

    def run(*words: np.ndarray) -> np.ndarray:
        with np.errstate(all="ignore"):
            numbers = (np.ascontiguousarray(word, np.uint32).view(np.float32) for word in words)
            numbers = map(_flushed, numbers) if flushes else numbers
            result = np.asarray(function(*(n.astype(np.float64) for n in numbers)))
            result = _flushed(result) if flushes else result
            return np.atleast_1d(result.astype(np.float32)).view(np.uint32)

    return run


def _flushed(x: np.ndarray) -> np.ndarray:
    return np.where(np.abs(x) < _SMALLEST, np.copysign(np.zeros_like(x), x), x)


def _compare(function: Callable[..., np.ndarray]) -> Any:
    """A predicate, as a word."""

    def run(*words: np.ndarray) -> np.ndarray:
        numbers = (np.ascontiguousarray(word, np.uint32).view(np.float32) for word in words)
        return np.asarray(function(*numbers)).astype(np.uint32)

    return run


_SMALLEST = float(np.finfo(np.float32).tiny)
_INSTRUCTIONS: dict[str, Callable[..., np.ndarray]] = {
    "abs.f32": lambda x: x & np.uint32(0x7FFFFFFF),
    "add.f32": _of_floats(np.add),
    "add.s32": lambda a, b: a + b,
    "and.b32": np.bitwise_and,
    "copysign.f32": _of_floats(lambda sign, x: np.copysign(x, sign)),
    "cvt.rn.f32.s32": lambda x: x.view(np.int32).astype(np.float32).view(np.uint32),
    "cvt.rni.f32.f32": _of_floats(np.rint),
    "cvt.rn.f16x2.e4m3x2": _convert_e4m3,
    "ex2.approx.ftz.f32": _of_floats(np.exp2, flushes=True),
    "fma.rn.f32": _of_floats(lambda a, b, c: a * b + c),
    "lg2.approx.f32": _of_floats(np.log2),
    "lg2.approx.ftz.f32": _of_floats(np.log2, flushes=True),
    "max.NaN.f32": _of_floats(np.maximum),
    "min.NaN.f32": _of_floats(np.minimum),
    "mov.b32": lambda x: x,
    "mov.f32": lambda x: x,
    "mul.f32": _of_floats(np.multiply),
    "neg.f32": lambda x: x ^ np.uint32(0x80000000),
    "prmt.b32": _permute,
    "rcp.approx.ftz.f32": _of_floats(lambda x: 1 / x, flushes=True),
    "rsqrt.approx.ftz.f32": _of_floats(lambda x: 1 / np.sqrt(x), flushes=True),
    "selp.f32": lambda a, b, kept: np.where(kept != 0, a, b),
    "setp.eq.f32": _compare(np.equal),
    "setp.gt.f32": _compare(np.greater),
    "setp.lt.f32": _compare(np.less),
    "setp.ne.f32": _compare(np.not_equal),
    "setp.ne.s32": lambda a, b: (a != b).astype(np.uint32),
    "shl.b32": lambda x, n: x << n,
    "sqrt.approx.ftz.f32": _of_floats(np.sqrt, flushes=True),
    "sub.f16x2": _subtract_halves,
    "sub.f32": _of_floats(np.subtract),
    "sub.s32": lambda a, b: a - b,
    "xor.b32": np.bitwise_xor,
}
