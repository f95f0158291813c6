"""Lowering of `flexhop_attention`: problem, kernel, choices, result; nothing is decided here."""

from __future__ import annotations

from typing import Any

import torch

from flexhop.compat import inductor
from flexhop.lowering import chunked, kernels
from flexhop.lowering.mods import ModBuffers, lower_mods
from flexhop.lowering.operands import (
    benchmark_inputs,
    block_inputs,
    read_problem,
    user_options,
)
from flexhop.lowering.plan import show_plan
from flexhop.ops.args import AttentionArgs
from flexhop.templates import source


def _grid(
    batch: Any, heads: Any, length: Any, width: Any, meta: dict[str, Any], *, cdiv: Any
) -> tuple[Any, int, int]:
    """One program per tile of queries, batch and query head, all on one axis (2**31 programs)."""
    return (query_tiles(length, meta, cdiv) * batch * heads, 1, 1)


def query_tiles(length: Any, meta: dict[str, Any], cdiv: Any) -> Any:
    """Tiles of queries, as count_tiles in tile.py.jinja counts them."""
    if meta["SPARSE_Q_BLOCK_SIZE"] == meta["BLOCK_M"] * meta["TILES_PER_Q_BLOCK"]:
        return cdiv(length, meta["BLOCK_M"])
    return cdiv(length, meta["SPARSE_Q_BLOCK_SIZE"]) * meta["TILES_PER_Q_BLOCK"]


_template = inductor.make_template("flexhop_forward", _grid, source("forward"))


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
    if not kernels.has_tile("forward", problem):
        return chunked.lower_attention(*operands)
    options = user_options(args.options)

    out_meta, _, max_meta = inductor.output_meta()
    size = [*query.get_size()[:3], value.get_size()[3]]
    layout = inductor.fixed_layout(
        device, query.get_dtype(), size, inductor.as_expressions(out_meta.stride())
    )
    lse = inductor.empty(size[:3], None, torch.float32, device)
    max_scores = lse
    if problem.returns_max:
        max_scores = inductor.empty(size[:3], None, torch.float32, device)
    inputs = [query, key, value, lse, max_scores, *block_inputs(args, "kv", lse, query)]
    written = [lse, max_scores] if problem.returns_max else [lse]
    out = _run(problem, options, mods, inputs, written, layout, [*score_captures, *mask_captures])
    if not problem.returns_max:
        max_scores = inductor.empty(
            inductor.as_expressions(max_meta.shape), None, torch.float32, device
        )
    return out, lse, max_scores


def _run(
    problem: Any,
    options: Any,
    mods: ModBuffers,
    inputs: Any,
    written: Any,
    layout: Any,
    captures: Any,
) -> Any:
    subgraphs = [mods.score, mods.mask]
    choices: list[Any] = []
    for tile in kernels.choose_tiles("forward", problem, options, search=inductor.is_autotuning()):
        show_plan("forward", problem, options, tile)
        error = _template.maybe_append_choice(
            choices, input_nodes=inputs, layout=layout, subgraphs=subgraphs,
            mutated_inputs=written,
            call_sizes=inputs[0].get_size(), num_stages=tile.num_stages, num_warps=tile.num_warps,
            **kernels.constants("forward", problem, options, tile),
        )  # fmt: skip
        if error is not None:
            raise error
    generators = benchmark_inputs(inputs, first_list=5) if problem.blocks is not None else {}
    out = inductor.select("flexhop_forward", choices, [*inputs, *captures], layout, generators)
    inductor.note_subgraphs(out, captures, subgraphs)
    return out
