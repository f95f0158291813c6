"""Operators that kernels cannot compute for each score: `e[h].cumsum(0)[q_idx - kv_idx]`.

Of rows: sums so far, sorting, convolutions, padding, complex numbers, and reductions of more
numbers than a kernel adds one by one. Of numbers: special functions. A row that depends only on
batch and head, or on one position, is computed before the kernel for all of these, and the kernel
reads it. So is a special function, of a distance as well.
"""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch import Tensor, fx

from flexhop.analysis import elements_of, name_of, reached
from flexhop.compat.sizes import LONGEST_SUM, hint_of

aten = torch.ops.aten
# Operators that are neither pointwise, nor views, nor reductions, and that kernels compute.
_KNOWN = frozenset({
    "_log_softmax", "_softmax", "_to_copy", "_unsafe_view", "addbmm", "addmm", "addmv", "addr",
    "alias", "arange", "baddbmm", "bmm", "bounded", "bucketize", "cat", "clone", "copy",
    "convert_element_type", "cosine_similarity", "detach", "diagonal_copy", "dot", "embedding",
    "empty", "eye", "fill", "flip", "full", "full_like", "gather", "glu", "index", "index_put",
    "index_put_", "index_select", "iota", "lift_fresh", "lift_fresh_copy", "linspace",
    "logsumexp", "masked_fill", "mm", "mv", "native_dropout", "native_group_norm",
    "native_layer_norm", "new_full", "new_ones", "new_zeros", "ones", "ones_like", "outer",
    "repeat", "_fused_rms_norm", "rev", "rms_norm", "roll", "scalar_tensor", "searchsorted",
    "select_scatter", "slice_scatter", "stack", "take", "tril", "triu", "vdot", "zeros",
    "zeros_like",
})  # fmt: skip
_REDUCTIONS = frozenset({
    "all", "amax", "amin", "any", "argmax", "argmin", "count_nonzero", "linalg_vector_norm", "max",
    "mean", "min", "norm", "prod", "std", "std_mean", "sum", "var", "var_mean",
})  # fmt: skip
_LONG = frozenset({
    "_log_softmax", "_softmax", "addbmm", "addmm", "addmv", "baddbmm", "bmm", "dot",
    "logsumexp", "mm", "mv", "native_group_norm", "native_layer_norm", "_fused_rms_norm", "vdot",
})  # fmt: skip
# Pointwise functions for which Inductor has no Triton code, beside most of torch.special.
_SPECIAL = frozenset({"digamma", "igamma", "igammac", "polygamma"})


def is_beyond_kernels(node: fx.Node) -> bool:
    """Whether no kernel computes a node: a row, something made of rows, or a special function."""
    if node.target is operator.getitem and isinstance(node.args[0], fx.Node):
        return is_beyond_kernels(node.args[0])
    target = node.target
    schema = getattr(target, "_schema", None)  # of an operator of PyTorch
    if node.op != "call_function" or schema is None or schema.is_mutable:
        return False
    values = _values(node)
    if any(value.is_complex() for value in values):
        return True
    name = name_of(node)
    if name in _SPECIAL or name.startswith("special_"):
        return True
    rows = [value for value in values if value.dim() > 0]
    operation: Any = target
    if torch.Tag.pointwise in operation.tags or operation.is_view or not rows:
        return False
    is_reduction = name in _REDUCTIONS
    if is_reduction or name in _LONG:
        return max(map(_size, rows)) > LONGEST_SUM
    return name not in _KNOWN


def numbers_in(node: fx.Node) -> int:
    """The most numbers of a row that a node is computed with."""
    return max(map(elements_of, reached(node)), default=1)


def _values(node: fx.Node) -> list[Tensor]:
    """Examples of a node's value and of its operands."""
    found: list[Any] = [n.meta.get("val") for n in (node, *node.all_input_nodes)]
    return [value for value in found if isinstance(value, Tensor)]


def _size(value: Tensor) -> int:
    return math.prod(map(hint_of, value.shape))
