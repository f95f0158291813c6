"""Instructions whose results depend on registers of the same thread alone, in numpy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np
import torch

from flexhop.offline.ptx import bits
from flexhop.offline.ptx.parse import Instruction
from flexhop.offline.ptx.state import DTYPES, Registers, Threads, widths

__all__ = ["arithmetic"]

Run = Callable[[Threads], None]
Function = Callable[..., Any]
_MODES = ("lo", "hi", "wide")


def arithmetic(instruction: Instruction, registers: Registers) -> Run | None:
    """A function of threads that runs an instruction; None: it is no arithmetic."""
    opcode = instruction.opcode
    name = opcode.split(".")[0]
    special = _SPECIAL.get(name)
    if special is not None:
        return special(instruction, registers)
    kinds = widths(opcode)
    if not kinds:
        return None
    function = _FUNCTIONS.get(f"{name}.{_mode(opcode)}") or _FUNCTIONS.get(name)
    if function is None:
        return None
    function = _modified(function, opcode)
    if kinds[-1] in _HALVES:
        function = _pairs(function, _HALVES[kinds[-1]])
    return _simple(instruction, registers, function, kinds[-1])


def _modified(function: Function, opcode: str) -> Function:
    """The function with what the rest of an opcode says of it."""
    rest = set(opcode.split(".")[1:]) - DTYPES.keys() - _HALVES.keys() - _AS_IT_IS
    if "NaN" in rest and function in _WITH_NAN:
        rest.remove("NaN")
        function = _WITH_NAN[function]
    directions = rest & _DIRECTED.keys()
    if directions and widths(opcode)[-1] == "f32":
        rest -= directions
        function = _rounded(function, directions.pop())
    if "relu" in rest:
        rest.remove("relu")
        signed = function
        function = lambda *values: np.maximum(signed(*values), 0)  # noqa: E731
    if rest:
        raise NotImplementedError(f"the emulator has no {opcode}")
    return function


def _rounded(function: Function, direction: str) -> Function:
    """The function in fp32, with the result rounded in one direction."""
    end = _DIRECTED[direction]

    def run(*values: Any) -> Any:
        exact = function(*(np.asarray(value, np.float64) for value in values))
        near = exact.astype(np.float32)
        is_beyond = np.abs(near) > np.abs(exact) if end == 0 else (near > exact) == (end < 0)
        return np.where(is_beyond & (near != exact), np.nextafter(near, np.float32(end)), near)

    return run


def _mode(opcode: str) -> str:
    """Which half of a product an opcode asks for; or ""."""
    return next((part for part in opcode.split(".") if part in _MODES), "")


def _simple(instruction: Instruction, registers: Registers, function: Function, kind: str) -> Run:
    """All operands and the result have one type; a wide product has a wider result."""
    target, *sources = instruction.operands
    is_wide = _mode(instruction.opcode) == "wide"
    result = f"{kind[0]}{2 * int(kind[1:])}" if is_wide else kind
    if function in (_count_bits, _leading_zeros):
        result = "u32"
    kinds = [kind] * len(sources)
    if is_wide and len(kinds) == 3:
        kinds[2] = result
    if instruction.opcode.split(".")[0] in ("shl", "shr"):
        kinds[1] = "u32"
    reads = [registers.reader(*one) for one in zip(sources, kinds, strict=True)]
    write = registers.writer(target, result)
    if len(reads) == 1:
        (first,) = reads
        return lambda threads: write(threads, function(first(threads)))
    if len(reads) == 2:
        first, second = reads
        return lambda threads: write(threads, function(first(threads), second(threads)))
    return lambda threads: write(threads, function(*(read(threads) for read in reads)))


def _bits(values: Any) -> Any:
    return np.asarray(values).view(f"u{np.asarray(values).dtype.itemsize}")


def _shift_left(values: Any, count: Any) -> Any:
    width = values.dtype.itemsize * 8
    shifted = values << np.minimum(count, width - 1).astype(values.dtype)
    return np.where(count >= width, values.dtype.type(0), shifted)


def _shift_right(values: Any, count: Any) -> Any:
    width = values.dtype.itemsize * 8
    shifted = values >> np.minimum(count, width - 1).astype(values.dtype)
    if np.issubdtype(values.dtype, np.signedinteger):
        return shifted
    return np.where(count >= width, values.dtype.type(0), shifted)


def _wide(values: Any) -> Any:
    dtype = np.asarray(values).dtype
    return values.astype(np.dtype(f"{dtype.kind}{2 * dtype.itemsize}"))


def _fma(x: Any, y: Any, z: Any) -> Any:
    """Rounded once, but for the last bit of fp64's sum."""
    if x.dtype == np.float64:
        return x * y + z
    exact = np.asarray(x, np.float64) * y + z
    return exact.astype(np.result_type(x))


def _quotient(x: Any, y: Any) -> Any:
    if np.issubdtype(np.result_type(x), np.floating):
        return x / y
    safe = np.where(y == 0, 1, y)
    # Towards zero, as the GPU divides.
    found = np.abs(x) // np.abs(safe) * (np.sign(x) * np.sign(safe))
    return np.where(y == 0, -1, found).astype(x.dtype)


def _remainder(x: Any, y: Any) -> Any:
    safe = np.where(y == 0, 1, y)
    return np.where(y == 0, x, x - _quotient(x, safe) * safe).astype(x.dtype)


def _high(x: Any, y: Any) -> Any:
    narrow = np.asarray(x).dtype
    product = _wide(np.asarray(x)) * _wide(np.asarray(y))
    return (product >> (8 * narrow.itemsize)).astype(narrow)


def _count_bits(x: Any) -> Any:
    return np.bitwise_count(x).astype(np.uint32)


def _leading_zeros(x: Any) -> Any:
    bits = x.dtype.itemsize * 8
    found = np.full(np.shape(x), bits, np.uint32)
    for place in range(bits):
        found = np.where((x >> x.dtype.type(place)) & x.dtype.type(1), bits - 1 - place, found)
    return found


def _reversed(x: Any) -> Any:
    found = np.zeros_like(x)
    for _ in range(32):
        found, x = (found << np.uint32(1)) | (x & np.uint32(1)), x >> np.uint32(1)
    return found


def _pairs(function: Function, kind: type[np.generic] | str) -> Function:
    """A function of both halves of registers."""

    def run(*values: Any) -> Any:
        shape = np.broadcast(*values).shape
        halves = [np.ascontiguousarray(np.broadcast_to(v, shape)) for v in values]
        if kind == "bf16":
            wide = [h.view(np.uint16).astype(np.uint32) << np.uint32(16) for h in halves]
            return narrow_bf16(function(*(w.view(np.float32) for w in wide))).view(np.uint32)
        found = np.ascontiguousarray(function(*(h.view(kind) for h in halves)))
        return found.view(halves[0].dtype)

    return run


def narrow_bf16(values: Any) -> np.ndarray:
    """fp32 to the bits of bf16, to nearest even."""
    values = np.ascontiguousarray(values, np.float32)
    bits = values.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(
        16
    )
    return np.where(np.isnan(values), np.uint32(0x7FFF), rounded).astype(np.uint16)


def _no_nan(function: Function, floating: Function) -> Function:
    def run(x: Any, y: Any) -> Any:
        is_float = np.issubdtype(np.result_type(x), np.floating)
        return (floating if is_float else function)(x, y)

    return run


_maximum, _minimum = _no_nan(np.maximum, np.fmax), _no_nan(np.minimum, np.fmin)
_FUNCTIONS: dict[str, Function] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "mul.lo": np.multiply,
    "mul.hi": _high, "mul.wide": lambda x, y: _wide(np.asarray(x)) * _wide(np.asarray(y)),
    "mad.lo": lambda x, y, z: x * y + z,
    "mad.wide": lambda x, y, z: _wide(np.asarray(x)) * _wide(np.asarray(y)) + z,
    "mad": lambda x, y, z: x * y + z, "fma": _fma, "div": _quotient, "rem": _remainder,
    "max": _maximum, "min": _minimum, "neg": np.negative, "abs": np.abs,
    "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor, "not": np.invert,
    "shl": _shift_left, "shr": _shift_right,
    "ex2": np.exp2, "lg2": np.log2, "rcp": lambda x: (1 / x).astype(x.dtype), "sqrt": np.sqrt,
    "rsqrt": lambda x: (1 / np.sqrt(x)).astype(x.dtype), "sin": np.sin, "cos": np.cos,
    "tanh": np.tanh, "popc": _count_bits, "clz": _leading_zeros, "brev": _reversed,
    "copysign": lambda x, y: np.copysign(y, x),
}  # fmt: skip
_WITH_NAN: dict[Function, Function] = {_maximum: np.maximum, _minimum: np.minimum}
# Registers of two numbers.
_HALVES: dict[str, Any] = {
    "f16x2": np.float16, "bf16x2": "bf16", "s16x2": np.int16, "u16x2": np.uint16,
    "f32x2": np.float32,
}  # fmt: skip
_DIRECTED = {"rm": -np.inf, "rp": np.inf, "rz": 0.0}
# Other results are rounded to nearest, and small ones are kept: nothing that kernels rely on.
_AS_IT_IS = {*_MODES, "rn", "ftz", "approx", "full"}


def _move(instruction: Instruction, registers: Registers) -> Run:
    target, source = instruction.operands
    kind = widths(instruction.opcode)[-1]
    kind = kind if kind == "pred" else f"b{np.dtype(DTYPES[kind]).itemsize * 8}"
    read, write = registers.reader(source, kind), registers.writer(target, kind)
    return lambda threads: write(threads, read(threads))


def _select(instruction: Instruction, registers: Registers) -> Run:
    target, first, second, condition = instruction.operands
    kind = widths(instruction.opcode)[-1]
    one, other = registers.reader(first, kind), registers.reader(second, kind)
    holds, write = registers.reader(condition, "pred"), registers.writer(target, kind)
    return lambda threads: write(threads, np.where(holds(threads), one(threads), other(threads)))


_ORDERED: dict[str, Function] = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater,
    "ge": np.greater_equal, "lo": np.less, "ls": np.less_equal, "hi": np.greater,
    "hs": np.greater_equal,
}  # fmt: skip


def _comparison(name: str) -> Function:
    """By the name in an opcode: those that end with u hold for NaN."""
    if name in ("num", "nan"):
        return lambda x, y: (np.isnan(x) | np.isnan(y)) == (name == "nan")
    if name in _ORDERED:
        if name != "ne":
            return _ORDERED[name]
        return lambda x, y: (x != y) & (x == x) & (y == y)
    opposite = {"equ": "ne", "neu": "eq", "ltu": "ge", "leu": "gt", "gtu": "le", "geu": "lt"}[name]
    unordered = _comparison(opposite)
    return lambda x, y: ~unordered(x, y)


def _compare(instruction: Instruction, registers: Registers) -> Run:
    """setp.OP[.BOOL].type p[|q], a, b[, c]."""
    parts = instruction.opcode.split(".")
    kind = widths(instruction.opcode)[-1]
    joint = next((part for part in parts if part in ("and", "or", "xor")), None)
    operands = list(instruction.operands)
    third = operands.pop() if joint is not None else None
    *targets, first, second = operands
    one, other = registers.reader(first, kind), registers.reader(second, kind)
    function = _comparison(parts[1])
    writes = [registers.writer(target, "pred") for target in targets]
    more = registers.reader(third, "pred") if third is not None else None
    joins = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}

    def run(threads: Threads) -> None:
        holds = function(one(threads), other(threads))
        for write, value in zip(writes, (holds, ~np.asarray(holds)), strict=False):
            if more is not None and joint is not None:
                value = joins[joint](value, more(threads))
            write(threads, value)

    return run


def _convert(instruction: Instruction, registers: Registers) -> Run:
    """cvt[.rounding].to.from d, a[, b]; two sources give the halves of a register."""
    parts = instruction.opcode.split(".")
    if parts[-1] in _BYTES and parts[-2] == "f16x2":
        return _widen_bytes(instruction, registers, _BYTES[parts[-1]])
    if len(widths(instruction.opcode)) != 2:
        raise NotImplementedError(f"the emulator has no {instruction.opcode}")
    to, source = widths(instruction.opcode)
    target, *sources = instruction.operands
    reads = [registers.reader(one, source) for one in sources]
    if len(reads) == 2:  # the first is the upper half
        narrow = _to(to.removesuffix("x2"), parts)
        write = registers.writer(target, "b32")
        high, low = reads

        def pack(threads: Threads) -> None:
            halves = (
                _bits(narrow(np.asarray(one(threads)))).astype(np.uint32) for one in (low, high)
            )
            first, second = halves
            write(threads, first | (second << np.uint32(16)))

        return pack
    (read,) = reads
    write = registers.writer(target, to)
    convert = _to(to, parts)
    if source == "bf16":
        return lambda threads: write(
            threads, convert((read(threads).astype(np.uint32) << np.uint32(16)).view(np.float32))
        )
    return lambda threads: write(threads, convert(np.asarray(read(threads))))


_BYTES = {"e4m3x2": torch.float8_e4m3fn, "e5m2x2": torch.float8_e5m2}


def _widen_bytes(instruction: Instruction, registers: Registers, dtype: torch.dtype) -> Run:
    """Two floats of 8 bits to the halves of a register."""
    target, source = instruction.operands
    read, write = registers.reader(source, "b16"), registers.writer(target, "b32")

    def run(threads: Threads) -> None:
        bits = torch.from_numpy(np.ascontiguousarray(read(threads)).view(np.uint8))
        write(threads, bits.view(dtype).half().numpy().view(np.uint32))

    return run


_ROUNDINGS: dict[str, Function] = {
    "rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil,
}  # fmt: skip


def _to(kind: str, parts: list[str]) -> Function:
    if kind == "bf16":
        return narrow_bf16
    dtype = DTYPES[kind]
    rounding = next((_ROUNDINGS[part] for part in parts if part in _ROUNDINGS), None)

    def convert(values: Any) -> Any:
        if rounding is None:
            return values.astype(dtype)
        rounded = rounding(values)
        if np.issubdtype(dtype, np.floating):
            return rounded.astype(dtype)
        # Conversions to integers saturate, and NaN becomes 0.
        info: Any = np.iinfo(cast(Any, dtype))
        wide = np.clip(np.nan_to_num(rounded.astype(np.float64), nan=0.0), info.min, info.max)
        inside = np.where((wide > info.min) & (wide < info.max), wide, 0).astype(dtype)
        inside = np.where(wide >= info.max, dtype(info.max), inside)
        return np.where(wide <= info.min, dtype(info.min), inside)

    return convert


def _logical(instruction: Instruction, registers: Registers) -> Run:
    """and, or, xor and not, of predicates too."""
    name = instruction.opcode.split(".")[0]
    kind = widths(instruction.opcode)[-1]
    if kind != "pred":
        return _simple(instruction, registers, _FUNCTIONS[name], kind)
    target, *sources = instruction.operands
    functions: dict[str, Function] = {
        "and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor, "not": np.logical_not,
    }  # fmt: skip
    reads = [registers.reader(one, "pred") for one in sources]
    write, function = registers.writer(target, "pred"), functions[name]
    return lambda threads: write(threads, function(*(read(threads) for read in reads)))


_SPECIAL: dict[str, Callable[[Instruction, Registers], Run]] = {
    "mov": _move, "selp": _select, "setp": _compare, "cvt": _convert, "and": _logical,
    "or": _logical, "xor": _logical, "not": _logical, "cvta": _move, **bits.MAKERS,
}  # fmt: skip
