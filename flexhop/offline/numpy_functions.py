"""numpy counterparts of CUDA's library functions and of PTX instructions."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

__all__ = ["assembly_function", "library_function"]

Function = Callable[..., np.ndarray]


def _of_torch(function: Callable[..., torch.Tensor]) -> Function:
    def apply(*args: np.ndarray) -> np.ndarray:
        return function(*(torch.from_numpy(np.ascontiguousarray(a)) for a in args)).numpy()

    return apply


_FUNCTIONS: dict[str, Function] = {
    "acos": np.arccos,
    "acosh": np.arccosh,
    "abs": np.abs,
    "asin": np.arcsin,
    "asinh": np.arcsinh,
    "atan": np.arctan,
    "atan2": np.arctan2,
    "atanh": np.arctanh,
    "cbrt": np.cbrt,
    "ceil": np.ceil,
    "copysign": np.copysign,
    "cos": np.cos,
    "cosh": np.cosh,
    "cyl_bessel_i0": _of_torch(torch.special.i0),
    "cyl_bessel_i1": _of_torch(torch.special.i1),
    "erf": _of_torch(torch.erf),
    "erfc": _of_torch(torch.erfc),
    "erfinv": _of_torch(torch.erfinv),
    "erfcx": _of_torch(torch.special.erfcx),
    "exp": np.exp,
    "exp10": lambda x: np.power(np.asarray(10, x.dtype), x),
    "exp2": np.exp2,
    "expm1": np.expm1,
    "fabs": np.abs,
    "fast_cos": np.cos,
    "fast_exp": np.exp,
    "fast_log": np.log,
    "fast_pow": np.power,
    "fast_sin": np.sin,
    "fast_tanh": np.tanh,
    "fdim": lambda x, y: np.maximum(x - y, 0),
    "finite": np.isfinite,
    "floor": np.floor,
    # Rounded to nearest on their own, never fused with what follows.
    **{f"{kind}add_rn": np.add for kind in "fd"},
    **{f"{kind}div_rn": np.divide for kind in "fd"},
    **{f"{kind}mul_rn": np.multiply for kind in "fd"},
    **{f"{kind}sub_rn": np.subtract for kind in "fd"},
    "fma": lambda x, y, z: x * y + z,
    "fmax": np.fmax,
    "fmin": np.fmin,
    "fmod": np.fmod,
    "hypot": np.hypot,
    "isfinite": np.isfinite,
    "isinf": np.isinf,
    "isnan": np.isnan,
    "j0": _of_torch(torch.special.bessel_j0),
    "j1": _of_torch(torch.special.bessel_j1),
    "ldexp": np.ldexp,
    "lgamma": _of_torch(torch.lgamma),
    "llrint": np.rint,
    "llround": lambda x: np.trunc(x + np.copysign(0.5, x)),
    "log": np.log,
    "log10": np.log10,
    "log1p": np.log1p,
    "log2": np.log2,
    "nearbyint": np.rint,
    "nextafter": np.nextafter,
    "pow": np.power,
    "powi": np.power,
    "rcbrt": lambda x: 1 / np.cbrt(x),
    "rint": np.rint,
    "round": lambda x: np.trunc(x + np.copysign(0.5, x)),
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "signbit": np.signbit,
    "sin": np.sin,
    "sinh": np.sinh,
    "sqrt": np.sqrt,
    "tan": np.tan,
    "tanh": np.tanh,
    "trunc": np.trunc,
}

# Instruction without its type, rounding and accuracy suffixes.
_INSTRUCTIONS: dict[str, Function] = {
    "abs": np.abs,
    "add": np.add,
    "cos": np.cos,
    "cvt": lambda x: x,
    "div": np.divide,
    "ex2": np.exp2,
    "fma": lambda x, y, z: x * y + z,
    "lg2": np.log2,
    "max": np.fmax,
    "min": np.fmin,
    "mov": lambda x: x,
    "mul": np.multiply,
    "neg": np.negative,
    "rcp": lambda x: 1 / x,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "sin": np.sin,
    "sqrt": np.sqrt,
    "sub": np.subtract,
    "tanh": np.tanh,
}

_INSTRUCTION = re.compile(r"([a-z]\w*)((?:\.\w+)*)\s+\$0\s*,\s*(\$\d+(?:\s*,\s*\$\d+)*)\s*;?")


def library_function(symbol: str) -> Function:
    """The counterpart of a libdevice symbol, e.g. "__nv_tanhf".

    Raises:
        NotImplementedError: there is none in the table.
    """
    name = symbol.removeprefix("__nv_")
    # A suffix tells the type: tanhf, isnand, but also erf without one.
    for candidate in (name, name[:-1]):
        if candidate in _FUNCTIONS:
            return _FUNCTIONS[candidate]
    raise NotImplementedError(
        f"The interpreter has no counterpart of the library function {symbol}; "
        f"add it to {__name__}."
    )


def assembly_function(text: str) -> Function:
    """The counterpart of inline assembly of one instruction, e.g. "tanh.approx.f32 $0, $1;".

    Raises:
        NotImplementedError: several instructions, packed types, or none in the table.
    """
    match = _INSTRUCTION.fullmatch(text.strip(" {}\n"))  # one instruction may stand in a block
    packed = match is not None and re.search(r"x\d", match[2])
    if match is None or packed or match[1] not in _INSTRUCTIONS:
        raise NotImplementedError(
            f"The interpreter knows inline assembly of one unpacked instruction on $0, $1, ... "
            f"among {sorted(_INSTRUCTIONS)}, not: {text.strip()}"
        )
    function = _INSTRUCTIONS[match[1]]
    order = [int(operand.strip(" $")) - 1 for operand in match[3].split(",")]

    def apply(*args: Any) -> np.ndarray:
        return function(*(args[position] for position in order))

    return apply
