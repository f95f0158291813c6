"""Lowering of `flexhop_attention_backward`: two kernels and the reductions around them."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from flexhop.compat import inductor
from flexhop.errors import DeterminismError
from flexhop.lowering import chunked, kernels
from flexhop.lowering.forward import query_tiles
from flexhop.lowering.mods import (
    ModBuffers,
    index_dependence,
    is_additive,
    lower_joint,
    lower_mods,
)
from flexhop.lowering.operands import (
    benchmark_inputs,
    block_inputs,
    read_problem,
    user_options,
)
from flexhop.lowering.plan import show_plan
from flexhop.ops.args import BackwardArgs, Site, unpack_sites
from flexhop.templates import source

aten = torch.ops.aten


def _query_grid(
    batch: Any, heads: Any, length: Any, width: Any, meta: dict[str, Any], *, cdiv: Any
) -> tuple[Any, int, int]:
    """One program per tile of queries, batch and query head, all on one axis."""
    return (query_tiles(length, meta, cdiv) * batch * heads, 1, 1)


def _key_grid(
    batch: Any, heads: Any, length: Any, width: Any, meta: dict[str, Any], *, cdiv: Any
) -> tuple[Any, int, int]:
    """One program per tile of keys, batch and key head of K, all on one axis."""
    if meta["SPARSE_KV_BLOCK_SIZE"] == meta["BLOCK_N"] * meta["TILES_PER_KV_BLOCK"]:
        tiles = cdiv(length, meta["BLOCK_N"])
    else:
        tiles = cdiv(length, meta["SPARSE_KV_BLOCK_SIZE"]) * meta["TILES_PER_KV_BLOCK"]
    return (tiles * batch * heads, 1, 1)


_templates = {
    "grad_query": inductor.make_template("flexhop_grad_query", _query_grid, source("grad_query")),
    **{
        name: inductor.make_template(f"flexhop_{name}", _key_grid, source("grad_key_value"))
        for name in ("grad_key_value", "grad_key", "grad_value")
    },
}


def lower_attention_backward(*operands: Any) -> tuple[Any, Any, Any, list[Any]]:
    """Emit both backward kernels: (grad_query, grad_key, grad_value, captured gradients)."""
    args = BackwardArgs(*operands)
    if chunked.is_without_kernel(args.query):
        return chunked.lower_attention_backward(*args)
    device = args.query.get_device()
    score_captures = inductor.realize(args.score_captures)
    mask_captures = inductor.realize(args.mask_captures)
    mods = lower_mods(device, args.score_mod, args.mask_mod, (score_captures, mask_captures))
    joint = lower_joint(device, args.joint, score_captures, unpack_sites(args.sites))
    captured, sites = _scatter_sites(args)
    written = [captured[i] for i in sorted(captured)]
    delta = _delta(args)
    tensors = inductor.realize([args.query, args.key, args.value, args.grad_out])
    query, key, value, grad_out = tensors
    args = args._replace(query=query, key=key, value=value)
    statistics = [inductor.contiguous(args.lse), delta, grad_out]
    problem = dataclasses.replace(
        read_problem(args, mods), has_score_grad=not is_additive(args.joint)
    )
    needed = ("grad_query", *kernels.key_value_kernels(problem))
    if not all(kernels.has_tile(kernel, problem) for kernel in needed):
        return chunked.lower_attention_backward(*operands)
    call = _Call(args, problem, mods, joint, [*score_captures, *mask_captures])

    inputs = [query, key, value, *statistics, *block_inputs(args, "kv", delta, query)]
    grad_query = call.emit("grad_query", inputs, written, query, sites)
    grad_key, grad_value = _emit_key_value(call, inputs[:6])
    return grad_query, grad_key, grad_value, _captured_grads(args, captured)


def _emit_key_value(call: _Call, operands: list[Any]) -> tuple[Any, Any]:
    """Gradients of key and value, by one launch or two."""
    key, value, delta = operands[1], operands[2], operands[4]
    lists = block_inputs(call.args, "q", delta, operands[0])
    if len(kernels.key_value_kernels(call.problem)) == 1:
        grad_value = inductor.empty(
            value.get_size(), _strides(2), value.get_dtype(), value.get_device()
        )
        inputs = [*operands, grad_value, *lists]
        return call.emit("grad_key_value", inputs, [grad_value], key, []), grad_value
    inputs = [*operands, value, *lists]  # DV is not written: value stands in
    return call.emit("grad_key", inputs, [], key, []), call.emit(
        "grad_value", inputs, [], value, []
    )


def _strides(position: int) -> list[Any]:
    return inductor.as_expressions(inductor.output_meta()[position].stride())


def _delta(args: BackwardArgs) -> Any:
    """rowsum(out * grad_out) - grad_lse, fused by Inductor into one reduction."""
    as_float = lambda t: inductor.call_lowering(  # noqa: E731
        torch.ops.prims.convert_element_type.default, t, torch.float32
    )
    product = inductor.call_lowering(aten.mul.Tensor, as_float(args.out), as_float(args.grad_out))
    delta = inductor.call_lowering(aten.sum.dim_IntList, product, [-1])
    if args.grad_lse is not None:
        delta = inductor.call_lowering(aten.sub.Tensor, delta, args.grad_lse)
    return inductor.contiguous(delta)


def _scatter_sites(
    args: BackwardArgs,
) -> tuple[dict[int, Any], list[inductor.ScatterSite]]:
    """Zero-filled buffers for captured gradients by capture, and what the kernel adds to them."""
    sites = unpack_sites(args.sites)
    if sites and args.options.get("deterministic"):
        raise DeterminismError(
            capture=sites[0].capture, reason="its gradient is summed by atomic additions"
        )
    buffers: dict[int, Any] = {}
    for site in sites:
        if site.capture not in buffers:
            like = args.score_captures[site.capture]
            buffers[site.capture] = inductor.zeros(
                like.get_size(), torch.float32, like.get_device()
            )
    return buffers, [_scatter_site(args, site, buffers[site.capture]) for site in sites]


def _scatter_site(args: BackwardArgs, site: Site, buffer: Any) -> inductor.ScatterSite:
    uses_q_idx, uses_kv_idx = index_dependence(args.joint, site)
    # Subgraphs of the kernel: score_mod, mask_mod, then the outputs of the joint graph.
    return inductor.ScatterSite(
        buffer=buffer.get_name(),
        strides=tuple(buffer.get_stride()),
        value=2 + site.value,
        indices=tuple(2 + i for i in site.indices),
        uses_q_idx=uses_q_idx,
        uses_kv_idx=uses_kv_idx,
        is_large=not inductor.fits_int32(buffer.get_numel()),
    )


def _captured_grads(args: BackwardArgs, buffers: dict[int, Any]) -> list[Any]:
    """The buffers in their captures' dtypes; after the kernel, or zeros would be read."""
    convert = torch.ops.prims.convert_element_type.default
    return [
        inductor.call_lowering(convert, buffers[i], args.score_captures[i].get_dtype())
        for i in sorted(buffers)
    ]


class _Call:
    """What both kernels of one backward call share."""

    def __init__(
        self,
        args: BackwardArgs,
        problem: Any,
        mods: ModBuffers,
        joint: list[Any],
        captures: list[Any],
    ) -> None:
        self.args, self.problem, self.mods = args, problem, mods
        self.joint, self.captures = joint, captures
        self.options = user_options(args.options)

    def emit(self, kernel: Any, inputs: Any, written: Any, like: Any, sites: list[Any]) -> Any:
        """Emit one kernel whose output has the sizes of `like`."""
        position = {"grad_query": 0, "grad_value": 2}.get(kernel, 1)
        layout = inductor.fixed_layout(
            like.get_device(), like.get_dtype(), like.get_size(), _strides(position)
        )
        joint = self.joint if sites else self.joint[:1]
        subgraphs = inductor.Subgraphs([self.mods.score, self.mods.mask, *joint], sites)
        choices: list[Any] = []
        search = inductor.is_autotuning() and not self.problem.has_captured_grads
        for tile in kernels.choose_tiles(kernel, self.problem, self.options, search=search):
            show_plan(kernel, self.problem, self.options, tile)
            error = _templates[kernel].maybe_append_choice(
                choices, input_nodes=inputs, layout=layout, subgraphs=subgraphs,
                mutated_inputs=written, call_sizes=like.get_size(),
                num_stages=tile.num_stages, num_warps=tile.num_warps,
                **kernels.constants(kernel, self.problem, self.options, tile),
            )  # fmt: skip
            if error is not None:
                raise error
        generators = {}
        if self.problem.blocks is not None:
            generators = benchmark_inputs(inputs, first_list=len(inputs) - 4)
        captures = [*self.captures, *(written if kernel == "grad_query" else ())]
        result = inductor.select(
            f"flexhop_{kernel}", choices, [*inputs, *captures], layout, generators
        )
        inductor.note_subgraphs(result, self.captures, subgraphs)
        return result
