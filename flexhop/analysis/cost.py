"""Instructions per score of an operator.

The numbers are counted in machine code for sm_90, one operator at a time. They only decide between
kernels. Forward kernels hold rows of queries: work that depends only on the query is done once per
row of a tile; work that depends only on the key, once per two rows, because of how threads hold
them. Backward kernels hold rows of keys.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Literal

import torch
from torch import fx

from flexhop.analysis.graph import dtype_of, is_float

# One instruction unless listed. The functions of compat/kernels/functions.py are branch-free.
# Others, of CUDA's library, have branches, and their text is repeated for every score that a
# thread holds.
_INSTRUCTIONS: dict[str, float] = {
    "clone": 0, "alias": 0, "detach": 0, "lift_fresh_copy": 0, "view": 0, "expand": 0,
    "unsqueeze": 0, "full": 0, "scalar_tensor": 0, "new_full": 0, "new_zeros": 0, "zeros": 0,
    "ones": 0, "zeros_like": 0, "ones_like": 0, "full_like": 0,
    "clamp": 2, "convert_element_type": 2, "_to_copy": 2, "index": 3,
    "exp": 2, "exp2": 1, "log": 10, "log2": 8, "log10": 10, "sqrt": 2, "rsqrt": 1,
    "reciprocal": 1, "div": 2, "sign": 3, "isnan": 2, "isinf": 5,
    "sigmoid": 4, "silu": 7, "tanh": 12, "erf": 13, "gelu": 19,
    "gelu_backward": 25, "tanh_approx": 4, "scaled_tanh": 5,
    "expm1": 8, "log1p": 9, "softplus": 15, "log_sigmoid_forward": 16, "logaddexp": 20,
    "mish": 30, "atan": 13, "atan2": 21, "asin": 13, "acos": 16, "sinh": 11, "cosh": 4,
    "asinh": 14, "acosh": 7, "atanh": 12, "hypot": 11, "erfinv": 40, "erfc": 11, "sin": 14,
    "cos": 14, "tan": 16, "pow": 20, "lgamma": 130, "digamma": 130, "floor_divide": 20,
    "remainder": 20, "fmod": 20, "__mod__": 20, "__floordiv__": 20,
}  # fmt: skip
# If the other operand is a number from the program; and if besides, the first is not negative.
_BY_NUMBER = {"floor_divide": 9.0, "remainder": 10.0, "fmod": 10.0}
_OF_POSITIVE = {"floor_divide": 2.0, "remainder": 3.0, "fmod": 3.0}
_SHIFTS = ("floor_divide", "remainder")  # by a power of two
_SQUARES = (-1, 0, 0.5, 1, 2, 3, 4)  # exponents that need no logarithm
# For a mask, counted in masked steps of 128 x 128 scores: a comparison sets a predicate, two
# predicates are combined in registers, and reads wait for memory.
_IN_MASKS = {
    **dict.fromkeys(("eq", "ne", "lt", "le", "gt", "ge"), 1.5),
    **{f"{kind}_{x}": 1.5 for kind in ("bitwise", "logical") for x in ("and", "or", "not", "xor")},
    "index": 6.0,
}
# As counted in masked steps of 64 and 128 columns, Triton 3.6. Limits of kernels other than that
# of bits were fitted to the numbers above.
_COMBINED = 0.75
SELECT = 1.3  # instructions to mask a score
# Functions whose derivative follows from their value, without the score itself.
_KEPT = ("tanh", "tanh_approx")
_FUNCTION = 40  # instructions above which it is cheaper to keep a value than to recompute it


def instructions_of(node: fx.Node) -> float:
    """Instructions of one operator, at any rate; each element of a short row takes as many."""
    return _of_element(node, name_of(node)) * elements_of(node)


def elements_of(node: fx.Node) -> int:
    """Elements that an operator computes, or sums: 1 unless it takes or gives a short row."""
    is_sum = torch.Tag.reduction in getattr(node.target, "tags", ())
    value = (node.args[0] if is_sum else node).meta.get("val")  # type: ignore[union-attr]
    count: Any = value.numel() if isinstance(value, torch.Tensor) else 1
    return count if isinstance(count, int) else 1  # a length that calls differ in


def is_quotient(node: fx.Node) -> bool:
    """Whether an operator divides an integer by a positive number from the program."""
    if name_of(node) not in _OF_POSITIVE or is_float(node):
        return False
    divisor = node.args[1]
    return isinstance(divisor, int) and divisor > 0


def instructions_of_quotient(node: fx.Node) -> float:
    """Instructions of an `is_quotient` whose dividend is not negative."""
    few = _OF_POSITIVE[name_of(node)] * elements_of(node)
    return min(few, instructions_of(node))


def _of_element(node: fx.Node, name: str) -> float:
    operands: Any = node.args
    if name == "pow" and len(operands) > 1 and operands[1] in _SQUARES:
        return 2.0
    if len(operands) > 1 and not isinstance(operands[1], fx.Node):
        if name in _SHIFTS and _is_power_of_two(operands[1]):
            return 1.0
        return _BY_NUMBER.get(name, _INSTRUCTIONS.get(name, 1.0))
    return _INSTRUCTIONS.get(name, 1.0)


def instructions_in_mask(node: fx.Node) -> float:
    """The same in a mask_mod that a kernel evaluates."""
    name = name_of(node)
    if name in _IN_MASKS:
        return _IN_MASKS[name]
    # As Inductor's decompositions spell it. In a score_mod it counts as a division of floats: the
    # limits of its kernels were fitted to that.
    if name == "div" and node.kwargs.get("rounding_mode") and not is_float(node):
        name = "floor_divide"
    return _of_element(node, name) * elements_of(node)


def instructions_in_asked_mask(node: fx.Node) -> float:
    """The same, for the choice between mask_mod and bits."""
    is_combined = (
        name_of(node).startswith(("bitwise_", "logical_")) and dtype_of(node) == torch.bool
    )
    return _COMBINED if is_combined else instructions_in_mask(node)


def is_function(node: fx.Node) -> bool:
    """Whether the value of an operator is better kept than computed again for its derivative."""
    return name_of(node) in _KEPT or instructions_of(node) >= _FUNCTION


def name_of(node: fx.Node) -> str:
    """Name of a node's operator, such as "floor_divide"."""
    return getattr(node.target, "_opname", None) or getattr(node.target, "__name__", "")


def _is_power_of_two(number: Any) -> bool:
    return isinstance(number, int) and number > 0 and number & (number - 1) == 0


def rate(depends: Collection[str], rows: Literal["q", "k"] = "q") -> float:
    """How often a value is computed per score, if it depends on these inputs.

    rows: whether threads hold rows of queries or of keys.
    """
    if "score" in depends or "grad" in depends or ("q" in depends and "k" in depends):
        return 1.0
    return 0.5 if ({"q", "k"} - {rows}) & {*depends} else 0.0
