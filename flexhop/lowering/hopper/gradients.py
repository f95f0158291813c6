"""The Hopper backward kernel, and the kernels before and after it.

The kernel reads precomputed statistics of queries, and adds to the gradient of query in fp32. A
later kernel scales and converts it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from flexhop.compat.graphs import ahead
from flexhop.compat.kernels import gluon, inductor
from flexhop.errors import ModLoweringError
from flexhop.lowering.emission.kernel import Captured, KernelCall, Output, empty_like, output_like
from flexhop.lowering.hopper import backward, bits, schedule
from flexhop.lowering.hopper.add_order import emit_order, order_size
from flexhop.lowering.hopper.emit import Attempt, emit_first, fill_kernel
from flexhop.lowering.hopper.mask_bits import bits_size, emit_mask_bits
from flexhop.lowering.hopper.statistics import drop_padding, prepare, prepared_sizes
from flexhop.lowering.mods.analysed import JOINT, analysed
from flexhop.lowering.mods.lower import lower_joint
from flexhop.lowering.operands import block_inputs
from flexhop.lowering.plan import KernelPlan, show_plan
from flexhop.lowering.problem import Problem
from flexhop.ops.args import AttentionArgs, BackwardArgs, BlockTensors
from flexhop.ops.layout import dense_strides
from flexhop.options import KernelOptions

aten = torch.ops.aten
convert = torch.ops.prims.convert_element_type.default


class Operands(NamedTuple):
    """The kernel's operands: the inputs of its template, in order.

    The backward lowering passes real operands. The forward lowering passes placeholders of the
    same layouts, to compile the kernel ahead of time.
    """

    query: Any
    key: Any
    value: Any
    lse: Any  # see Prepared; [B, Hq, rows]: M rounded up
    delta: Any
    grad_out: Any
    grad_query: Any  # fp32 accumulator, see Prepared
    stored: Any  # the gradient of query, if programs own heads; query if they do not
    grad_value: Any
    counter: Any  # of tiles handed out; if sums have an order, then whose turn each tile is
    order: Any  # order of additions to grad_query; query if there is none
    words: Any  # stored bits; counter if there are none
    rest: Any  # what fp32 leaves of lse; lse itself if it cannot be large
    lists: Sequence[Any]

    def inputs(self) -> list[Any]:
        """Inputs of the template."""
        return [*self[:-1], *self.lists]

    def output(self, layout: Any, sums: Sequence[Any]) -> Output:
        """The gradient of key, and the other tensors that the kernel writes."""
        stored = [] if self.stored is self.query else [self.stored]
        written = [self.grad_query, *stored, self.grad_value, self.counter, *sums]
        return Output(layout, self.key.get_size(), written)


def _order_size(problem: Problem, query: Any, key: Any) -> list[Any] | None:
    """Sizes of the order of additions; None if there is none."""
    has_order = problem.is_deterministic and problem.blocks is not None
    return order_size(problem, query, key) if has_order else None


class _Gradients:
    """See lowering/dialect.py."""

    def obstacles(self, problem: Problem, options: KernelOptions) -> Iterator[str]:
        """Why the kernel does not support a call."""
        return backward.obstacles(problem, options)

    def slower(self, problem: Problem, options: KernelOptions) -> Iterator[str]:
        """Why the portable kernels are probably faster."""
        return backward.slower(problem, options)

    def plans(
        self, problem: Problem, options: KernelOptions, passed: str
    ) -> tuple[KernelPlan, ...]:
        """The plan of the one kernel for all gradients."""
        del options
        tile = backward.table_tile(problem)
        plan = KernelPlan(
            kernel="backward",
            tile=tile,
            reason="the Hopper kernel supports this call" + passed,
            shared_memory=backward.shared_memory(problem, tile),
            programs=min(problem.device.multiprocessors, backward.num_tiles(problem)),
            constants=dataclasses.asdict(backward.constants(problem, tile)),
        )
        return (plan,)

    def emit(
        self, call: KernelCall, args: BackwardArgs, joint: Sequence[Any], captured: Captured
    ) -> tuple[Any, Any, Any] | None:
        """The gradients of query, key and value, or None if the machine code spills."""
        problem = call.problem
        query: Any = args.query
        operands = _make_operands(call, args)
        show_plan("backward", lambda: self.plans(problem, call.options, call.passed)[0])
        output = operands.output(output_like(args.key, 1).layout, captured.sums)
        functions = [call.mods.score, call.mods.mask, *joint]
        subgraphs = inductor.Subgraphs(functions, captured.sites)
        tries = [
            Attempt(backward.constants(problem, tile), subgraphs, most)
            for tile, most in backward.attempts(problem, call.options)
        ]
        # Few kernels are rejected, so the next one is not compiled meanwhile.
        grad_key = emit_first(
            call, "backward", operands.inputs(), output, tries, side_by_side=False
        )
        if grad_key is None:
            return None
        if operands.stored is not query:
            return operands.stored, grad_key, operands.grad_value
        # Read after the kernel, or zeros would be scaled.
        added = inductor.ir.TensorBox(operands.grad_query)
        added = drop_padding(added, query.get_size()[2])
        scaled = inductor.call_lowering(aten.mul.Tensor, added, problem.scale)
        grad_query = inductor.call_lowering(convert, scaled, query.get_dtype())
        return grad_query, grad_key, operands.grad_value

    def start(self, call: KernelCall, args: AttentionArgs, joint: fx.GraphModule) -> None:
        """Start compiling the kernel, with the gradient of the call's score_mod.

        AOTAutograd lowers the backward graph later, so the operands are predicted. A wrong
        prediction only wastes a worker's time. Gradients of captured tensors are not predicted.
        """
        if len(analysed(joint, JOINT).mod.results) > 1:
            return
        key: Any = args.key
        device, captures = inductor.device_of(key), inductor.realize(args.score_captures)
        try:
            gradient = lower_joint(device, joint, captures, ()).functions
        except ModLoweringError:
            return  # the backward pass will raise it, if there is one
        with (
            ahead.placeholders(_predict_layouts(call, args)) as found,
            ahead.placeholders(_predict_lists()) as computed,
        ):
            blocks = _as_views_of_tables(args, computed)
            lists = block_inputs(args._replace(blocks=blocks), "q", found["lse"], args.query)
            lse = found["lse"]
            absent = {
                "order": args.query, "words": found["counter"],
                "rest": lse, "stored": args.query,
            }  # fmt: skip
            operands = Operands(args.query, key, args.value, **{**absent, **found}, lists=lists)
            constants = backward.constants(call.problem, backward.table_tile(call.problem))
            subgraphs = inductor.Subgraphs([call.mods.score, call.mods.mask, *gradient])
            output = operands.output(_like(key), ())
            ahead.start(
                fill_kernel(call, "backward", operands.inputs(), output, constants, subgraphs)
            )


GRADIENTS = _Gradients()


def _make_operands(call: KernelCall, args: BackwardArgs) -> Operands:
    """The kernel's operands: the call's, and those computed and cleared for it."""
    query: Any = args.query
    key: Any = args.key
    value: Any = args.value
    grad_out: Any = args.grad_out
    # The dialect was chosen without knowing its layout, so an unfit one is copied.
    if not gluon.suits_bulk_copies(grad_out):
        grad_out = inductor.contiguous(grad_out)
    lse, rest, delta, counter, grad_query = prepare(call.problem, args)
    grad_value = empty_like(value, 2)
    stored = empty_like(query, 0) if schedule.owns_heads(call.problem) else query
    lists, order = block_inputs(args, "q", lse, query), query
    if _order_size(call.problem, query, key) is not None:
        order = emit_order(call.problem, (query, key), lists)
    mask = bits.of_keys(call.problem)
    words = emit_mask_bits(call, (query, key), lists, mask, by_key=True) or counter
    return Operands(
        query, key, value, lse, delta, grad_out, grad_query, stored, grad_value, counter, order,
        words, rest, lists,
    )  # fmt: skip


def _predict_layouts(call: KernelCall, args: AttentionArgs) -> dict[str, Any]:
    """Predict the layouts of the operands that the backward graph will create, by name in
    Operands."""
    query: Any = args.query
    device, dtype = inductor.device_of(query), query.get_dtype()
    sizes = prepared_sizes(call.problem, query)
    statistic = inductor.contiguous_layout(device, torch.float32, sizes.statistic)
    out = inductor.output_meta()[0]
    out_size, strides = map(inductor.as_expressions, (out.shape, ahead.gradient_strides(out)))
    predicted = {
        "lse": statistic,
        "delta": statistic,
        "grad_out": inductor.fixed_layout(device, dtype, out_size, strides),
        "grad_query": inductor.contiguous_layout(device, torch.float32, sizes.grad_query),
        "grad_value": _like(args.value),
        "counter": inductor.contiguous_layout(device, torch.int32, sizes.statistic),
    }
    if call.problem.has_large_lse:
        predicted["rest"] = statistic
    if schedule.owns_heads(call.problem):
        predicted["stored"] = _like(query)
    order = _order_size(call.problem, query, args.key)
    if order is not None:
        predicted["order"] = inductor.contiguous_layout(device, torch.int32, order)
    stored = bits.of_keys(call.problem)
    if stored.blocks:
        lists: Any = BlockTensors(*args.blocks)
        size = bits_size(stored, query, lists.q_num_blocks.get_size()[2])
        predicted["words"] = inductor.contiguous_layout(device, torch.int32, size)
    return predicted


def _as_views_of_tables(args: AttentionArgs, computed: dict[str, Any]) -> tuple[Any, ...]:
    """The block lists; those that this graph computes become placeholders.

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


def _predict_lists() -> dict[str, Any]:
    """Predict the layouts of block lists that this graph computes and passes to the other, by
    node."""
    computed = (node for node in _list_nodes() if node.op != "placeholder")
    return {node.name: _layout_of(node.meta["val"]) for node in computed}


def _list_nodes() -> tuple[Any, ...]:
    return AttentionArgs(*ahead.operand_nodes()).blocks


def _layout_of(fake: torch.Tensor) -> Any:
    size, stride = map(inductor.as_expressions, (fake.shape, fake.stride()))
    return inductor.fixed_layout(fake.device, fake.dtype, size, stride)


def _like(tensor: Any) -> Any:
    """The layout of a tensor's gradient."""
    size, order = tensor.get_size(), [inductor.hint(n) for n in tensor.get_stride()]
    return inductor.fixed_layout(
        inductor.device_of(tensor), tensor.get_dtype(), size, dense_strides(size, order)
    )
