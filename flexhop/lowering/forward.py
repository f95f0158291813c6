"""Lowering of `flexhop_attention`: collect the facts, let the best dialect emit its kernel."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch

from flexhop.compat.graphs import ahead, guards
from flexhop.compat.kernels import inductor, tanh
from flexhop.lowering import chunked, cpu, fallback
from flexhop.lowering.dialect import candidates
from flexhop.lowering.emission.kernel import KernelCall, Output
from flexhop.lowering.mods.caps import foldable_scale, has_caps
from flexhop.lowering.mods.lower import ModBuffers, for_rows_of_keys, lower_mods, read_joint
from flexhop.lowering.operands import read_problem, seed_input, show_problem, user_options
from flexhop.lowering.portable import splits
from flexhop.lowering.problem import Problem
from flexhop.ops import wide_lse
from flexhop.ops.args import AttentionArgs, CachedArgs
from flexhop.options import KernelOptions


def lower_attention(*operands: Any) -> tuple[Any, Any, Any]:
    """Emit the forward kernel: (out, lse, max_scores)."""
    args = AttentionArgs(*operands)
    if chunked.is_without_kernel(args.query):
        return cpu.lower_attention(*args) or chunked.lower_attention(*args)
    device = inductor.device_of(args.query)
    query: Any = args.query
    has_texts = tanh.has_texts(device, query.get_dtype())
    mods = _lower_mods(args, foldable_scale(args, has_texts=has_texts))
    query, key, value = inductor.realize((args.query, args.key, args.value))
    # Before the facts are collected: what is guarded here is known there.
    guards.guard_aligned_strides((query, key, value))
    args = args._replace(query=query, key=key, value=value)
    problem, options = read_problem(args, mods), user_options(args.options)
    show_problem("forward", problem)
    captures = [*inductor.realize(args.score_captures), *inductor.realize(args.mask_captures)]
    call = KernelCall(problem, options, mods, captures, seed=seed_input(args))
    return emit_forward(args, call) or chunked.lower_attention(*operands)


def _lower_mods(args: AttentionArgs, cap_scale: float | None) -> ModBuffers:
    captures = inductor.realize(args.score_captures), inductor.realize(args.mask_captures)
    device = inductor.device_of(args.query)
    return lower_mods(device, (args.score_mod, args.mask_mod), captures, cap_scale=cap_scale)


def emit_forward(
    args: AttentionArgs | CachedArgs, call: KernelCall
) -> tuple[Any, Any, Any] | None:
    """Emit the kernel of the best dialect that supports the call: (out, lse, max_scores), or None.

    Args:
        args: operands with storage.
        call: data that all kernels of the call share.
    """
    problem, options = call.problem, call.options
    _guard_short_queries(args.query, problem, options)
    choices = list(candidates("forward", problem, options))
    if not choices:
        return None
    if isinstance(args, AttentionArgs):
        # First, because emitting the forward kernel may wait for its compilation.
        _start_gradients(args, call)
    output = _make_output(args, problem)
    for choice in choices:
        told = dataclasses.replace(call, passed=choice.words(problem.device))
        emit = functools.partial(choice.dialect.forward.emit, told, args, output)
        out = fallback.attempt(f"forward, {choice.dialect.title}", emit, problem)
        if out is not None:
            max_scores = output.written[1] if problem.returns_max else _no_max_scores()
            return out, output.written[0], max_scores
    return None


def _make_output(args: AttentionArgs | CachedArgs, problem: Problem) -> Output:
    """The layout of the output, and the buffers for lse and max_scores."""
    query: Any = args.query
    value: Any = args.value
    device = inductor.device_of(query)
    out_meta, _, max_meta = inductor.output_meta()
    size = [*query.get_size()[:3], value.get_size()[3]]
    layout = inductor.fixed_layout(
        device, query.get_dtype(), size, inductor.as_expressions(out_meta.stride())
    )
    lse_dtype = wide_lse.dtype_of(args.options, torch.float32)
    written = [inductor.empty(size[:3], None, lse_dtype, device)]
    if problem.returns_max:
        max_size = inductor.as_expressions(max_meta.shape)
        written.append(inductor.empty(max_size, None, torch.float32, device))
    return Output(layout, query.get_size(), written)


def _no_max_scores() -> Any:
    meta = inductor.output_meta()[2]
    size = inductor.as_expressions(meta.shape)
    return inductor.empty(size, None, torch.float32, meta.device)


def _start_gradients(args: AttentionArgs, call: KernelCall) -> None:
    """Start compiling the backward kernels that this forward call will need."""
    joint = ahead.traced("flexhop_joint") if ahead.is_useful() else None
    if joint is None:
        return
    # The gradient of a cap needs tanh itself, so the forward kernel's folded one does not serve.
    mods = _lower_mods(args, None) if has_caps(args.score_mod) else call.mods
    captures = inductor.realize(args.mask_captures)
    mods = for_rows_of_keys(mods, args.mask_mod, captures, inductor.device_of(args.query))
    problem = read_problem(args, mods, grad=read_joint(joint))
    told = dataclasses.replace(call, problem=problem, mods=mods)
    for choice in candidates("backward", problem, call.options):
        choice.dialect.backward.start(told, args, joint)
        return


def _guard_short_queries(query: Any, problem: Problem, options: KernelOptions) -> None:
    """Guard a dynamic query length to its side of the decode kernel's limit."""
    if options.short_queries != "forward":
        guards.guard_at_most(query.get_size()[2] * problem.group, splits.MAX_ROWS)
