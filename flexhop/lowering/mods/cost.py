"""How many instructions a user function takes for each score.

Estimated from its graph. What hangs on the query alone is computed once per row, and what hangs on
the key alone once for two rows, as threads hold them. Numbers are those of the machine code of
Hopper's kernels for single operators, per score; they decide between kernels, no more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

# One instruction unless listed. Functions of CUDA's library have branches, and are in the text
# once for every score that a thread holds.
_INSTRUCTIONS: dict[str, float] = {
    "clone": 0, "alias": 0, "detach": 0, "lift_fresh_copy": 0, "view": 0, "expand": 0,
    "unsqueeze": 0, "full": 0, "scalar_tensor": 0, "new_full": 0, "new_zeros": 0, "zeros": 0,
    "ones": 0, "zeros_like": 0, "ones_like": 0, "full_like": 0,
    "maximum": 3, "minimum": 3, "clamp": 4, "convert_element_type": 2, "_to_copy": 2, "index": 3,
    "exp": 4, "exp2": 3, "log": 10, "log2": 8, "log10": 10, "sqrt": 6, "rsqrt": 4,
    "reciprocal": 8, "div": 9, "sigmoid": 13, "silu": 14, "tanh": 12, "erf": 29, "gelu": 33,
    "gelu_backward": 45, "tanh_approx": 4,
    "expm1": 20, "log1p": 40, "softplus": 50, "log_sigmoid_forward": 50, "logaddexp": 55,
    "mish": 65, "atan": 25, "atan2": 45, "asin": 25, "acos": 25, "sinh": 25, "cosh": 20,
    "asinh": 50, "acosh": 50, "atanh": 50, "erfinv": 40, "erfc": 60, "sin": 85, "cos": 85,
    "tan": 100, "pow": 60, "lgamma": 130, "digamma": 130, "floor_divide": 20, "remainder": 20,
    "fmod": 20, "__mod__": 20, "__floordiv__": 20,
}  # fmt: skip
# Where the other operand is a number of the program.
_BY_NUMBER = {"div": 2.0, "floor_divide": 9.0, "remainder": 10.0, "fmod": 10.0}
_FUNCTION = 4  # instructions from which something is more than a sum or a product
_SQUARES = (-1, 0, 0.5, 1, 2, 3, 4)  # exponents that are not computed by logarithms


def instructions(graph: fx.GraphModule) -> float:
    """Instructions per score of (score, b, h, q_idx, kv_idx, ...), or of its joint graph."""
    differs = _inputs(graph)
    total = 0.0
    for node in graph.graph.nodes:
        if node.op == "call_function":
            operands = [differs.get(operand, _SAME) for operand in node.all_input_nodes]
            by_query = any(operand.by_query for operand in operands)
            by_key = any(operand.by_key for operand in operands)
            differs[node] = _Differs(by_query, by_key)
            total += _instructions_of(node) * (1.0 if by_query and by_key else 0.5 * by_key)
    return total


def has_functions(graph: fx.GraphModule) -> bool:
    """Whether a joint graph computes more than sums and products for each score."""
    nodes = [node for node in graph.graph.nodes if node.op == "call_function"]
    return any(_instructions_of(node) >= _FUNCTION for node in nodes)


class _Differs(NamedTuple):
    """Whether a value is another one for other queries, and for other keys."""

    by_query: bool
    by_key: bool


_SAME = _Differs(False, False)


def _inputs(graph: fx.GraphModule) -> dict[fx.Node, _Differs]:
    """The inputs that differ: score, q_idx, kv_idx, and a joint graph's gradient of the score."""
    score, _, _, q_idx, kv_idx, *others = graph.graph.find_nodes(op="placeholder")
    differs = {score: _Differs(True, True)}
    differs |= {q_idx: _Differs(True, False), kv_idx: _Differs(False, True)}
    # Captures are read at indices, so that any other input without a dimension is a gradient, or
    # a number, which counts for little.
    differs |= {node: _Differs(True, True) for node in others[:1] if _is_scalar(node)}
    return differs


def _is_scalar(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dim() == 0


def _instructions_of(node: fx.Node) -> float:
    name = getattr(node.target, "_opname", None) or getattr(node.target, "__name__", "")
    operands: Sequence[Any] = node.args
    if name == "pow" and len(operands) > 1 and operands[1] in _SQUARES:
        return 2.0
    if len(operands) > 1 and not isinstance(operands[1], fx.Node):
        return _BY_NUMBER.get(name, _INSTRUCTIONS.get(name, 1.0))
    return _INSTRUCTIONS.get(name, 1.0)
