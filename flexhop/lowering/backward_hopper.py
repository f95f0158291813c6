"""What stands around the backward kernel of Hopper GPUs, and its launch.

The kernel reads statistics of queries that are prepared for it, and adds to the gradient of query
in fp32, which is scaled and converted after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from flexhop.compat import ahead, gluon, inductor
from flexhop.lowering import hopper_grad, kernels
from flexhop.lowering.dialect import choose_grad_dialect
from flexhop.lowering.emit import Launch, Output
from flexhop.lowering.mods import lower_joint
from flexhop.lowering.operands import block_inputs
from flexhop.ops.args import AttentionArgs, BackwardArgs
from flexhop.ops.layout import dense_strides

aten = torch.ops.aten
convert = torch.ops.prims.convert_element_type.default
INF = float("inf")


class Captured(NamedTuple):
    """Sums of gradients of captured tensors, zero-filled, and what kernels add to them."""

    sums: Sequence[Any]
    sites: Sequence[inductor.ScatterSite]


def emit_gradients(
    launch: Launch,
    args: BackwardArgs,
    joint: Sequence[Any],
    layouts: tuple[Any, Any],
    captured: Captured,
) -> tuple[Any, Any, Any]:
    """Gradients of query, key and value; those of captured tensors are added up.

    Args:
        launch: of this call.
        args: query, key, value and grad_out with storage.
        joint: the lowered joint graph: its first output, and for sites the others.
        layouts: of the gradients of key and value.
        captured: where to add, and what.
    """
    operands: tuple[Any, ...] = (args.query, args.key, args.value, args.grad_out)
    query, key, value, grad_out = operands
    if not gluon.suits_bulk_copies(grad_out):
        grad_out = inductor.contiguous(grad_out)
    device = inductor.device_of(query)
    tile = hopper_grad.table_tile(launch.problem)
    blocks = launch.problem.blocks
    lse, delta = _statistics(args, tile.block_m if blocks is None else blocks.q_size)
    grad_query = inductor.zeros(query.get_size(), torch.float32, device)
    grad_value = inductor.empty(layouts[1].size, layouts[1].stride, value.get_dtype(), device)
    counter = inductor.zeros([1], torch.int32, device)
    inputs = [query, key, value, lse, delta, grad_out, grad_query, grad_value, counter]
    written = [grad_query, grad_value, counter, *captured.sums]
    output = Output(layouts[0], key.get_size(), written)
    lists = block_inputs(args, "q", lse, query)
    grad_key = launch.emit_hopper_backward([*inputs, *lists], output, joint, captured.sites)
    # Read after the kernel, or zeros would be scaled.
    added = inductor.ir.TensorBox(grad_query)
    scaled = inductor.call_lowering(aten.mul.Tensor, added, launch.problem.scale)
    return inductor.call_lowering(convert, scaled, query.get_dtype()), grad_key, grad_value


def prepare_gradients(launch: Launch, args: AttentionArgs) -> None:
    """Begin to compile the backward kernel, which this forward call will need.

    AOTAutograd lowers the backward graph later, so the kernel's operands are foretold. A wrong
    guess costs the time of a worker, no more. Not foretold: the gradient of a score_mod, lengths
    that vary, and the layouts of packed sequences and their lists.

    Args:
        launch: of the forward call.
        args: query, key and value with storage.
    """
    problem, sizes = launch.problem, [t.get_size() for t in _tensors(args)]
    is_packed = problem.blocks is not None and problem.blocks.has_ranges
    is_fixed = all(inductor.is_constant(n) for size in sizes for n in size)
    if problem.has_score_mod or is_packed or not is_fixed or not ahead.is_useful():
        return
    if choose_grad_dialect(problem, launch.options).name != "hopper":
        return
    device = inductor.device_of(args.query)
    joint = lower_joint(device, _identity_joint(), (), ())
    with ahead.stand_ins(_foretell_layouts(launch, args)) as operands:
        lse, _, _, *written = operands
        inputs = [*_tensors(args), *operands, *block_inputs(args, "q", lse, args.query)]
        output = Output(_like(args.key), sizes[1], written)
        launch.start_hopper_backward(inputs, output, joint)


def _tensors(args: AttentionArgs) -> tuple[Any, Any, Any]:
    return args.query, args.key, args.value


def _identity_joint() -> fx.GraphModule:
    """What the tracer makes of the gradient of no score_mod."""
    graph = fx.Graph()
    names = ("score", "b", "h", "q_idx", "kv_idx", "grad_score")
    graph.output(([graph.placeholder(name) for name in names][-1],))
    return fx.GraphModule({}, graph)


def _foretell_layouts(launch: Launch, args: AttentionArgs) -> dict[str, Any]:
    """Layouts of the kernel's operands that the backward graph will have, in their order."""
    query, _, value = _tensors(args)
    device, dtype = inductor.device_of(query), query.get_dtype()
    batch, heads, length, _ = (int(n) for n in query.get_size())
    tile, blocks = hopper_grad.table_tile(launch.problem), launch.problem.blocks
    rows = length + gluon.fill_up(length, tile.block_m if blocks is None else blocks.q_size)
    statistic = inductor.contiguous_layout(device, torch.float32, [batch, heads, rows])
    out = inductor.output_meta()[0]
    return {
        "lse": statistic,
        "delta": statistic,
        "grad_out": inductor.fixed_layout(device, dtype, out.shape, ahead.gradient_strides(out)),
        "grad_query": inductor.contiguous_layout(device, torch.float32, query.get_size()),
        "grad_value": _like(value),
        "counter": inductor.contiguous_layout(device, torch.int32, [1]),
    }


def _like(tensor: Any) -> Any:
    """The layout of a tensor's gradient."""
    size, stride = tensor.get_size(), [int(n) for n in tensor.get_stride()]
    return inductor.fixed_layout(
        inductor.device_of(tensor), tensor.get_dtype(), size,
        dense_strides([int(n) for n in size], stride),
    )  # fmt: skip


def _statistics(args: Any, rows: int) -> tuple[Any, Any]:
    """lse in base 2 and delta, [B, Hq, M rounded up to a multiple of `rows`].

    delta = rowsum(out * grad_out) - grad_lse. Queries that see nothing, and those that fill up M,
    have an lse of +inf, so that their weights are 0, and those that fill up a delta of 0.
    """
    call, query = inductor.call_lowering, args.query
    length = query.get_size()[2]
    missing = gluon.fill_up(length, rows)
    as_float = (call(convert, tensor, torch.float32) for tensor in (args.out, args.grad_out))
    product = call(aten.mul.Tensor, *as_float)
    lse, grad_lse = args.lse, args.grad_lse
    if not inductor.is_multiple(length, rows):
        product = call(aten.constant_pad_nd.default, product, [0, 0, 0, missing], 0.0)
        lse = call(aten.constant_pad_nd.default, lse, [0, missing], -INF)
        if grad_lse is not None:
            grad_lse = call(aten.constant_pad_nd.default, grad_lse, [0, missing], 0.0)
    delta = call(aten.sum.dim_IntList, product, [-1])
    if grad_lse is not None:
        delta = call(aten.sub.Tensor, delta, grad_lse)
    in_base_2 = call(aten.mul.Tensor, lse, kernels.LOG2_E)
    is_empty = call(aten.eq.Scalar, lse, -INF)
    in_base_2 = call(aten.where.self, is_empty, INF, in_base_2)
    return inductor.contiguous(in_base_2), inductor.contiguous(delta)
