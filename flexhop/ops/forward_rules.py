"""Dispatch rules that both forward operators share; their operands have these names in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from flexhop.compat.compilation import forms_of, once
from flexhop.compat.mods.indexing import IndexMode
from flexhop.compat.operators.overloads import has_input_mutation
from flexhop.errors import CaptureMutationError
from flexhop.ops import wide_lse
from flexhop.ops.args import AttentionArgs, CachedArgs
from flexhop.ops.eager import accumulate_dtype
from flexhop.ops.layout import empty_ordered, ordered

Results = tuple[Tensor, Tensor, Tensor]


def real_results(args: AttentionArgs | CachedArgs, found: Results) -> Results:
    """(out, lse, max_scores) of the reference, as the operator stores them."""
    out, lse, max_scores = found
    if not args.options.get("return_max"):
        max_scores = max_scores.new_empty(0)
    return ordered(out, args.query), lse.contiguous(), max_scores


def fake_results(args: AttentionArgs | CachedArgs) -> Results:
    """Tensors with the shapes, dtypes and strides of the results."""
    batch, heads, length, _ = args.query.shape
    out = empty_ordered((batch, heads, length, args.value.size(-1)), args.query)
    dtype = accumulate_dtype(args.query.dtype)
    wide = wide_lse.dtype_of(args.options, dtype)
    lse = args.query.new_empty((batch, heads, length), dtype=wide)
    size = (batch, heads, length) if args.options.get("return_max") else 0
    max_scores = args.query.new_empty(size, dtype=dtype)
    return out, lse, max_scores


def refuse_mutation(
    mods: Mapping[str, Any], examples: Sequence[Sequence[Any]], pre_dispatch: bool
) -> None:
    """Raise if a mod writes to a capture; functionalization would silently drop the write.

    Raises:
        CaptureMutationError: one of the named mods writes to one of its example inputs.
    """
    for (name, mod), example in zip(mods.items(), examples, strict=True):
        key = (refuse_mutation, forms_of(example), pre_dispatch)
        if once(key, mod, lambda mod=mod, example=example: _writes(mod, example, pre_dispatch)):
            raise CaptureMutationError(mod=name, location="its body")


def _writes(mod: Any, example: Sequence[Any], pre_dispatch: bool) -> bool:
    with IndexMode():
        return has_input_mutation(mod, example, pre_dispatch)
