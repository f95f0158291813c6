"""Lowering of `flexhop_attention_derivative`: a kernel for tangents and second orders, otherwise
the reference."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from flexhop.lowering import chunked
from flexhop.lowering.chunked import Rowwise, lower_definition, over_chunks
from flexhop.lowering.tangents import emit_second, emit_tangent
from flexhop.ops.args import DerivativeArgs
from flexhop.ops.derivatives.program import ROWS, read_step
from flexhop.ops.derivatives.reference import (
    derive_rows,
    result_like,
    signature_of,
    widened,
    zero_sums,
)
from flexhop.ops.eager import Chunk, Grids, accumulate_dtype

Tensors = tuple[Tensor, ...]


def lower_attention_derivative(*operands: Any) -> list[Any]:
    """Emit a derivative: its results in the program's order."""
    args = DerivativeArgs(*operands)
    if not chunked.is_without_kernel(args.query):
        found = emit_tangent(args) if _is_tangent(args) else emit_second(args)
        if found is not None:
            return found
    return lower_definition(args, _formula)


def _is_tangent(args: DerivativeArgs) -> bool:
    """Whether a derivative is (out, lse) with their tangents."""
    return len(args.program) == 1 and read_step(args.program[0]).kind == "jvp"


def _formula(args: DerivativeArgs, rows: int | None) -> Tensors:
    """Every result of a derivative, `rows` queries at a time."""
    names, wide = signature_of(args).outputs, accumulate_dtype(args.query.dtype)
    likes = [result_like(args, name) for name in names]
    widths = tuple(
        (shape[3:], wide) for (shape, _), name in zip(likes, names, strict=True) if name in ROWS
    )
    found, sums = over_chunks(Rowwise(_step, widths), widened(args), rows, zero_sums(args))
    joined, whole = iter(found), iter(sums)
    results = [next(joined if name in ROWS else whole) for name in names]
    return tuple(t.to(dtype) for t, (_, dtype) in zip(results, likes, strict=True))


def _step(
    args: DerivativeArgs, grids: Grids, chunk: Chunk, totals: Tensors
) -> tuple[Tensors, Tensors]:
    rows, parts = derive_rows(args, grids, chunk)
    return rows, tuple(total + part for total, part in zip(totals, parts, strict=True))
