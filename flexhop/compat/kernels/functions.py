"""Functions of one fp32 number as branch-free PTX, for kernels of 16-bit operands.

CUDA's library functions branch, and each score that a thread holds would branch separately; their
text is repeated for each of these scores. The errors of the versions here are far below one
rounding to 16 bits: less than 2**-17 of the value, or 2**-21 if that is more. Each version is one
block of inline assembly. LLVM's compile time grows with the number of instructions, and its
vectoriser would pack a thread's comparisons into bits.

Ranges: absolute divisors from 2**-126 to 2**126, and in atan2 the larger argument; sin and cos of
angles up to 10**7 (results for larger ones stay between -1 and 1), tan of angles up to 10**5;
asinh up to 10**38. Subnormal results are 0.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

__all__ = ["FUNCTIONS", "Function", "constant_name", "import_from", "scaled_tanh"]


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


def _number(value: float) -> str:
    """An fp32 number in PTX syntax."""
    return f"0f{struct.unpack('<I', struct.pack('<f', value))[0]:08X}"


def _steps(result: str, x: str, coefficients: tuple[float, ...]) -> str:
    """Horner's rule: a polynomial of `x`, the constant term first."""
    *rest, highest = map(_number, coefficients)
    first = f"mov.f32 {result}, {highest};"
    return "\n".join([first, *(f"fma.rn.f32 {result}, {result}, {x}, {c};" for c in rest[::-1])])


_LOG2_E, _LN_2, _LOG10_2 = 1.4426950408889634, 0.6931471805599453, 0.3010299956639812
_INVERSE_PI = 0.3183098861837907
# Pi in two parts, and 1.5 * 2**23: a sum with it has no fractional digits.
_PI, _PI_REST, _WHOLE = 3.1415927410125732, -8.742277657347586e-08, 12582912.0
# Least relative error of erf: erfc(x) = 2**(-x q(x)).
_ERF = (1.62790823, 0.918375969, 0.148938268, -0.0297984611, 0.00299644331)
# sin(r) = r + r**3 q(r**2) and cos(r) = 1 + r**2 q(r**2), for r up to 2.2: beyond pi / 2, because
# 1 / pi is rounded.
_SIN = (-0.166665494, 0.00833122246, -0.000197178786, 2.46321565e-06)
_COS = (-0.499999881, 0.0416662991, -0.00138853607, 2.46537911e-05, -2.47238546e-07)
# Half of pi in two parts; tan(r) = r + r**3 q(r**2) for r up to pi / 4.
_HALF_PI, _HALF_PI_REST = 1.5707963705062866, -4.371139000186243e-08
_TAN = (0.333353393, 0.132894521, 0.0570478521, 0.0127060509, 0.0203074449)
# Least relative error: atan(x) = x q(x**2) for x up to 1, asin(x) = x + x**3 q(x**2) up to 1/2.
_ATAN = (
    0.999999417, -0.333270134, 0.198873216, -0.135121768,
    0.0843541023, -0.0374429875, 0.00800690181,
)  # fmt: skip
_ASIN = (0.166655632, 0.0754093593, 0.0400071611, 0.0500109037)
# Least error of erfc(x) = 2**(-x q(x)), relative up to 3, where it is 2**-15.
_ERFC = (1.62776833, 0.919200477, 0.147460754, -0.028782415, 0.00276225941)
# log2(1 + f) = f q(f) for f from -1/4 to 1/2.
_LOG2 = (
    1.44269526, -0.72135061, 0.480846852, -0.360338926,
    0.290097654, -0.250628203, 0.203879267, -0.0958817527,
)  # fmt: skip

_EXP = f"""
    mul.f32 t, $1, {_number(_LOG2_E)};
    ex2.approx.ftz.f32 $0, t;
"""
_EXPM1 = f"""
    mul.f32 t, $1, {_number(_LOG2_E)};
    ex2.approx.ftz.f32 t, t;
    add.f32 t, t, {_number(-1.0)};
    {_steps("near", "$1", (1.0, 1 / 2, 1 / 6, 1 / 24))}
    mul.f32 near, near, $1;
    abs.f32 size, $1;
    setp.lt.f32 is_near, size, {_number(1 / 32)};
    selp.f32 $0, near, t, is_near;
"""
_LOG1P = f"""
    add.f32 t, $1, {_number(1.0)};
    lg2.approx.ftz.f32 t, t;
    mul.f32 t, t, {_number(_LN_2)};
    {_steps("near", "$1", (1.0, -1 / 2, 1 / 3, -1 / 4, 1 / 5))}
    mul.f32 near, near, $1;
    abs.f32 size, $1;
    setp.lt.f32 is_near, size, {_number(1 / 16)};
    selp.f32 $0, near, t, is_near;
"""
_LOG = f"""
    lg2.approx.f32 t, $1;
    mul.f32 $0, t, {_number(_LN_2)};
"""
_LOG10 = f"""
    lg2.approx.f32 t, $1;
    mul.f32 $0, t, {_number(_LOG10_2)};
"""
_SIGMOID = f"""
    mul.f32 t, $1, {_number(-_LOG2_E)};
    ex2.approx.ftz.f32 t, t;
    add.f32 t, t, {_number(1.0)};
    rcp.approx.ftz.f32 $0, t;
"""
_TANH = f"""
    mul.f32 far, $1, {_number(2 * _LOG2_E)};
    ex2.approx.ftz.f32 far, far;
    add.f32 far, far, {_number(1.0)};
    rcp.approx.ftz.f32 far, far;
    fma.rn.f32 far, far, {_number(-2.0)}, {_number(1.0)};
    mul.f32 square, $1, $1;
    {_steps("near", "square", (-1 / 3, 2 / 15, -17 / 315))}
    mul.f32 near, near, square;
    fma.rn.f32 near, near, $1, $1;
    setp.lt.f32 is_near, square, {_number(0.04)};
    selp.f32 $0, near, far, is_near;
"""
_ERF_TEXT = f"""
    abs.f32 size, $1;
    {_steps("far", "size", _ERF)}
    mul.f32 far, far, size;
    neg.f32 far, far;
    ex2.approx.ftz.f32 far, far;
    sub.f32 far, {_number(1.0)}, far;
    copysign.f32 far, $1, far;
    mul.f32 square, $1, $1;
    {_steps("near", "square", (1.1283791671, -0.3761263890, 0.1128379167))}
    mul.f32 near, near, $1;
    setp.lt.f32 is_near, size, {_number(1 / 16)};
    selp.f32 $0, near, far, is_near;
"""
_ERFC_TEXT = f"""
    abs.f32 size, $1;
    {_steps("far", "size", _ERFC)}
    mul.f32 far, far, size;
    neg.f32 far, far;
    ex2.approx.ftz.f32 far, far;
    sub.f32 other, {_number(2.0)}, far;
    setp.lt.f32 is_negative, $1, {_number(0.0)};
    selp.f32 $0, other, far, is_negative;
"""
# Half of exp(|x|) is finite a little longer than exp(|x|) itself.
_HALF_EXP = f"""
    abs.f32 size, $1;
    fma.rn.f32 half, size, {_number(_LOG2_E)}, {_number(-1.0)};
    ex2.approx.ftz.f32 half, half;
    rcp.approx.ftz.f32 rest, half;
"""
_SINH = f"""
    {_HALF_EXP}
    fma.rn.f32 far, rest, {_number(-0.25)}, half;
    mul.f32 square, size, size;
    {_steps("near", "square", (1.0, 1 / 6, 1 / 120, 1 / 5040))}
    mul.f32 near, near, size;
    setp.lt.f32 is_near, size, {_number(0.5)};
    selp.f32 far, near, far, is_near;
    copysign.f32 $0, $1, far;
"""
_COSH = f"""
    {_HALF_EXP}
    fma.rn.f32 $0, rest, {_number(0.25)}, half;
"""
_ASINH = f"""
    abs.f32 size, $1;
    mul.f32 square, size, size;
    add.f32 far, square, {_number(1.0)};
    sqrt.approx.ftz.f32 far, far;
    setp.gt.f32 differs, size, {_number(4096.0)};
    selp.f32 far, size, far, differs;
    add.f32 far, far, size;
    lg2.approx.ftz.f32 far, far;
    mul.f32 far, far, {_number(_LN_2)};
    {_steps("near", "square", (1.0, -1 / 6, 3 / 40, -15 / 336))}
    mul.f32 near, near, size;
    setp.lt.f32 differs, size, {_number(0.25)};
    selp.f32 far, near, far, differs;
    copysign.f32 $0, $1, far;
"""
# ln(1 + t + root(t (t + 2))) for x = 1 + t; the root of a negative number is NaN.
_ACOSH = f"""
    add.f32 t, $1, {_number(-1.0)};
    sqrt.approx.ftz.f32 root, t;
    add.f32 other, $1, {_number(1.0)};
    sqrt.approx.ftz.f32 other, other;
    fma.rn.f32 root, root, other, t;
    add.f32 root, root, {_number(1.0)};
    lg2.approx.ftz.f32 root, root;
    mul.f32 $0, root, {_number(_LN_2)};
"""
_ATANH = f"""
    add.f32 far, {_number(1.0)}, $1;
    lg2.approx.ftz.f32 far, far;
    sub.f32 other, {_number(1.0)}, $1;
    lg2.approx.ftz.f32 other, other;
    sub.f32 far, far, other;
    mul.f32 far, far, {_number(_LN_2 / 2)};
    mul.f32 square, $1, $1;
    {_steps("near", "square", (1.0, 1 / 3, 1 / 5, 1 / 7))}
    mul.f32 near, near, $1;
    setp.lt.f32 is_near, square, {_number(1 / 64)};
    selp.f32 $0, near, far, is_near;
"""
_ATAN_TEXT = f"""
    abs.f32 size, $1;
    rcp.approx.ftz.f32 far, size;
    setp.gt.f32 is_far, size, {_number(1.0)};
    selp.f32 size, far, size, is_far;
    mul.f32 square, size, size;
    {_steps("near", "square", _ATAN)}
    mul.f32 near, near, size;
    sub.f32 far, {_number(_HALF_PI)}, near;
    selp.f32 near, far, near, is_far;
    copysign.f32 $0, $1, near;
"""
# $1 / $2; both may be 0.
_ATAN2 = f"""
    abs.f32 size, $1;
    abs.f32 side, $2;
    max.NaN.f32 far, size, side;
    min.NaN.f32 near, size, side;
    setp.gt.f32 is_far, size, side;
    rcp.approx.ftz.f32 size, far;
    mul.f32 size, size, near;
    setp.eq.f32 differs, far, {_number(0.0)};
    selp.f32 size, {_number(0.0)}, size, differs;
    mul.f32 square, size, size;
    {_steps("near", "square", _ATAN)}
    mul.f32 near, near, size;
    sub.f32 far, {_number(_HALF_PI)}, near;
    selp.f32 near, far, near, is_far;
    copysign.f32 side, $2, {_number(1.0)};
    setp.lt.f32 differs, side, {_number(0.0)};
    sub.f32 far, {_number(_PI)}, near;
    selp.f32 near, far, near, differs;
    copysign.f32 $0, $1, near;
"""
# asin(x) of small x in `near`; above 1/2, asin(root((1 - x) / 2)), the half of acos(x).
_ASIN_PART = f"""
    abs.f32 size, $1;
    fma.rn.f32 half, size, {_number(-0.5)}, {_number(0.5)};
    mul.f32 square, size, size;
    setp.gt.f32 is_far, size, {_number(0.5)};
    selp.f32 square, half, square, is_far;
    sqrt.approx.ftz.f32 half, half;
    selp.f32 size, half, size, is_far;
    {_steps("near", "square", _ASIN)}
    mul.f32 near, near, square;
    fma.rn.f32 near, near, size, size;
"""
_ASIN_TEXT = f"""
    {_ASIN_PART}
    fma.rn.f32 far, near, {_number(-2.0)}, {_number(_HALF_PI)};
    selp.f32 near, far, near, is_far;
    copysign.f32 $0, $1, near;
"""
_ACOS = f"""
    {_ASIN_PART}
    add.f32 far, near, near;
    sub.f32 other, {_number(_PI)}, far;
    setp.lt.f32 is_negative, $1, {_number(0.0)};
    selp.f32 far, other, far, is_negative;
    copysign.f32 near, $1, near;
    sub.f32 near, {_number(_HALF_PI)}, near;
    selp.f32 $0, far, near, is_far;
"""
# Squares of numbers above 2**60 are computed of 2**-70 times these.
_HYPOT = f"""
    abs.f32 size, $1;
    abs.f32 side, $2;
    max.NaN.f32 larger, size, side;
    setp.gt.f32 is_large, larger, {_number(2.0**60)};
    selp.f32 scale, {_number(2.0**-70)}, {_number(1.0)}, is_large;
    selp.f32 larger, {_number(2.0**70)}, {_number(1.0)}, is_large;
    mul.f32 size, size, scale;
    mul.f32 side, side, scale;
    mul.f32 side, side, side;
    fma.rn.f32 side, size, size, side;
    sqrt.approx.ftz.f32 side, side;
    mul.f32 $0, side, larger;
"""
# The angle minus a multiple of pi, whose last bit is the sign. A minimum keeps angles beyond the
# range within the polynomial's.
_REST = f"""
    fma.rn.f32 turns, $1, {_number(_INVERSE_PI)}, {_number(_WHOLE)};
    mov.b32 sign, turns;
    shl.b32 sign, sign, 31;
    add.f32 turns, turns, {_number(-_WHOLE)};
    fma.rn.f32 rest, turns, {_number(-_PI)}, $1;
    fma.rn.f32 rest, turns, {_number(-_PI_REST)}, rest;
    min.NaN.f32 rest, rest, {_number(2.2)};
    max.NaN.f32 rest, rest, {_number(-2.2)};
    mul.f32 square, rest, rest;
"""
_WITH_SIGN = """
    mov.b32 bits, near;
    xor.b32 bits, bits, sign;
    mov.b32 $0, bits;
"""
_SIN_TEXT = f"""
    {_REST}
    {_steps("near", "square", _SIN)}
    mul.f32 near, near, square;
    fma.rn.f32 near, near, rest, rest;
    {_WITH_SIGN}
"""
_COS_TEXT = f"""
    {_REST}
    {_steps("near", "square", (1.0, *_COS))}
    {_WITH_SIGN}
"""
# The angle minus a multiple of half of pi; after an odd multiple, tan(x) is -1 / tan(rest).
_TAN_TEXT = f"""
    fma.rn.f32 turns, $1, {_number(2 * _INVERSE_PI)}, {_number(_WHOLE)};
    mov.b32 odd, turns;
    and.b32 odd, odd, 1;
    add.f32 turns, turns, {_number(-_WHOLE)};
    fma.rn.f32 rest, turns, {_number(-_HALF_PI)}, $1;
    fma.rn.f32 rest, turns, {_number(-_HALF_PI_REST)}, rest;
    min.NaN.f32 rest, rest, {_number(0.9)};
    max.NaN.f32 rest, rest, {_number(-0.9)};
    mul.f32 square, rest, rest;
    {_steps("near", "square", _TAN)}
    mul.f32 near, near, square;
    fma.rn.f32 near, near, rest, rest;
    rcp.approx.ftz.f32 far, near;
    neg.f32 far, far;
    setp.ne.s32 is_odd, odd, 0;
    selp.f32 $0, far, near, is_odd;
"""
# For absolute values, with full precision also near 1: exponent, and polynomial of the rest, which
# starts at 3/4. Values that are not between 0 and infinity are left to lg2.
_LOG2_TEXT = f"""
    abs.f32 size, $1;
    lg2.approx.f32 end, size;
    mov.b32 bits, size;
    sub.s32 exponent, bits, {0x3F400000};
    and.b32 exponent, exponent, {0xFF800000};
    sub.s32 bits, bits, exponent;
    mov.b32 rest, bits;
    add.f32 rest, rest, {_number(-1.0)};
    cvt.rn.f32.s32 far, exponent;
    mul.f32 far, far, {_number(2.0**-23)};
    {_steps("near", "rest", _LOG2)}
    fma.rn.f32 near, near, rest, far;
    abs.f32 far, far;
    setp.lt.f32 is_usual, far, {_number(126.5)};
    selp.f32 $0, near, end, is_usual;
"""
# $1: logarithm of the absolute value, $2: base, $3: exponent. An odd power of a negative base is
# negative, a non-integer one is NaN.
_POWER = f"""
    mul.f32 t, $1, $3;
    ex2.approx.ftz.f32 t, t;
    cvt.rni.f32.f32 whole, $3;
    mul.f32 half, $3, {_number(0.5)};
    cvt.rni.f32.f32 even, half;
    neg.f32 negative, t;
    setp.ne.f32 differs, even, half;
    selp.f32 negative, negative, t, differs;
    setp.ne.f32 differs, whole, $3;
    selp.f32 negative, {_number(float("nan"))}, negative, differs;
    setp.lt.f32 differs, $2, {_number(0.0)};
    selp.f32 t, negative, t, differs;
    setp.eq.f32 differs, $3, {_number(0.0)};
    selp.f32 $0, {_number(1.0)}, t, differs;
"""

FUNCTIONS: dict[str, Function] = {
    "exp": Function(_EXP, "t"),
    "exp2": Function("ex2.approx.ftz.f32 $0, $1;"),
    "expm1": Function(_EXPM1, "t, near, size", predicates="is_near"),
    "log": Function(_LOG, "t"),
    "log2": Function("lg2.approx.f32 $0, $1;"),
    "log10": Function(_LOG10, "t"),
    "log1p": Function(_LOG1P, "t, near, size", predicates="is_near"),
    "sigmoid": Function(_SIGMOID, "t"),
    "tanh": Function(_TANH, "far, near, square", predicates="is_near"),
    "erf": Function(_ERF_TEXT, "size, far, near, square", predicates="is_near"),
    "erfc": Function(_ERFC_TEXT, "size, far, other", predicates="is_negative"),
    "sinh": Function(_SINH, "size, half, rest, far, square, near", predicates="is_near"),
    "cosh": Function(_COSH, "size, half, rest"),
    "asinh": Function(_ASINH, "size, square, far, near", predicates="differs"),
    "acosh": Function(_ACOSH, "t, root, other"),
    "atanh": Function(_ATANH, "far, other, square, near", predicates="is_near"),
    "atan": Function(_ATAN_TEXT, "size, far, square, near", predicates="is_far"),
    "atan2": Function(_ATAN2, "size, side, far, near, square", predicates="is_far, differs"),
    "asin": Function(_ASIN_TEXT, "size, half, square, near, far", predicates="is_far"),
    "acos": Function(
        _ACOS, "size, half, square, near, far, other", predicates="is_far, is_negative"
    ),
    "hypot": Function(_HYPOT, "size, side, larger, scale", predicates="is_large"),
    "tan": Function(_TAN_TEXT, "turns, rest, square, near, far", "odd", "is_odd"),
    "sin": Function(_SIN_TEXT, "turns, rest, square, near", "sign, bits"),
    "cos": Function(_COS_TEXT, "turns, rest, square, near", "sign, bits"),
    "sqrt": Function("sqrt.approx.ftz.f32 $0, $1;"),
    "rsqrt": Function("rsqrt.approx.ftz.f32 $0, $1;"),
    "divide": Function("rcp.approx.ftz.f32 t, $2;\nmul.f32 $0, $1, t;", "t"),
    "log2_of_size": Function(
        _LOG2_TEXT, "size, end, rest, far, near", "bits, exponent", "is_usual"
    ),
    "power": Function(_POWER, "t, whole, half, even, negative", predicates="differs"),
}


def scaled_tanh(inner: float, outer: float) -> Function:
    """outer * tanh(inner * x), off by up to 2**-21 of `outer`; less than half as long as tanh.

    Small results have as few digits as that leaves them.
    """
    return Function(
        f"""
        mul.f32 t, $1, {_number(2 * _LOG2_E * inner)};
        ex2.approx.ftz.f32 t, t;
        add.f32 t, t, {_number(1.0)};
        rcp.approx.ftz.f32 t, t;
        fma.rn.f32 $0, t, {_number(-2 * outer)}, {_number(outer)};
        """,
        "t",
    )


def constant_name(name: str) -> str:
    """The name of a function's text in a kernel."""
    return f"PTX_{name.upper()}"


def import_from(module: str) -> str:
    """The line that imports all texts, and the functions that run them, from a module."""
    names = ("run_1", "run_2", "run_3", *map(constant_name, FUNCTIONS))
    return f"from {module} import ({', '.join(names)})\n"
