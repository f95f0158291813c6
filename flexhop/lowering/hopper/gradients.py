"""What stands around the backward kernel of Hopper GPUs, and its launch.

The kernel reads statistics of queries that are prepared for it, and adds to the gradient of query
in fp32, which is scaled and converted after it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from flexhop.compat import ahead, gluon, inductor
from flexhop.errors import ModLoweringError
from flexhop.lowering.dialect import choose_grad_dialect
from flexhop.lowering.emission.kernel import Launch, Output
from flexhop.lowering.hopper import backward as hopper_grad
from flexhop.lowering.hopper.add_order import emit_order, order_size
from flexhop.lowering.mods.lower import joint_outputs, lower_joint, read_joint
from flexhop.lowering.operands import block_inputs
from flexhop.lowering.portable import kernels
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
) -> tuple[Any, Any, Any] | None:
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
    counter = inductor.zeros([_counters(launch, lse.get_size())], torch.int32, device)
    lists, order = block_inputs(args, "q", lse, query), query
    if _needs_order(launch):
        order = emit_order(launch.problem, (query, key), lists)
    inputs = [query, key, value, lse, delta, grad_out, grad_query, grad_value, counter, order]
    written = [grad_query, grad_value, counter, *captured.sums]
    output = Output(layouts[0], key.get_size(), written)
    grad_key = launch.emit_hopper_backward([*inputs, *lists], output, joint, captured.sites)
    if grad_key is None:
        return None
    # Read after the kernel, or zeros would be scaled.
    added = inductor.ir.TensorBox(grad_query)
    scaled = inductor.call_lowering(aten.mul.Tensor, added, launch.problem.scale)
    return inductor.call_lowering(convert, scaled, query.get_dtype()), grad_key, grad_value


def _counters(launch: Launch, statistic: Sequence[Any]) -> Any:
    """Tiles that are handed out, and, where sums have an order, whose turn it is.

    That is one number per tile of queries.
    """
    if not launch.problem.is_deterministic:
        return 1
    batch, heads, rows = statistic
    return 1 + batch * heads * rows // hopper_grad.table_tile(launch.problem).block_m


def _needs_order(launch: Launch) -> bool:
    """Whether the order of sums is to be computed; without a mask tiles just follow each other."""
    return launch.problem.is_deterministic and launch.problem.blocks is not None


def prepare_gradients(launch: Launch, args: AttentionArgs) -> None:
    """Begin to compile the backward kernel, which this forward call will need.

    AOTAutograd lowers the backward graph later, so the kernel's operands are foretold. A wrong
    guess costs the time of a worker, no more. Not foretold: gradients of captured tensors.

    Args:
        launch: of the forward call.
        args: query, key and value with storage.
    """
    joint = ahead.traced("flexhop_joint") if ahead.is_useful() else None
    if joint is None or len(joint_outputs(joint)) > 1:
        return
    problem = dataclasses.replace(launch.problem, **read_joint(joint)._asdict())
    if choose_grad_dialect(problem, launch.options).name == "hopper":
        _start_kernel(launch._replace(problem=problem), args, joint)


def _start_kernel(launch: Launch, args: AttentionArgs, joint: fx.GraphModule) -> None:
    """Begin to compile the backward kernel of a call, with the gradient of its score_mod."""
    key: Any = args.key
    device, captures = inductor.device_of(key), inductor.realize(args.score_captures)
    try:
        gradient = lower_joint(device, joint, captures, ())
    except ModLoweringError:
        return  # the backward pass will say so, if there is one
    with (
        ahead.stand_ins(_foretell_layouts(launch, args)) as operands,
        ahead.stand_ins(_foretell_lists()) as computed,
    ):
        blocks = _as_views_of_tables(args, computed)
        lists = block_inputs(args._replace(blocks=blocks), "q", operands["lse"], args.query)
        written = [operands[name] for name in ("grad_query", "grad_value", "counter")]
        output = Output(_like(key), key.get_size(), written)
        order = [] if _needs_order(launch) else [args.query]
        inputs = [*_tensors(args), *operands.values(), *order, *lists]
        launch.start_hopper_backward(inputs, output, gradient)


def _as_views_of_tables(args: AttentionArgs, computed: dict[str, Any]) -> tuple[Any, ...]:
    """The block lists, those that this graph computes by their stand-ins.

    The ends of a range that mask_mod reads are lists, too, if queries see the keys that see them.
    The backward graph then gets them once, and the kernel has one pointer.
    """
    nodes: Any = AttentionArgs(*ahead.operand_nodes())
    tables = {
        ahead.origin(node): value
        for node, value in zip(nodes.mask_captures, args.mask_captures, strict=True)
        if isinstance(node, fx.Node)
    }

    def find(node: fx.Node, value: Any) -> Any:
        if node.name not in computed or ahead.origin(node) not in tables:
            return computed.get(node.name, value)
        size = inductor.as_expressions(node.meta["val"].shape)
        return inductor.call_lowering(aten.view.default, tables[ahead.origin(node)], size)

    return tuple(map(find, nodes.blocks, args.blocks))


def _foretell_lists() -> dict[str, Any]:
    """Layouts of the block lists that this graph computes, which the other gets, by node."""
    computed = (node for node in _list_nodes() if node.op != "placeholder")
    return {node.name: _layout_of(node.meta["val"]) for node in computed}


def _list_nodes() -> tuple[Any, ...]:
    return AttentionArgs(*ahead.operand_nodes()).blocks


def _layout_of(fake: torch.Tensor) -> Any:
    size, stride = map(inductor.as_expressions, (fake.shape, fake.stride()))
    return inductor.fixed_layout(fake.device, fake.dtype, size, stride)


def _tensors(args: AttentionArgs) -> tuple[Any, Any, Any]:
    return args.query, args.key, args.value


def _foretell_layouts(launch: Launch, args: AttentionArgs) -> dict[str, Any]:
    """Layouts of the kernel's operands that the backward graph will have, in their order."""
    query, key, value = _tensors(args)
    device, dtype = inductor.device_of(query), query.get_dtype()
    batch, heads, length, _ = query.get_size()
    tile, blocks = hopper_grad.table_tile(launch.problem), launch.problem.blocks
    rows = length + gluon.fill_up(length, tile.block_m if blocks is None else blocks.q_size)
    statistic = inductor.contiguous_layout(device, torch.float32, [batch, heads, rows])
    out = inductor.output_meta()[0]
    sizes, strides = map(inductor.as_expressions, (out.shape, ahead.gradient_strides(out)))
    counters = _counters(launch, [batch, heads, rows])
    foretold = {
        "lse": statistic,
        "delta": statistic,
        "grad_out": inductor.fixed_layout(device, dtype, sizes, strides),
        "grad_query": inductor.contiguous_layout(device, torch.float32, query.get_size()),
        "grad_value": _like(value),
        "counter": inductor.contiguous_layout(device, torch.int32, [counters]),
    }
    if _needs_order(launch):
        size = order_size(launch.problem, query, key)
        foretold["order"] = inductor.contiguous_layout(device, torch.int32, size)
    return foretold


def _like(tensor: Any) -> Any:
    """The layout of a tensor's gradient."""
    size, order = tensor.get_size(), [inductor.hint(n) for n in tensor.get_stride()]
    return inductor.fixed_layout(
        inductor.device_of(tensor), tensor.get_dtype(), size, dense_strides(size, order)
    )


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
