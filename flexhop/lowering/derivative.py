"""Lowering of `flexhop_attention_derivative`: a kernel for tangents; else the definition."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from flexhop.compat import guards, inductor
from flexhop.lowering import chunked, fallback
from flexhop.lowering.chunked import Rowwise, lower_definition, over_chunks
from flexhop.lowering.emission.kernel import KernelCall, Output
from flexhop.lowering.mods.lower import lower_mods
from flexhop.lowering.mods.push import lower_push
from flexhop.lowering.operands import (
    block_inputs,
    read_problem,
    seed_input,
    show_problem,
    user_options,
)
from flexhop.lowering.portable import kernels
from flexhop.lowering.portable.emit import emit_kernel
from flexhop.lowering.problem import Problem
from flexhop.ops.args import AttentionArgs, DerivativeArgs, operands_of
from flexhop.ops.derive import derive_rows, result_like, signature_of, widened, zero_sums
from flexhop.ops.eager import Chunk, Grids, accumulate_dtype
from flexhop.ops.program import ROWS, read_step

Tensors = tuple[Tensor, ...]
_OPERANDS = ("query", "key", "value")


def lower_attention_derivative(*operands: Any) -> list[Any]:
    """Emit a derivative: its results in the program's order."""
    args = DerivativeArgs(*operands)
    if _is_tangent(args) and not chunked.is_without_kernel(args.query):
        found = _emit_tangent(args)
        if found is not None:
            return found
    return lower_definition(args, _formula)


def _is_tangent(args: DerivativeArgs) -> bool:
    """Whether a derivative is (out, lse) with their tangents."""
    return len(args.program) == 1 and read_step(args.program[0]).kind == "jvp"


def _emit_tangent(args: DerivativeArgs) -> list[Any] | None:
    """Emit the kernel of out, lse and their tangents; None if no tile of it fits."""
    given = read_step(args.program[0]).given
    directions = dict(zip(given, inductor.realize(args.directions), strict=True))
    device = inductor.device_of(args.query)
    score_captures = inductor.realize(args.score_captures)
    mask_captures = inductor.realize(args.mask_captures)
    mods = lower_mods(device, args.score_mod, args.mask_mod, (score_captures, mask_captures))
    query, key, value = dense = inductor.realize((args.query, args.key, args.value))
    dots = [directions.get(i, dense[i]) for i in range(3)]
    guards.guard_aligned_strides((*dense, *(dots[i] for i in range(3) if i in directions)))
    call = operands_of(AttentionArgs, args, query=query, key=key, value=value)
    moving = tuple(_OPERANDS[i] for i in range(3) if i in directions)
    problem = read_problem(call, mods, tangents=moving)
    show_problem("forward", problem)
    if not kernels.has_tile("jvp_forward", problem) or _is_too_wide(problem):
        return None
    moved = {i - 3: tangent for i, tangent in directions.items() if i >= 3}
    push = lower_push(device, args.score_mod, score_captures, moved)
    captures = [*score_captures, *mask_captures, *(moved[i] for i in sorted(moved))]
    shared = KernelCall(problem, user_options(args.options), mods, captures, seed=seed_input(call))
    emit = functools.partial(_emit, call, shared, dots, push)
    return fallback.attempt("forward mode", emit, problem)


def _is_too_wide(problem: Problem) -> bool:
    """Whether two sums of a row do not fit the registers of the smallest tile (seen in cubins)."""
    most = 128 if problem.itemsize > 2 else 256
    return max(problem.head_dim, problem.value_head_dim) > most


def _emit(call: AttentionArgs, shared: KernelCall, dots: list[Any], push: Any) -> list[Any]:
    """Out, lse and their tangents."""
    query: Any = call.query
    value: Any = call.value
    device = inductor.device_of(query)
    size = [*query.get_size()[:3], value.get_size()[3]]
    strides = [inductor.as_expressions(meta.stride()) for meta in inductor.output_meta()]
    layout = inductor.fixed_layout(device, query.get_dtype(), size, strides[0])
    out_dot = inductor.empty(size, strides[2], query.get_dtype(), device)
    lse, lse_dot = (inductor.empty(size[:3], None, torch.float32, device) for _ in range(2))
    operands = (call.query, call.key, call.value, *dots, lse, lse_dot, out_dot)
    inputs = [*operands, *block_inputs(call, "kv", lse, query)]
    output = Output(layout, query.get_size(), [lse, lse_dot, out_dot])
    out = emit_kernel(shared, "jvp_forward", inputs, output, [push])
    return [out, lse, out_dot, lse_dot]


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
