"""Text of inline PTX assembly: numbers, polynomials, registers."""

from __future__ import annotations

import struct
from typing import NamedTuple

LOG2_E, LN_2, LOG10_2 = 1.4426950408889634, 0.6931471805599453, 0.3010299956639812
INVERSE_PI = 0.3183098861837907
# Pi in two parts, and 1.5 * 2**23: a sum with it has no fractional digits.
PI, PI_REST, WHOLE = 3.1415927410125732, -8.742277657347586e-08, 12582912.0


class Function(NamedTuple):
    """Inline assembly with result $0 and arguments $1, ..., and the names of its registers."""

    body: str
    floats: str = ""
    words: str = ""
    predicates: str = ""

    @property
    def text(self) -> str:
        """The text for inline assembly."""
        kinds = (("f32", self.floats), ("b32", self.words), ("pred", self.predicates))
        registers = (f".reg .{kind} {names};" for kind, names in kinds if names)
        lines = [*registers, *(line.strip() for line in self.body.strip().splitlines())]
        return "{ " + " ".join(lines) + " }"


def number(value: float) -> str:
    """An fp32 number in PTX syntax."""
    return f"0f{struct.unpack('<I', struct.pack('<f', value))[0]:08X}"


def steps(result: str, x: str, coefficients: tuple[float, ...]) -> str:
    """Horner's rule: a polynomial of `x`, the constant term first."""
    *rest, highest = map(number, coefficients)
    first = f"mov.f32 {result}, {highest};"
    return "\n".join([first, *(f"fma.rn.f32 {result}, {result}, {x}, {c};" for c in rest[::-1])])


def without_turns(turn: float, beyond: float, inverse: float, most: float) -> str:
    """$1 minus the nearest multiple of `turn` in `rest`, its `square`, and the multiple's bits in
    `count`, whose last one says whether it is odd.

    Args:
        turn, beyond: a number in two parts.
        inverse: of their sum.
        most: the largest rest, also of numbers so large that the multiple is inexact.
    """
    return f"""
    fma.rn.f32 turns, $1, {number(inverse)}, {number(WHOLE)};
    mov.b32 count, turns;
    add.f32 turns, turns, {number(-WHOLE)};
    fma.rn.f32 rest, turns, {number(-turn)}, $1;
    fma.rn.f32 rest, turns, {number(-beyond)}, rest;
    min.NaN.f32 rest, rest, {number(most)};
    max.NaN.f32 rest, rest, {number(-most)};
    mul.f32 square, rest, rest;
"""
