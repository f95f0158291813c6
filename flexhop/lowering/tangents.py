"""Kernels of forward mode, and of second orders (the backward pass in forward mode)."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from flexhop.compat.graphs import guards, inline
from flexhop.compat.kernels import inductor
from flexhop.compat.kernels.gluon_versions import triton_version
from flexhop.compat.kernels.pointwise import convert, product
from flexhop.errors import UnsupportedFeatureError
from flexhop.lowering import fallback
from flexhop.lowering.emission.kernel import Captured, KernelCall, Output
from flexhop.lowering.emission.sums import Gathered, Reads, gather, score_sizes
from flexhop.lowering.mods.captured import own_entries, read_sites
from flexhop.lowering.mods.lower import lower_mods
from flexhop.lowering.mods.push import is_additive, lower_bend, lower_push
from flexhop.lowering.mods.sums import Sums, lower_sums
from flexhop.lowering.operands import (
    block_inputs,
    read_problem,
    seed_input,
    show_problem,
    user_options,
)
from flexhop.lowering.portable import kernels
from flexhop.lowering.portable.emit import emit_kernel
from flexhop.lowering.portable.rules import Kernel
from flexhop.lowering.problem import UNREAD, Problem
from flexhop.lowering.second import Second, Wanted, read_second
from flexhop.ops.args import AttentionArgs, DerivativeArgs, operands_of
from flexhop.ops.derivatives.program import read_step

aten = torch.ops.aten
OPERANDS = ("query", "key", "value")
# Two accumulators of wider rows exceed the registers of the smallest tile (seen in cubins).
_MOST_COLUMNS = 256
_SECOND: dict[str, Kernel] = {
    "query": "jvp_grad_query", "key": "jvp_grad_key", "value": "jvp_grad_value",
}  # fmt: skip


class _Tangents(NamedTuple):
    """Data that the kernels of one call share."""

    call: AttentionArgs  # with operands in memory
    shared: KernelCall
    dots: dict[str, Any]  # tangents of query, key and value
    moved: dict[int, Any]  # tangents of captured tensors, by position
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
    problem = tangents.shared.problem
    if _width(problem) > _most_columns(problem) or not kernels.has_tile("jvp_forward", problem):
        return None
    emit = functools.partial(_emit_pushed, tangents)
    return fallback.attempt("forward mode", emit, problem)


def _emit_pushed(tangents: _Tangents) -> list[Any]:
    query: Any = tangents.call.query
    strides = [inductor.as_expressions(meta.stride()) for meta in inductor.output_meta()]
    found = _push(tangents, query.get_dtype(), strides[0], strides[2])
    return [found.out, found.lse, found.out_dot, found.lse_dot]


def _read(args: DerivativeArgs, dots: dict[str, Any], moved: dict[int, Any]) -> _Tangents:
    """Operands and facts of a call.

    dots: tangents of query, key and value, in memory. moved: tangents of captured tensors.
    """
    device = inductor.device_of(args.query)
    score_captures = inductor.realize(args.score_captures)
    mask_captures = inductor.realize(args.mask_captures)
    mods = lower_mods(device, (args.score_mod, args.mask_mod), (score_captures, mask_captures))
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
    return _Tangents(call, shared, dots, moved, push)


def _most_columns(problem: Problem) -> int:
    """Most columns of the forward-mode kernel.

    On sm_90 and later, LLVM of Triton 3.9 aborts the process over its exact float32 products of
    256 columns.
    """
    is_exact = problem.dtype == torch.float32 and not problem.is_tf32
    aborts = triton_version() >= (3, 9) and problem.device.capability >= (9, 0)
    return 128 if is_exact and aborts else _MOST_COLUMNS


def _width(problem: Problem) -> int:
    return max(problem.head_dim, problem.value_head_dim)


def _push(tangents: _Tangents, dtype: torch.dtype, out_strides: Any, dot_strides: Any) -> _Pushed:
    """Out, lse and their tangents; dtype and strides of out and of its tangent."""
    call, shared, dots, _, push = tangents
    query: Any = call.query
    value: Any = call.value
    device = inductor.device_of(query)
    size = [*query.get_size()[:3], value.get_size()[3]]
    layout = inductor.fixed_layout(device, dtype, size, out_strides)
    out_dot = inductor.empty(size, dot_strides, dtype, device)
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
    moved = {position: directions[i] for position, i in second.moved.items()}
    tangents = _read(args, {n: dots[n] for n in OPERANDS if n in dots}, moved)
    if second_obstacle(tangents.shared.problem):
        return None
    try:
        backward = _lower_kinds(tangents, second)
    except UnsupportedFeatureError:
        return None
    emit = functools.partial(_emit_grads, backward, second, grads, dots)
    return fallback.attempt("second orders", emit, tangents.shared.problem)


class _Functions(NamedTuple):
    """Derivatives of score_mod that the kernels call, and the captures that get gradients."""

    bend: Any
    slope: Any
    sums: Sums | None


class _Backward(NamedTuple):
    """The backward pass in forward mode, along some tangents."""

    tangents: _Tangents
    functions: _Functions


def _lower_kinds(tangents: _Tangents, second: Second) -> dict[str, _Backward]:
    """The backward passes that results need, by their kind.

    The backward pass itself ("grad") is its own tangent along the gradient of out alone.

    Raises:
        UnsupportedFeatureError: a capture is computed with before it is read.
    """
    device = inductor.device_of(tangents.call.query)
    score, captures = tangents.call.score_mod, tangents.shared.captures
    # If no capture moves, the tangent of score_mod is its derivative times score_dot already.
    slope = lower_push(device, score, captures, {}) if tangents.moved else tangents.push
    # The gradient itself: the tangent along the gradient of out, with everything else at rest.
    still = tangents._replace(dots={}, moved={}, push=slope)
    found: dict[str, _Backward] = {}
    for kind, along in (("grad", still), ("grad_dot", tangents)):
        names = {w.capture for w in second.results if w.kind == kind}
        wanted = sorted(position for position in names if position is not None)
        sums = lower_sums(device, score, captures, wanted, along.moved) if wanted else None
        bend = lower_bend(device, score, captures, along.moved)
        found[kind] = _Backward(along, _Functions(bend, slope, sums))
    return found


def _emit_grads(
    kinds: dict[str, _Backward], second: Second, grads: dict[str, Any], dots: dict[str, Any]
) -> list[Any]:
    tangents = kinds["grad_dot"].tangents
    guards.guard_aligned_strides([t[n] for t in (dots, grads) for n in ("out",) if n in t])
    query: Any = tangents.call.query
    value: Any = tangents.call.value
    device = inductor.device_of(query)
    size = [*query.get_size()[:3], value.get_size()[3]]
    # Where P is near 1, what they add to D and its tangent cancels: they are not rounded before.
    plain = inductor.contiguous_layout(device, torch.float32, size).stride
    if "out" not in grads:  # a loss on lse alone
        grads = {**grads, "out": inductor.zeros(size, query.get_dtype(), device)}
    pushed = _push(tangents, torch.float32, plain, plain)
    rows = _rows(pushed, grads, dots)
    found: dict[Wanted, Any] = {}
    for kind, backward in kinds.items():
        wanted = {w: at for at, w in enumerate(second.results) if w.kind == kind}
        if wanted:
            own = _own_tangent(rows) if kind == "grad" else rows
            found |= _emit_kind(backward, own, wanted)
    for position, w in enumerate(second.results):
        if w.kind == "dot":
            strides = inductor.as_expressions(inductor.output_meta()[position].stride())
            dtype = query.get_dtype() if w.name == "out" else torch.float32
            dot = inductor.call_lowering(convert, getattr(pushed, f"{w.name}_dot"), dtype)
            found[w] = inline.with_strides(dot, strides)
    return [found[w] for w in second.results]


def _emit_kind(
    backward: _Backward, rows: _Rows, wanted: Mapping[Wanted, int]
) -> dict[Wanted, Any]:
    """Gradients, or their tangents; wanted: which, and their positions among the results."""
    names = {w.name: position for w, position in wanted.items()}
    of_captures = [w for w in wanted if w.capture is not None]
    found: dict[str, Any] = {}
    if of_captures:
        # The kernel for query adds to them, so it runs even if query needs no gradient.
        call = backward.tangents.call
        gathered = gather(_reads(backward), call.query, call.key)
        position = names.pop("query", None)
        found["query"] = _grad(backward, rows, "query", position, gathered)
        fakes = DerivativeArgs(*inline.fake_operands()).score_captures
        values = gathered.values(fakes)
        found |= {w.name: values[w.capture] for w in of_captures if w.capture is not None}
    for name in names:
        if name in OPERANDS:
            found[name] = _grad(backward, rows, name, names[name])
    return {w: found[w.name] for w in wanted}


def _reads(backward: _Backward) -> Reads:
    assert backward.functions.sums is not None
    graph, sites, _ = backward.functions.sums
    call, shared, *_ = backward.tangents
    # Subgraphs of the kernel: score_mod, mask_mod, three derivatives of score_mod, then outputs of
    # the graph. No kernel calls the first: output 1 is number 5.
    return Reads(
        graph, sites, shared.captures, 4, is_reproducible=shared.problem.is_deterministic,
        own=own_entries(graph, sites, score_sizes(call.query, call.key)),
        visits_all=shared.problem.blocks is None,
    )  # fmt: skip


def _has_lists(args: DerivativeArgs, second: Second) -> bool:
    """Whether the mask lists the queries of keys, if gradients of keys are wanted."""
    options: Any = args.options
    of_keys = any(w.kind != "dot" and w.name != "query" for w in second.results)
    return not of_keys or not args.blocks or bool(options.get("has_q_blocks"))


def second_obstacle(problem: Problem) -> str:
    """Why the second-order kernels do not support a call; empty if they do."""
    most = 128 if problem.itemsize > 2 else _MOST_COLUMNS
    width = _width(problem)
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
    first, *others = (product(*pair) for pair in products)
    total = functools.reduce(
        lambda a, b: inductor.call_lowering(aten.add.Tensor, a, b), others, first
    )
    return inductor.call_lowering(aten.sum.dim_IntList, total, [-1])


def _grad(
    backward: _Backward, rows: _Rows, name: str, position: int | None,
    gathered: Gathered | None = None,
) -> Any:  # fmt: skip
    """Emit the tangent of the gradient of query, key or value.

    position: of the result among the node's; None if nobody reads it. gathered: what this kernel
    adds to gradients of captured tensors.
    """
    (call, shared, dots, moved, push), functions = backward
    has_dot = rows.grad_out_dot is not None
    joint = [push, functions.bend, functions.slope]
    moving = (*(n for n in OPERANDS if n in dots), *["out"] * has_dot, *["captures"] * bool(moved))
    problem = dataclasses.replace(shared.problem, tangents=moving)
    captured = Captured((), ()) if gathered is None else gathered.captured
    if gathered is not None and functions.sums is not None:
        joint += functions.sums.functions[1:]
        read_by = read_sites(gathered.reads.joint, gathered.reads.sites)
        grad = problem.grad._replace(captured_reads=read_by, own_entries=gathered.reads.own)
        problem = dataclasses.replace(problem, grad=grad)
    shared = dataclasses.replace(shared, problem=problem)
    grad_out_dot = rows.grad_out_dot if has_dot else rows.grad_out
    operands = (*call[:3], rows.grad_out, *_or_stand_ins(call, dots), grad_out_dot, *rows[2:])
    inputs = [
        *operands,
        *block_inputs(call, "kv" if name == "query" else "q", rows.lse, call.query),
    ]
    like: Any = getattr(call, name)
    strides = None
    if position is not None:
        strides = inductor.as_expressions(inductor.output_meta()[position].stride())
    layout = _layout_like(like, strides)
    output = Output(layout, like.get_size(), captured.sums)
    return emit_kernel(shared, _SECOND[name], inputs, output, joint, captured.sites)


def _layout_like(tensor: Any, strides: Sequence[Any] | None) -> Any:
    device, dtype, size = inductor.device_of(tensor), tensor.get_dtype(), tensor.get_size()
    if strides is None:
        return inductor.contiguous_layout(device, dtype, size)
    return inductor.fixed_layout(device, dtype, size, strides)
