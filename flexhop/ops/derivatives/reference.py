"""Reference derivatives of attention: a program of program.py, one chunk of queries at a time.

PyTorch's own transforms differentiate the definition below, so every order and every mix of modes
is exact. Memory is O(chunk * S) in all of them: like attention, its derivatives consist of rows
per query and sums over queries.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexhop.compat.operators import transforms
from flexhop.ops.args import AttentionArgs, DerivativeArgs
from flexhop.ops.derivatives.program import (
    LSE,
    OUT,
    ROWS,
    Signature,
    Tensors,
    capture_position,
    run,
    signature,
)
from flexhop.ops.derivatives.smooth import smooth
from flexhop.ops.dropout import drop
from flexhop.ops.eager import (
    Chunk,
    Grids,
    accumulate_dtype,
    chunks,
    combine_values,
    dot_keys,
    index_grids,
    listed_blocks,
    over_elements,
    softmax_rows,
    visible_keys,
)
from flexhop.ops.layout import is_nothing

Parts = tuple[Tensors, Tensors]  # rows of some results, and addends of the others


def signature_of(args: DerivativeArgs) -> Signature:
    """Inputs and outputs of a call."""
    return signature(len(args.score_captures), args.program)


def result_like(args: DerivativeArgs, name: str) -> tuple[tuple[Any, ...], torch.dtype]:
    """Shape and dtype of a value."""
    query = args.query
    if name == OUT:
        return (*query.shape[:3], args.value.size(3)), query.dtype
    if name == LSE:
        return tuple(query.shape[:3]), accumulate_dtype(query.dtype)
    position = capture_position(name)
    like = getattr(args, name) if position is None else args.score_captures[position]
    return tuple(like.shape), like.dtype


def derive(args: DerivativeArgs) -> Tensors:
    """The outputs of a call, each in the dtype of the value that it is like."""
    names = signature_of(args).outputs
    grids, wide = listed_blocks(args), widened(args)
    rows: list[Tensors] = []
    sums = zero_sums(args)
    for chunk in chunks(wide):
        with transforms.above_autograd():
            found, added = derive_rows(wide, grids, chunk)
        rows.append(found)
        sums = tuple(a + b for a, b in zip(sums, added, strict=True))
    whole = iter(sums)
    joined = (torch.cat(parts, dim=2) for parts in zip(*rows, strict=True))
    results = (next(joined if name in ROWS else whole) for name in names)
    return tuple(t.to(result_like(args, name)[1]) for t, name in zip(results, names, strict=True))


def widened(args: DerivativeArgs) -> DerivativeArgs:
    """The same call with every differentiable operand in the accumulation dtype."""
    query, key, value = (_wide(args, t) for t in args[:3])
    return args._replace(
        query=query, key=key, value=value,
        score_captures=tuple(_wide(args, c) for c in args.score_captures),
        directions=tuple(_wide(args, t) for t in args.directions),
    )  # fmt: skip


def _wide(args: DerivativeArgs, value: Any) -> Any:
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return value
    return value.to(torch.promote_types(value.dtype, accumulate_dtype(args.query.dtype)))


def zero_sums(args: DerivativeArgs) -> Tensors:
    """Zeros to accumulate the results that have no rows."""
    names = (name for name in signature_of(args).outputs if name not in ROWS)
    likes = (result_like(args, name) for name in names)
    wide = accumulate_dtype(args.query.dtype)
    return tuple(
        torch.zeros(shape, dtype=torch.promote_types(dtype, wide), device=args.query.device)
        for shape, dtype in likes
    )


def derive_rows(args: DerivativeArgs, grids: Grids, chunk: Chunk) -> Parts:
    """The contribution of one chunk of queries.

    Args:
        args: widened.
        grids, chunk: see ops/eager.py.

    Returns:
        Its rows of the results that have rows, and its parts of the others.
    """
    names = signature_of(args)
    if is_nothing(args.query):
        likes = (result_like(args, name)[0] for name in names.outputs if name in ROWS)
        empty = (args.query.new_zeros(shape) for shape in likes)  # args.query is wide
        return tuple(chunk.pick(t) for t in empty), zero_sums(args)
    values = (*args[:3], *args.score_captures, *args.directions)
    inputs = [
        chunk.pick(value) if name in ROWS else value
        for value, name in zip(values, names.inputs, strict=True)
    ]
    results = run(_Definition(args, grids, chunk, inputs[0]), args.program, inputs)
    named = list(zip(results, names.outputs, strict=True))
    return (
        tuple(result for result, name in named if name in ROWS),
        tuple(result for result, name in named if name not in ROWS),
    )


class _Hidden(NamedTuple):
    indices: Tensors  # b, h, q_idx, kv_idx
    visible: Tensor  # [B, Hq, m, N] bool


class _Definition:
    """Attention of one chunk of queries, differentiable any number of times."""

    def __init__(self, args: DerivativeArgs, grids: Grids, chunk: Chunk, query: Tensor) -> None:
        self.args = args._replace(score_mod=smooth(args.score_mod))
        scores = query.new_empty(()).expand(*query.shape[:3], args.key.size(2))
        b, h, _, kv_idx = index_grids(scores)
        index = (b, h, chunk.q_idx, kv_idx)
        visible = visible_keys(args, grids, index, scores)
        if chunk.live is not None:
            visible = visible & chunk.live[:, None]
        self.hidden = _Hidden(index, visible)

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, *captures: Any) -> Tensors:
        """Out and lse, [B, Hq, m, Dv] and [B, Hq, m]."""
        index, visible = self.hidden
        raw = dot_keys(query, key) * self.args.scale
        # A mod's derivative can be infinite or NaN where the mask hides the score.
        raw = torch.where(visible, raw, raw.detach())
        modified = over_elements(self.args.score_mod, 1, (raw,), index, captures)
        modified = torch.where(visible, modified.to(raw.dtype), float("-inf"))
        weights, total, lse = softmax_rows(modified)
        # Before the product: what is common to the tangents of a row cancels here, unrounded.
        weights = weights / total[..., None]
        kept = drop(weights, self.args.dropout_seed, self.args.options, index)
        out = combine_values(kept, value)
        return out, lse


def as_derivative(
    args: AttentionArgs, program: Sequence[str], directions: Sequence[Tensor]
) -> DerivativeArgs:
    """Convert an attention call to a derivative."""
    more: dict[str, Any] = {"program": tuple(program), "directions": tuple(directions)}
    return DerivativeArgs(**args._asdict(), **more)
