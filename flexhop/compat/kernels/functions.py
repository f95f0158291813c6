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

from flexhop.compat.kernels.arc_functions import ARC_FUNCTIONS
from flexhop.compat.kernels.ptx import (
    INVERSE_PI,
    LN_2,
    LOG2_E,
    LOG10_2,
    PI,
    PI_REST,
    Function,
    number,
    steps,
    without_turns,
)

__all__ = ["FUNCTIONS", "Function", "constant_name", "import_from", "scaled_tanh"]


# Least relative error of erf: erfc(x) = 2**(-x q(x)).
_ERF = (1.62790823, 0.918375969, 0.148938268, -0.0297984611, 0.00299644331)
# sin(r) = r + r**3 q(r**2) and cos(r) = 1 + r**2 q(r**2), for r up to 2.2: beyond pi / 2, because
# 1 / pi is rounded.
_SIN = (-0.166665494, 0.00833122246, -0.000197178786, 2.46321565e-06)
_COS = (-0.499999881, 0.0416662991, -0.00138853607, 2.46537911e-05, -2.47238546e-07)
# erfc(x) = 2**(-x q(x)), off by 2**-22, and up to 3, where it is 2**-15, by 2**-13 of itself.
# Beyond 6, where it is 2**-55, q(6) serves: this polynomial falls there.
_ERFC = (
    1.62792528, 0.918167889, 0.149661809, -0.0307623595,
    0.0034733035, -2.47669741e-05, -2.56164731e-05,
)  # fmt: skip
# log2(1 + f) = f q(f) for f from -1/4 to 1/2.
_LOG2 = (
    1.44269526, -0.72135061, 0.480846852, -0.360338926,
    0.290097654, -0.250628203, 0.203879267, -0.0958817527,
)  # fmt: skip

_EXP = f"""
    mul.f32 t, $1, {number(LOG2_E)};
    ex2.approx.ftz.f32 $0, t;
"""
_EXPM1 = f"""
    mul.f32 t, $1, {number(LOG2_E)};
    ex2.approx.ftz.f32 t, t;
    add.f32 t, t, {number(-1.0)};
    {steps("near", "$1", (1.0, 1 / 2, 1 / 6, 1 / 24))}
    mul.f32 near, near, $1;
    abs.f32 size, $1;
    setp.lt.f32 is_near, size, {number(1 / 32)};
    selp.f32 $0, near, t, is_near;
"""
_LOG1P = f"""
    add.f32 t, $1, {number(1.0)};
    lg2.approx.ftz.f32 t, t;
    mul.f32 t, t, {number(LN_2)};
    {steps("near", "$1", (1.0, -1 / 2, 1 / 3, -1 / 4, 1 / 5))}
    mul.f32 near, near, $1;
    abs.f32 size, $1;
    setp.lt.f32 is_near, size, {number(1 / 16)};
    selp.f32 $0, near, t, is_near;
"""
_LOG = f"""
    lg2.approx.f32 t, $1;
    mul.f32 $0, t, {number(LN_2)};
"""
_LOG10 = f"""
    lg2.approx.f32 t, $1;
    mul.f32 $0, t, {number(LOG10_2)};
"""
_SIGMOID = f"""
    mul.f32 t, $1, {number(-LOG2_E)};
    ex2.approx.ftz.f32 t, t;
    add.f32 t, t, {number(1.0)};
    rcp.approx.ftz.f32 $0, t;
"""
_TANH = f"""
    mul.f32 far, $1, {number(2 * LOG2_E)};
    ex2.approx.ftz.f32 far, far;
    add.f32 far, far, {number(1.0)};
    rcp.approx.ftz.f32 far, far;
    fma.rn.f32 far, far, {number(-2.0)}, {number(1.0)};
    mul.f32 square, $1, $1;
    {steps("near", "square", (-1 / 3, 2 / 15, -17 / 315))}
    mul.f32 near, near, square;
    fma.rn.f32 near, near, $1, $1;
    setp.lt.f32 is_near, square, {number(0.04)};
    selp.f32 $0, near, far, is_near;
"""


def _erfc_of_size(coefficients: tuple[float, ...], argument: str = "size") -> str:
    """erfc(|$1|) in `far`, and |$1| in `size`; the polynomial is that of `argument`."""
    return f"""
    abs.f32 size, $1;
    {"" if argument == "size" else f"min.NaN.f32 {argument}, size, {number(6.0)};"}
    {steps("far", argument, coefficients)}
    mul.f32 far, far, size;
    neg.f32 far, far;
    ex2.approx.ftz.f32 far, far;
"""


_ERF_TEXT = f"""
    {_erfc_of_size(_ERF)}
    sub.f32 far, {number(1.0)}, far;
    copysign.f32 far, $1, far;
    mul.f32 square, $1, $1;
    {steps("near", "square", (1.1283791671, -0.3761263890, 0.1128379167))}
    mul.f32 near, near, $1;
    setp.lt.f32 is_near, size, {number(1 / 16)};
    selp.f32 $0, near, far, is_near;
"""
_ERFC_TEXT = f"""
    {_erfc_of_size(_ERFC, "other")}
    sub.f32 other, {number(2.0)}, far;
    setp.lt.f32 is_negative, $1, {number(0.0)};
    selp.f32 $0, other, far, is_negative;
"""
# Of NaN it is 0. Inductor converts it from 8 bits, which is slow.
_SIGN = f"""
    abs.f32 size, $1;
    setp.gt.f32 is_some, size, {number(0.0)};
    copysign.f32 size, $1, {number(1.0)};
    selp.f32 $0, size, {number(0.0)}, is_some;
"""
# Squares of numbers above 2**60 are computed of 2**-70 times these.
_HYPOT = f"""
    abs.f32 size, $1;
    abs.f32 side, $2;
    max.NaN.f32 larger, size, side;
    setp.gt.f32 is_large, larger, {number(2.0**60)};
    selp.f32 scale, {number(2.0**-70)}, {number(1.0)}, is_large;
    selp.f32 larger, {number(2.0**70)}, {number(1.0)}, is_large;
    mul.f32 size, size, scale;
    mul.f32 side, side, scale;
    mul.f32 side, side, side;
    fma.rn.f32 side, size, size, side;
    sqrt.approx.ftz.f32 side, side;
    mul.f32 $0, side, larger;
"""
# The angle minus a multiple of pi, whose last bit is the sign. Angles beyond the range stay within
# the polynomial's.
_REST = f"""
    {without_turns(PI, PI_REST, INVERSE_PI, 2.2)}
    shl.b32 sign, count, 31;
"""
_WITH_SIGN = """
    mov.b32 bits, near;
    xor.b32 bits, bits, sign;
    mov.b32 $0, bits;
"""
_SIN_TEXT = f"""
    {_REST}
    {steps("near", "square", _SIN)}
    mul.f32 near, near, square;
    fma.rn.f32 near, near, rest, rest;
    {_WITH_SIGN}
"""
_COS_TEXT = f"""
    {_REST}
    {steps("near", "square", (1.0, *_COS))}
    {_WITH_SIGN}
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
    add.f32 rest, rest, {number(-1.0)};
    cvt.rn.f32.s32 far, exponent;
    mul.f32 far, far, {number(2.0**-23)};
    {steps("near", "rest", _LOG2)}
    fma.rn.f32 near, near, rest, far;
    abs.f32 far, far;
    setp.lt.f32 is_usual, far, {number(126.5)};
    selp.f32 $0, near, end, is_usual;
"""
# $1: logarithm of the absolute value, $2: base, $3: exponent. An odd power of a negative base is
# negative, a non-integer one is NaN.
_POWER = f"""
    mul.f32 t, $1, $3;
    ex2.approx.ftz.f32 t, t;
    cvt.rni.f32.f32 whole, $3;
    mul.f32 half, $3, {number(0.5)};
    cvt.rni.f32.f32 even, half;
    neg.f32 negative, t;
    setp.ne.f32 differs, even, half;
    selp.f32 negative, negative, t, differs;
    setp.ne.f32 differs, whole, $3;
    selp.f32 negative, {number(float("nan"))}, negative, differs;
    setp.lt.f32 differs, $2, {number(0.0)};
    selp.f32 t, negative, t, differs;
    setp.eq.f32 differs, $3, {number(0.0)};
    selp.f32 $0, {number(1.0)}, t, differs;
"""

FUNCTIONS: dict[str, Function] = {
    **ARC_FUNCTIONS,
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
    "hypot": Function(_HYPOT, "size, side, larger, scale", predicates="is_large"),
    "sin": Function(_SIN_TEXT, "turns, rest, square, near", "count, sign, bits"),
    "cos": Function(_COS_TEXT, "turns, rest, square, near", "count, sign, bits"),
    "sqrt": Function("sqrt.approx.ftz.f32 $0, $1;"),
    "rsqrt": Function("rsqrt.approx.ftz.f32 $0, $1;"),
    "reciprocal": Function("rcp.approx.ftz.f32 $0, $1;"),
    "sign": Function(_SIGN, "size", predicates="is_some"),
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
        mul.f32 t, $1, {number(2 * LOG2_E * inner)};
        ex2.approx.ftz.f32 t, t;
        add.f32 t, t, {number(1.0)};
        rcp.approx.ftz.f32 t, t;
        fma.rn.f32 $0, t, {number(-2 * outer)}, {number(outer)};
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
