"""User functions in the kernels for CPUs: lowered once, printed as loops over a tile of scores."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from flexhop.analysis import INDICES, dtype_of
from flexhop.compat.kernels import cpp_kernel, inductor, pointwise, short_rows
from flexhop.compat.kernels.cpp_kernel import Printer, Stored
from flexhop.compat.kernels.inductor import ops
from flexhop.lowering.mods.analysed import SCORE, analyse_kernel, kernel_graph
from flexhop.lowering.mods.indices import wrap_reads
from flexhop.lowering.mods.lower import (
    INDEX_NAMES,
    is_all_true,
    is_identity,
    position_sizes,
    score_inputs,
)
from flexhop.lowering.mods.quotients import alone
from flexhop.ops.args import AttentionArgs, BackwardArgs

PLACE = """
  const int64_t place_b = place.b, place_h = place.h, place_q = place.q, place_k = place.k;
  const int64_t place_rows = place.rows, place_columns = place.columns, place_step = place.step;
"""
_ARGUMENTS = "[&](const float* buf_score, float* buf_changed, const flexhop::Place& place) {"
_INDICES: dict[str, str] = dict(
    zip(INDEX_NAMES, ("place_b", "place_h", "place_q", "place_k"), strict=True)
)
SIZES = (cpp_kernel.integer("place_rows"), cpp_kernel.integer("place_columns"))
STEP = cpp_kernel.integer("place_step")
_LARGEST = 2**31 - 1  # of an integer of 32 bits


class Mods(NamedTuple):
    """The functions of a call, lowered: scalar buffers; None if they change or hide nothing.

    score_captures, mask_captures: what they capture, with storage. may_wrap: whether an integer of
    theirs may leave its 32 bits.
    """

    score: Any
    mask: Any
    score_captures: Sequence[Any]
    mask_captures: Sequence[Any]
    may_wrap: bool

    @property
    def captures(self) -> list[Any]:
        """Of both functions."""
        return [*self.score_captures, *self.mask_captures]

    @property
    def captured_tensors(self) -> list[Any]:
        """Those captures that are tensors."""
        return [one for one in self.captures if inductor.is_ir(one)]


def lower_mods(args: AttentionArgs | BackwardArgs, sizes: Sequence[Any] | None = None) -> Mods:
    """Lower score_mod and mask_mod.

    Args:
        args: operands.
        sizes: [B, Hq, M, N], by default those of query and key.

    Raises:
        ModLoweringError: a function cannot be computed for one score.
    """
    device = inductor.device_of(args.query)
    first, *indices = score_inputs(device)
    captures = [
        _with_storage(group, device) for group in (args.score_captures, args.mask_captures)
    ]
    score_graph, mask_graph = (
        kernel_graph(args.score_mod, SCORE),
        kernel_graph(args.mask_mod, INDICES),
    )
    score = mask = None
    if not is_identity(score_graph):
        safe = wrap_reads(score_graph, SCORE, position_sizes(sizes))
        (score,) = lower(safe, [first, *indices, *captures[0]], "score_mod")
    if not is_all_true(mask_graph):
        safe = wrap_reads(alone(mask_graph, "k"), INDICES, position_sizes(sizes))
        (mask,) = lower(safe, [*indices, *captures[1]], "mask_mod")
    may_wrap = _may_wrap(score_graph, SCORE) or _may_wrap(mask_graph, INDICES)
    return Mods(score, mask, captures[0], captures[1], may_wrap)


def _may_wrap(graph: torch.fx.GraphModule, inputs: tuple[str, ...]) -> bool:
    """Whether an integer that is computed may be any of its 32 bits."""
    found = analyse_kernel(graph, inputs)
    return any(
        dtype_of(node) == torch.int32 and found[node].high >= _LARGEST
        for node in graph.graph.nodes
        if node.op == "call_function" and node.target is not torch.ops.aten.index.Tensor
    )


def lower(graph: torch.fx.GraphModule, inputs: Sequence[Any], mod: str) -> list[Any]:
    """pointwise.lower, with sums of short rows as terms."""
    with short_rows.unrolled():
        return pointwise.lower(graph, inputs, mod)


def _with_storage(captures: Sequence[Any], device: torch.device) -> list[Any]:
    """Captures with storage; a symbolic float becomes a tensor, which kernels can be handed."""
    full = torch.ops.aten.full.default
    return inductor.realize(
        [
            inductor.call_lowering(full, [], one, dtype=torch.float32, device=device)
            if inductor.is_symbolic_float(one)
            else one
            for one in captures
        ]
    )


def value_of(buffer: Any, dtype: torch.dtype | None = None) -> Any:
    """The IR of a lowered function's result, as `dtype`."""
    value = buffer.data.make_loader()(())
    return value if dtype in (None, buffer.get_dtype()) else ops.to_dtype(value, dtype)


def inputs_of(mods: Mods, *, by_key: bool, **others: str) -> dict[str, Callable[[], Any]]:
    """How the inputs of the functions are made at the score that is printed.

    Args:
        mods: of the call.
        by_key: whether rows of scores are keys, and not queries.
        **others: further scores, by name: the pointers that hold them.
    """

    def read(pointer: str) -> Any:
        row, column = cpp_kernel.here()
        return ops.load(pointer, row * STEP + column)

    def position(name: str) -> Any:
        q_idx, kv_idx = reversed(cpp_kernel.here()) if by_key else cpp_kernel.here()
        along = {"q_idx": q_idx, "kv_idx": kv_idx}.get(name, 0)
        place = ops.index_expr(cpp_kernel.integer(_INDICES[name]) + along, torch.int32)
        # Inductor would go on in 64 bits with what is an expression of places, and never wrap.
        return ops.bitwise_or(place, ops.constant(0, torch.int32)) if mods.may_wrap else place

    pointers = {"score": "buf_score", **others}
    made = {name: functools.partial(read, pointer) for name, pointer in pointers.items()}
    return made | {name: functools.partial(position, name) for name in INDEX_NAMES}


def _modified(mods: Mods, score: Callable[[], Any]) -> Any:
    """The IR of a score after score_mod."""
    return score() if mods.score is None else value_of(mods.score, torch.float32)


def _masked(mods: Mods, score: Callable[[], Any]) -> Any:
    """The IR of a score after both functions: -inf if hidden."""
    hidden = ops.constant(-math.inf, torch.float32)
    return ops.where(value_of(mods.mask, torch.bool), _modified(mods, score), hidden)


def score_functions(printer: Printer, mods: Mods, *, by_key: bool) -> str:
    """C++ of `full` and `partial`, which change scores.

    Args:
        printer: of the kernel.
        mods: of the call.
        by_key: as in `inputs_of`.
    """
    inputs = inputs_of(mods, by_key=by_key)
    full = partial = None
    if mods.score is not None:
        full = partial = functools.partial(_modified, mods, inputs["score"])
    if mods.mask is not None:
        partial = functools.partial(_masked, mods, inputs["score"])
    texts = {"full": full, "partial": partial}
    return "\n".join(
        f"const auto {name} = {_function(printer, inputs, value)};"
        for name, value in texts.items()
    )


def _function(
    printer: Printer, inputs: dict[str, Callable[[], Any]], value: Callable[[], Any] | None
) -> str:
    if value is None:
        return "flexhop::Nothing{}"
    stored = [Stored(value, "buf_changed", torch.float32)]
    loops = printer.loops(stored, inputs, {"buf_score": torch.float32}, SIZES, STEP)
    return f"{_ARGUMENTS}{PLACE}{loops}\n}}"
