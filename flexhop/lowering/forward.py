"""Lowering of `flexhop_attention`: problem, kernel, choices, result; nothing is decided here."""

from __future__ import annotations

from typing import Any

import torch

from flexhop.compat import inductor
from flexhop.lowering import chunked, kernels
from flexhop.lowering.dialect import choose_dialect
from flexhop.lowering.emit import Launch, Output
from flexhop.lowering.mods import lower_mods
from flexhop.lowering.operands import block_inputs, read_problem, user_options
from flexhop.ops.args import AttentionArgs


def lower_attention(*operands: Any) -> tuple[Any, Any, Any]:
    """Emit the forward kernel: (out, lse, max_scores)."""
    args = AttentionArgs(*operands)
    if chunked.is_without_kernel(args.query):
        return chunked.lower_attention(*args)
    device = args.query.get_device()
    score_captures = inductor.realize(args.score_captures)
    mask_captures = inductor.realize(args.mask_captures)
    mods = lower_mods(device, args.score_mod, args.mask_mod, (score_captures, mask_captures))
    query, key, value = inductor.realize(args[:3])
    args = args._replace(query=query, key=key, value=value)
    problem = read_problem(args, mods)
    options = user_options(args.options)
    dialect = choose_dialect(problem, options)
    if not kernels.has_tile("forward", problem):
        return chunked.lower_attention(*operands)

    out_meta, _, max_meta = inductor.output_meta()
    size = [*query.get_size()[:3], value.get_size()[3]]
    layout = inductor.fixed_layout(
        device, query.get_dtype(), size, inductor.as_expressions(out_meta.stride())
    )
    lse = inductor.empty(size[:3], None, torch.float32, device)
    max_size = inductor.as_expressions(max_meta.shape)  # nothing, unless it is returned
    max_scores = inductor.empty(max_size, None, torch.float32, device)
    lists = block_inputs(args, "kv", lse, query)
    launch = Launch(problem, options, mods, [*score_captures, *mask_captures])
    written = [lse, max_scores] if problem.returns_max else [lse]
    inputs = [query, key, value, lse, written[-1]]
    sizes = query.get_size()
    if dialect.name == "hopper":
        counter = inductor.zeros([1], torch.int32, device)
        output = Output(layout, sizes, [*written, counter])
        out = launch.emit_hopper([*inputs, counter, *lists], output)
    else:
        out = launch.emit("forward", [*inputs, *lists], Output(layout, sizes, written))
    return out, lse, max_scores
