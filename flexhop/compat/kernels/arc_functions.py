"""Hyperbolic functions, tangents and inverse functions as branch-free PTX; see functions.py."""

from __future__ import annotations

from flexhop.compat.kernels.ptx import (
    INVERSE_PI,
    LN_2,
    LOG2_E,
    PI,
    Function,
    number,
    steps,
    without_turns,
)

# Half of pi in two parts; tan(r) = r + r**3 q(r**2) for r up to pi / 4.
_HALF_PI, _HALF_PI_REST = 1.5707963705062866, -4.371139000186243e-08
_TAN = (0.333353393, 0.132894521, 0.0570478521, 0.0127060509, 0.0203074449)
# Least relative error: atan(x) = x q(x**2) for x up to 1, asin(x) = x + x**3 q(x**2) up to 1/2.
_ATAN = (
    0.999999417, -0.333270134, 0.198873216, -0.135121768,
    0.0843541023, -0.0374429875, 0.00800690181,
)  # fmt: skip
_ASIN = (0.166655632, 0.0754093593, 0.0400071611, 0.0500109037)
# Half of exp(|x|) is finite a little longer than exp(|x|) itself.
_HALF_EXP = f"""
    abs.f32 size, $1;
    fma.rn.f32 half, size, {number(LOG2_E)}, {number(-1.0)};
    ex2.approx.ftz.f32 half, half;
    rcp.approx.ftz.f32 rest, half;
"""
_SINH = f"""
    {_HALF_EXP}
    fma.rn.f32 far, rest, {number(-0.25)}, half;
    mul.f32 square, size, size;
    {steps("near", "square", (1.0, 1 / 6, 1 / 120, 1 / 5040))}
    mul.f32 near, near, size;
    setp.lt.f32 is_near, size, {number(0.5)};
    selp.f32 far, near, far, is_near;
    copysign.f32 $0, $1, far;
"""
_COSH = f"""
    {_HALF_EXP}
    fma.rn.f32 $0, rest, {number(0.25)}, half;
"""
_ASINH = f"""
    abs.f32 size, $1;
    mul.f32 square, size, size;
    add.f32 far, square, {number(1.0)};
    sqrt.approx.ftz.f32 far, far;
    setp.gt.f32 differs, size, {number(4096.0)};
    selp.f32 far, size, far, differs;
    add.f32 far, far, size;
    lg2.approx.ftz.f32 far, far;
    mul.f32 far, far, {number(LN_2)};
    {steps("near", "square", (1.0, -1 / 6, 3 / 40, -15 / 336))}
    mul.f32 near, near, size;
    setp.lt.f32 differs, size, {number(0.25)};
    selp.f32 far, near, far, differs;
    copysign.f32 $0, $1, far;
"""
# ln(1 + t + root(t (t + 2))) for x = 1 + t; the root of a negative number is NaN.
_ACOSH = f"""
    add.f32 t, $1, {number(-1.0)};
    sqrt.approx.ftz.f32 root, t;
    add.f32 other, $1, {number(1.0)};
    sqrt.approx.ftz.f32 other, other;
    fma.rn.f32 root, root, other, t;
    add.f32 root, root, {number(1.0)};
    lg2.approx.ftz.f32 root, root;
    mul.f32 $0, root, {number(LN_2)};
"""
_ATANH = f"""
    add.f32 far, {number(1.0)}, $1;
    lg2.approx.ftz.f32 far, far;
    sub.f32 other, {number(1.0)}, $1;
    lg2.approx.ftz.f32 other, other;
    sub.f32 far, far, other;
    mul.f32 far, far, {number(LN_2 / 2)};
    mul.f32 square, $1, $1;
    {steps("near", "square", (1.0, 1 / 3, 1 / 5, 1 / 7))}
    mul.f32 near, near, $1;
    setp.lt.f32 is_near, square, {number(1 / 64)};
    selp.f32 $0, near, far, is_near;
"""
_ATAN_TEXT = f"""
    abs.f32 size, $1;
    rcp.approx.ftz.f32 far, size;
    setp.gt.f32 is_far, size, {number(1.0)};
    selp.f32 size, far, size, is_far;
    mul.f32 square, size, size;
    {steps("near", "square", _ATAN)}
    mul.f32 near, near, size;
    sub.f32 far, {number(_HALF_PI)}, near;
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
    max.NaN.f32 far, far, {number(2.0**-126)};
    rcp.approx.ftz.f32 size, far;
    mul.f32 size, size, near;
    mul.f32 square, size, size;
    {steps("near", "square", _ATAN)}
    mul.f32 near, near, size;
    sub.f32 far, {number(_HALF_PI)}, near;
    selp.f32 near, far, near, is_far;
    copysign.f32 side, $2, {number(1.0)};
    setp.lt.f32 differs, side, {number(0.0)};
    sub.f32 far, {number(PI)}, near;
    selp.f32 near, far, near, differs;
    copysign.f32 $0, $1, near;
"""
# asin(x) of small x in `near`; above 1/2, asin(root((1 - x) / 2)), the half of acos(x).
_ASIN_PART = f"""
    abs.f32 size, $1;
    fma.rn.f32 half, size, {number(-0.5)}, {number(0.5)};
    mul.f32 square, size, size;
    setp.gt.f32 is_far, size, {number(0.5)};
    selp.f32 square, half, square, is_far;
    sqrt.approx.ftz.f32 half, half;
    selp.f32 size, half, size, is_far;
    {steps("near", "square", _ASIN)}
    mul.f32 near, near, square;
    fma.rn.f32 near, near, size, size;
"""
_ASIN_TEXT = f"""
    {_ASIN_PART}
    fma.rn.f32 far, near, {number(-2.0)}, {number(_HALF_PI)};
    selp.f32 near, far, near, is_far;
    copysign.f32 $0, $1, near;
"""
_ACOS = f"""
    {_ASIN_PART}
    add.f32 far, near, near;
    sub.f32 other, {number(PI)}, far;
    setp.lt.f32 is_negative, $1, {number(0.0)};
    selp.f32 far, other, far, is_negative;
    copysign.f32 near, $1, near;
    sub.f32 near, {number(_HALF_PI)}, near;
    selp.f32 $0, far, near, is_far;
"""
# The angle minus a multiple of half of pi; after an odd multiple, tan(x) is -1 / tan(rest).
_TAN_TEXT = f"""
    {without_turns(_HALF_PI, _HALF_PI_REST, 2 * INVERSE_PI, 0.9)}
    {steps("near", "square", _TAN)}
    mul.f32 near, near, square;
    fma.rn.f32 near, near, rest, rest;
    rcp.approx.ftz.f32 far, near;
    neg.f32 far, far;
    and.b32 count, count, 1;
    setp.ne.s32 is_odd, count, 0;
    selp.f32 $0, far, near, is_odd;
"""

ARC_FUNCTIONS: dict[str, Function] = {
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
    "tan": Function(_TAN_TEXT, "turns, rest, square, near, far", "count", "is_odd"),
}
