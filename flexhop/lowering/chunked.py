"""Lower the reference implementation where there is no kernel: on the CPU and in fp64.

A loop in the compiled code evaluates one chunk of queries after the other, so memory is O(chunk *
S). Each chunk runs ops/eager.py unchanged.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexhop.compat.graphs import inline
from flexhop.compat.kernels import inductor
from flexhop.compat.mods.location import line_of
from flexhop.compat.operators.vmapped import LoopedOperator, without_loops
from flexhop.errors import ModLoweringError
from flexhop.lowering import fallback
from flexhop.ops import wide_lse
from flexhop.ops.args import AttentionArgs, BackwardArgs, CachedArgs
from flexhop.ops.cached_eager import lengths_of, ordered_args
from flexhop.ops.eager import (
    Chunk,
    Grids,
    accumulate_dtype,
    attend_rows,
    cast_gradients,
    grad_rows,
    listed_blocks,
    slice_chunk,
    zero_totals,
)

# Scores per chunk: 1 MiB in fp32, to stay in a core's cache.
CHUNK_ELEMENTS = 1 << 18
# On a GPU 64 MiB: fewer products than with 64 columns leave multiprocessors idle. Second orders at
# (2, 16, 4096, 64) took 198 ms and 640 MiB with 16 MiB, 66 ms and 900 MiB with 64, 41 ms and
# 2,256 MiB with 256 (H200).
GPU_CHUNK_ELEMENTS = 1 << 24
LEAST_ROWS = 16

Tensors = tuple[Tensor, ...]


class Rowwise(NamedTuple):
    """A computation in chunks.

    step(args, grids, chunk, totals) returns the chunk's rows of every result, each [B, Hq, m,
    *width], and the totals with the chunk's part added.
    """

    step: Callable[[Any, Grids, Chunk, Tensors], tuple[Tensors, Tensors]]
    results: tuple[tuple[tuple[int, ...], torch.dtype], ...]  # width and dtype of each


def is_without_kernel(query: Any) -> bool:
    """Whether the templates do not support this query, or there is none."""
    if fallback.is_without_kernels() or is_empty(query):
        return True
    return query.get_device().type == "cpu" or query.get_dtype() == torch.float64


def is_empty(query: Any) -> bool:
    """Whether a call has no batch or no query: no kernel may run on an empty grid."""
    return any(size == 0 for size in query.get_size())


def lower_attention(*operands: Any) -> tuple[Any, Any, Any]:
    """Lower `flexhop_attention`: (out, lse, max_scores)."""
    return _lower_forward(AttentionArgs(*operands), lambda args: (args, None))


def lower_cached_attention(*operands: Any) -> tuple[Any, Any, Any]:
    """Lower `flexhop_cached_attention`: put its keys in order, then as above."""
    return _lower_forward(
        CachedArgs(*operands), lambda args: (ordered_args(args), lengths_of(args))
    )


def _lower_forward(
    args: Any, in_order: Callable[[Any], tuple[AttentionArgs, Tensor | None]]
) -> tuple[Any, Any, Any]:
    """Lower a forward operator; in_order: its operands with keys in order, and their number."""
    returns_max = bool(args.options.get("return_max"))

    def step(
        args: AttentionArgs, grids: Grids, chunk: Chunk, _: Tensors
    ) -> tuple[Tensors, Tensors]:
        return attend_rows(args, grids, chunk)[: 2 + returns_max], ()

    def formula(args: Any, rows: int | None) -> Tensors:
        dtype = accumulate_dtype(args.query.dtype)
        lse = wide_lse.dtype_of(args.options, dtype)
        results = (((args.value.size(3),), args.query.dtype), ((), lse), ((), dtype))
        work = Rowwise(step, results[: 2 + returns_max])
        ordered, lengths = in_order(args)
        found, _ = over_chunks(work, ordered, rows, (), lengths)
        return found

    return _with_max(lower_definition(args, formula), returns_max)


def _with_max(results: list[Any], returns_max: bool) -> tuple[Any, Any, Any]:
    if not returns_max:
        meta = inductor.output_meta()[2]
        results.append(inductor.empty([0], None, meta.dtype, meta.device))
    out, lse, max_scores = results
    return out, lse, max_scores


def lower_attention_backward(*operands: Any) -> tuple[Any, Any, Any, list[Any]]:
    """Lower `flexhop_attention_backward`: gradients of query, key, value and captures."""

    def formula(args: BackwardArgs, rows: int | None) -> Tensors:
        grad_key, grad_value, captured = zero_totals(args)
        wide = (((args.query.size(3),), grad_key.dtype),)
        (grad_query,), totals = over_chunks(
            Rowwise(_grad_step, wide), args, rows, (grad_key, grad_value, *captured)
        )
        *grads, captured = cast_gradients(args, grad_query, totals[0], totals[1], totals[2:])
        return (*grads, *captured)

    grad_query, grad_key, grad_value, *captured = lower_definition(
        BackwardArgs(*operands), formula
    )
    return grad_query, grad_key, grad_value, captured


def _grad_step(
    args: BackwardArgs, grids: Grids, chunk: Chunk, totals: Tensors
) -> tuple[Tensors, Tensors]:
    grad_key, grad_value, *captured = totals
    rows, key_part, value_part, added = grad_rows(args, grids, chunk, tuple(captured))
    return (rows,), (grad_key + key_part, grad_value + value_part, *added)


def lower_definition(args: Any, formula: Callable[[Any, int | None], Tensors]) -> list[Any]:
    """Lower formula(args, rows) for operands that are IR; strides come from the node.

    Raises:
        ModLoweringError: a user function calls an operator that can only be traced once per score.
    """
    fakes = type(args)(*inline.fake_operands())
    rows = _rows_per_chunk(args, fakes.query.size(2))
    try:
        with without_loops():
            results = inline.lower_operands(lambda given: formula(given, rows), args)
    except LoopedOperator as error:
        raise _refusal(args, str(error).replace("::", ".")) from error
    metas = inline.leaves(inductor.output_meta())
    return [
        inline.with_strides(result, inductor.as_expressions(meta.stride()))
        for result, meta in zip(
            results, metas, strict=False
        )  # max_scores, if not requested, come last
    ]


def _refusal(args: Any, operator: str) -> ModLoweringError:
    """The error for an operator that torch.vmap has no rule for: one of the user's, mostly."""
    for mod in ("score_mod", "mask_mod"):
        for node in inductor.graph_module(getattr(args, mod)).graph.nodes:
            if str(node.target).startswith(operator):
                return ModLoweringError(
                    mod=mod, operation=operator, location=line_of(node),
                    reason="it is no pointwise operation, and torch.vmap has no rule for it",
                )  # fmt: skip
    return ModLoweringError(
        mod="A function", operation=operator, location="an unknown line",
        reason="torch.vmap has no rule for it",
    )  # fmt: skip


def _rows_per_chunk(args: Any, fake_length: object) -> int | None:
    """Queries per chunk; None if all are known to fit into one.

    fake_length: number of queries, a SymInt if it is dynamic.
    """
    batch, heads, length, _ = map(inductor.hint, args.query.get_size())
    per_query = batch * heads * inductor.hint(args.key.get_size()[2])
    if getattr(args, "pages", ()):
        per_query *= inductor.hint(args.pages[0].get_size()[1])
    is_gpu = inductor.device_of(args.query).type == "cuda"
    elements = GPU_CHUNK_ELEMENTS if is_gpu else CHUNK_ELEMENTS
    rows = max(LEAST_ROWS, elements // max(1, per_query))
    if isinstance(fake_length, int) and length <= rows:
        return None
    chunks = -(-length // rows)
    return -(-length // chunks)  # equal chunks, so that the last one is not mostly padding


def over_chunks(
    work: Rowwise, args: Any, rows: int | None, totals: Tensors, lengths: Tensor | None = None
) -> tuple[Tensors, Tensors]:
    """All rows of the results of `work`, and its totals; lengths as in Grids."""
    wide = accumulate_dtype(args.query.dtype)
    grids = listed_blocks(args)._replace(lengths=lengths)
    # Key and value are converted once, not in every chunk; the block lists are in `grids` now.
    args = args._replace(key=args.key.to(wide), value=args.value.to(wide), blocks=())
    length = args.query.size(2)
    if rows is None:
        return work.step(args, grids, slice_chunk(args.query, 0, length), totals)
    padded = (length + rows - 1) // rows * rows
    buffers = tuple(
        args.query.new_zeros((*args.query.shape[:2], padded, *width), dtype=dtype)
        for width, dtype in work.results
    )
    done = _loop(work, args, grids, rows, (buffers, totals))
    results, totals = done[: len(buffers)], done[len(buffers) :]
    # Not a slice: whether a slice is contiguous would become a guard on the length.
    kept = torch.arange(length, device=args.query.device)
    return tuple(result.index_select(2, kept) for result in results), totals


def _loop(
    work: Rowwise, args: Any, grids: Grids, rows: int, carried: tuple[Tensors, Tensors]
) -> Tensors:
    """Write every chunk's rows to the buffers; then return buffers and totals."""
    positions, rebuild = inline.separate((args, grids))
    flat = inline.leaves((args, grids))
    buffers, totals = carried
    count = len(buffers)

    def condition(turn: Tensor, *values: Any) -> Tensor:
        args, _ = rebuild(values[count + len(totals) :])
        return turn * rows < args.query.size(2)

    def body(turn: Tensor, *values: Any) -> Tensors:
        args, grids = rebuild(values[count + len(totals) :])
        position = turn * rows + torch.arange(rows, device=turn.device)
        chunk = _chunk_at(position, args.query.size(2))
        results, added = work.step(args, grids, chunk, values[count : count + len(totals)])
        written = (
            buffer.index_copy(2, position, result)
            for buffer, result in zip(values, results, strict=False)
        )
        return (turn + 1, *written, *added)

    first = torch.zeros((), dtype=torch.int64, device=args.query.device)
    fixed = [flat[i] for i in positions]
    return inline.while_loop(condition, body, (first, *buffers, *totals), fixed)[1:]


def _chunk_at(position: Tensor, length: int) -> Chunk:
    """The queries at `position`; those from `length` on only pad the chunk."""
    inside = position.clamp(max=length - 1)
    return Chunk(inside.int(), lambda tensor: tensor.index_select(2, inside), position < length)
