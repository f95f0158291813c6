"""Kernels of forward mode, and of second orders (the backward pass in forward mode)."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from flexhop.compat import guards, inductor, inline
from flexhop.lowering import fallback
from flexhop.lowering.emission.kernel import KernelCall, Output
from flexhop.lowering.mods.lower import lower_mods
from flexhop.lowering.mods.push import is_additive, lower_bend, lower_push
from flexhop.lowering.operands import (
    block_inputs,
    read_problem,
    seed_input,
    show_problem,
    user_options,
)
from flexhop.lowering.portable import kernels
from flexhop.lowering.portable.emit import emit_kernel
from flexhop.lowering.portable.names import Kernel
from flexhop.lowering.problem import UNREAD, Problem
from flexhop.lowering.second import Second, read_second
from flexhop.ops.args import AttentionArgs, DerivativeArgs, operands_of
from flexhop.ops.program import read_step

aten = torch.ops.aten
OPERANDS = ("query", "key", "value")
_SECOND: dict[str, Kernel] = {
    "query": "jvp_grad_query", "key": "jvp_grad_key", "value": "jvp_grad_value",
}  # fmt: skip


class _Tangents(NamedTuple):
    """Data that the kernels of one call share."""

    call: AttentionArgs  # with operands in memory
    shared: KernelCall
    dots: dict[str, Any]  # tangents of query, key and value
    push: Any  # the tangent of score_mod, lowered


class _Pushed(NamedTuple):
    """Results of the forward-mode kernel."""

    out: Any
    lse: Any
    out_dot: Any
    lse_dot: Any


def emit_tangent(args: DerivativeArgs) -> list[Any] | None:
    """Emit the kernel of out, lse and their tangents; None if no tile of it fits."""
    given = read_step(args.program[0]).given
    directions = dict(zip(given, inductor.realize(args.directions), strict=True))
    dots = {OPERANDS[i]: tangent for i, tangent in directions.items() if i < 3}
    moved = {i - 3: tangent for i, tangent in directions.items() if i >= 3}
    tangents = _read(args, dots, moved)
    if not kernels.has_tile("jvp_forward", tangents.shared.problem) or _is_too_wide(tangents):
        return None
    emit = functools.partial(_emit_pushed, tangents)
    return fallback.attempt("forward mode", emit, tangents.shared.problem)


def _emit_pushed(tangents: _Tangents) -> list[Any]:
    strides = [inductor.as_expressions(meta.stride()) for meta in inductor.output_meta()]
    found = _push(tangents, strides[0], strides[2])
    return [found.out, found.lse, found.out_dot, found.lse_dot]


def _read(args: DerivativeArgs, dots: dict[str, Any], moved: dict[int, Any]) -> _Tangents:
    """Operands and facts of a call.

    dots: tangents of query, key and value, in memory. moved: tangents of captured tensors.
    """
    device = inductor.device_of(args.query)
    score_captures = inductor.realize(args.score_captures)
    mask_captures = inductor.realize(args.mask_captures)
    mods = lower_mods(device, args.score_mod, args.mask_mod, (score_captures, mask_captures))
    query, key, value = dense = inductor.realize((args.query, args.key, args.value))
    guards.guard_aligned_strides((*dense, *dots.values()))
    call = operands_of(AttentionArgs, args, query=query, key=key, value=value)
    moving = tuple(name for name in OPERANDS if name in dots)
    grad = UNREAD._replace(has_score_grad=not is_additive(args.score_mod))
    problem = read_problem(call, mods, tangents=moving, grad=grad)
    show_problem("forward", problem)
    push = lower_push(device, args.score_mod, score_captures, moved)
    captures = [*score_captures, *mask_captures, *(moved[i] for i in sorted(moved))]
    shared = KernelCall(problem, user_options(args.options), mods, captures, seed=seed_input(call))
    return _Tangents(call, shared, dots, push)


def _is_too_wide(tangents: _Tangents) -> bool:
    """Whether two accumulators of a row exceed the registers of the smallest tile (seen in
    cubins)."""
    problem = tangents.shared.problem
    most = 128 if problem.itemsize > 2 else 256
    return max(problem.head_dim, problem.value_head_dim) > most


def _push(tangents: _Tangents, out_strides: Any, dot_strides: Any) -> _Pushed:
    """Out, lse and their tangents; strides of out and of its tangent."""
    call, shared, dots, push = tangents
    query: Any = call.query
    value: Any = call.value
    device = inductor.device_of(query)
    size = [*query.get_size()[:3], value.get_size()[3]]
    layout = inductor.fixed_layout(device, query.get_dtype(), size, out_strides)
    out_dot = inductor.empty(size, dot_strides, query.get_dtype(), device)
    lse, lse_dot = (inductor.empty(size[:3], None, torch.float32, device) for _ in range(2))
    operands = (*call[:3], *_or_stand_ins(call, dots), lse, lse_dot, out_dot)
    inputs = [*operands, *block_inputs(call, "kv", lse, query)]
    output = Output(layout, query.get_size(), [lse, lse_dot, out_dot])
    return _Pushed(
        emit_kernel(shared, "jvp_forward", inputs, output, [push]), lse, out_dot, lse_dot
    )


def _or_stand_ins(call: AttentionArgs, dots: Mapping[str, Any]) -> list[Any]:
    """Tangents of query, key and value; the tensor itself stands in for a missing one."""
    return [dots.get(name, tensor) for name, tensor in zip(OPERANDS, call, strict=False)]


# Second orders


class _Rows(NamedTuple):
    """Inputs per query of the second-order kernels, besides its row."""

    grad_out: Any
    grad_out_dot: Any
    lse: Any
    lse_dot: Any
    delta: Any
    delta_dot: Any


def emit_second(args: DerivativeArgs) -> list[Any] | None:
    """Emit a second-order derivative (lowering/second.py); None if no kernel supports it."""
    second = read_second(args.program, len(args.score_captures))
    if second is None or not _has_lists(args, second):
        return None
    directions = inductor.realize(args.directions)
    dots = {name: directions[i] for name, i in second.dots.items()}
    grads = {name: directions[i] for name, i in second.grads.items()}
    tangents = _read(args, {n: dots[n] for n in OPERANDS if n in dots}, {})
    if second_obstacle(tangents.shared.problem):
        return None
    emit = functools.partial(_emit_grads, tangents, second, grads, dots)
    return fallback.attempt("second orders", emit, tangents.shared.problem)


def _emit_grads(
    tangents: _Tangents, second: Second, grads: dict[str, Any], dots: dict[str, Any]
) -> list[Any]:
    guards.guard_aligned_strides([t[n] for t in (dots, grads) for n in ("out",) if n in t])
    query: Any = tangents.call.query
    value: Any = tangents.call.value
    device = inductor.device_of(query)
    size = [*query.get_size()[:3], value.get_size()[3]]
    plain = inductor.contiguous_layout(device, query.get_dtype(), size).stride
    pushed = _push(tangents, plain, plain)
    rows = _rows(pushed, grads, dots)
    bend = lower_bend(device, tangents.call.score_mod, tangents.shared.captures)
    alone = tangents._replace(dots={})
    own = _own_tangent(rows) if any(w.kind == "grad" for w in second.results) else rows
    results: list[Any] = []
    for position, wanted in enumerate(second.results):
        if wanted.kind == "dot":
            found = getattr(pushed, f"{wanted.name}_dot")
            strides = inductor.as_expressions(inductor.output_meta()[position].stride())
            results.append(inline.with_strides(found, strides))
        elif wanted.kind == "grad":
            results.append(_grad(alone, own, wanted.name, position, bend))
        else:
            results.append(_grad(tangents, rows, wanted.name, position, bend))
    return results


def _has_lists(args: DerivativeArgs, second: Second) -> bool:
    """Whether the mask lists the queries of keys, if gradients of keys are wanted."""
    options: Any = args.options
    of_keys = any(w.kind != "dot" and w.name != "query" for w in second.results)
    return not of_keys or not args.blocks or bool(options.get("has_q_blocks"))


def second_obstacle(problem: Problem) -> str:
    """Why the second-order kernels do not support a call; empty if they do."""
    most = 64 if problem.itemsize > 2 else 128
    width = max(problem.head_dim, problem.value_head_dim)
    if problem.has_captured_grads:
        return "captured tensors need gradients"
    if problem.dropout_p > 0.0:
        return "there is dropout"
    if width > most:
        return f"the head size is {width}, and the kernels have registers for at most {most}"
    if not all(kernels.has_tile(k, problem) for k in ("jvp_forward", *_SECOND.values())):
        return "the device has too little shared memory"
    return ""


def describe_second(problem: Problem) -> str:
    """How second derivatives of a call are computed, as a sentence."""
    obstacle = second_obstacle(problem)
    if obstacle:
        return (
            "Second derivatives run the reference implementation, in chunks of queries, because "
            f"{obstacle}."
        )
    names = ", ".join(("jvp_forward", *_SECOND.values()))
    return f"Second derivatives run the kernels {names}."


def _rows(pushed: _Pushed, grads: Mapping[str, Any], dots: Mapping[str, Any]) -> _Rows:
    """D and its tangent, each fused by Inductor into one reduction; see lowering/second.py."""
    delta = _row_sum([(grads["out"], pushed.out)])
    products = [(grads["out"], pushed.out_dot)]
    if "out" in dots:
        products.append((dots["out"], pushed.out))
    delta_dot = _row_sum(products)
    if "lse" in grads:
        delta = inductor.call_lowering(aten.sub.Tensor, delta, grads["lse"])
    if "lse" in dots:
        delta_dot = inductor.call_lowering(aten.sub.Tensor, delta_dot, dots["lse"])
    return _Rows(
        grads["out"], dots.get("out"), pushed.lse, pushed.lse_dot,
        inductor.contiguous(delta), inductor.contiguous(delta_dot),
    )  # fmt: skip


def _own_tangent(rows: _Rows) -> _Rows:
    """The backward pass is linear, so it is its own tangent along the gradient of out."""
    lse: Any = rows.lse
    still = inductor.zeros(lse.get_size(), torch.float32, inductor.device_of(lse))
    return rows._replace(grad_out_dot=rows.grad_out, lse_dot=still, delta_dot=rows.delta)


def _row_sum(products: Sequence[tuple[Any, Any]]) -> Any:
    """The sum over columns of the products of pairs, in fp32."""
    as_float = torch.ops.prims.convert_element_type.default
    total: Any = None
    for pair in products:
        left, right = (inductor.call_lowering(as_float, t, torch.float32) for t in pair)
        product = inductor.call_lowering(aten.mul.Tensor, left, right)
        total = (
            product if total is None else inductor.call_lowering(aten.add.Tensor, total, product)
        )
    return inductor.call_lowering(aten.sum.dim_IntList, total, [-1])


def _grad(tangents: _Tangents, rows: _Rows, name: str, position: int, bend: Any) -> Any:
    """Emit the tangent of the gradient of query, key or value, result `position` of the node."""
    call, shared, dots, push = tangents
    has_dot = rows.grad_out_dot is not None
    problem = dataclasses.replace(
        shared.problem, tangents=(*(n for n in OPERANDS if n in dots), *["out"] * has_dot)
    )
    shared = dataclasses.replace(shared, problem=problem)
    grad_out_dot = rows.grad_out_dot if has_dot else rows.grad_out
    operands = (*call[:3], rows.grad_out, *_or_stand_ins(call, dots), grad_out_dot, *rows[2:])
    inputs = [
        *operands,
        *block_inputs(call, "kv" if name == "query" else "q", rows.lse, call.query),
    ]
    like: Any = getattr(call, name)
    strides = inductor.as_expressions(inductor.output_meta()[position].stride())
    layout = inductor.fixed_layout(
        inductor.device_of(like), like.get_dtype(), like.get_size(), strides
    )
    return emit_kernel(
        shared, _SECOND[name], inputs, Output(layout, like.get_size()), [push, bend]
    )
