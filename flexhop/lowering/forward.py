"""Lowering of `flexhop_attention`: problem, kernel, choices, result; nothing is decided here."""

from __future__ import annotations

from typing import Any, Literal

import torch

from flexhop.compat import guards, inductor
from flexhop.lowering import chunked
from flexhop.lowering.dialect import choose_dialect
from flexhop.lowering.emission.kernel import Launch, Output
from flexhop.lowering.hopper import gradients as backward_hopper
from flexhop.lowering.hopper.mask_bits import emit_mask_bits
from flexhop.lowering.mods.lower import lower_line, lower_mods
from flexhop.lowering.operands import block_inputs, read_problem, seed_input, user_options
from flexhop.lowering.portable import decode, kernels, splits
from flexhop.lowering.portable.tiles import Kernel
from flexhop.lowering.problem import Problem
from flexhop.ops.args import AttentionArgs, CachedArgs
from flexhop.options import KernelOptions


def lower_attention(*operands: Any) -> tuple[Any, Any, Any]:
    """Emit the forward kernel: (out, lse, max_scores)."""
    args = AttentionArgs(*operands)
    if chunked.is_without_kernel(args.query):
        return chunked.lower_attention(*args)
    device = inductor.device_of(args.query)
    score_captures = inductor.realize(args.score_captures)
    mask_captures = inductor.realize(args.mask_captures)
    mods = lower_mods(device, args.score_mod, args.mask_mod, (score_captures, mask_captures))
    query, key, value = inductor.realize(args[:3])
    guards.guard_aligned_strides((query, key, value))
    args = args._replace(query=query, key=key, value=value)
    problem, options = read_problem(args, mods), user_options(args.options)
    kernel = choose(args.query, problem, options)
    dialect = choose_dialect(problem, options)
    if not kernels.has_tile(kernel, problem):
        return chunked.lower_attention(*operands)
    captures = [*score_captures, *mask_captures]
    is_hopper = kernel == "forward" and dialect.name == "hopper"
    if is_hopper:
        mods = mods._replace(line=lower_line(device, args.score_mod, score_captures))
    launch = Launch(problem, options, mods, captures, seed=seed_input(args))
    # First, because the forward kernel may be waited for.
    backward_hopper.prepare_gradients(launch, args)
    return emit_forward(args, launch, "hopper" if is_hopper else kernel)


def emit_forward(
    args: AttentionArgs | CachedArgs, launch: Launch, kernel: Kernel | Literal["hopper"]
) -> tuple[Any, Any, Any]:
    """Emit one of the forward kernels: (out, lse, max_scores).

    Args:
        args: operands that are IR with storage.
        launch: of the call.
        kernel: "forward", "decode" or "hopper".
    """
    query: Any = args.query
    value: Any = args.value
    device = inductor.device_of(query)
    out_meta, _, max_meta = inductor.output_meta()
    size = [*query.get_size()[:3], value.get_size()[3]]
    layout = inductor.fixed_layout(
        device, query.get_dtype(), size, inductor.as_expressions(out_meta.stride())
    )
    lse = inductor.empty(size[:3], None, torch.float32, device)
    max_size = inductor.as_expressions(max_meta.shape)  # nothing, unless it is returned
    max_scores = inductor.empty(max_size, None, torch.float32, device)
    lists = block_inputs(args, "kv", lse, query)
    written = [lse, max_scores] if launch.problem.returns_max else [lse]
    inputs, sizes = [*args[:3], lse, written[-1]], query.get_size()
    output, out = Output(layout, sizes, written), None
    if kernel == "decode":
        out = decode.emit_decode(launch, args[:3], lists, output)
    elif kernel == "hopper":
        counter = inductor.zeros([1], torch.int32, device)
        words = emit_mask_bits(launch, args[:2], lists) or counter  # which is then not read
        added = output._replace(written=[*written, counter])
        out = launch.emit_hopper([*inputs, words, counter, *lists], added)
    if out is None:
        out = launch.emit("forward", [*inputs, *lists], output)
    return out, lse, max_scores


def choose(query: Any, problem: Problem, options: KernelOptions) -> Kernel:
    """The kernel; a query whose length varies is held to its side of the limit by a guard."""
    if options.short_queries != "forward":
        guards.guard_at_most(query.get_size()[2] * problem.group, splits.MAX_ROWS)
    return kernels.forward_kernel(problem, options)
