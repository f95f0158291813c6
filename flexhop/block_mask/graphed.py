"""Which blocks of a mask are non-empty and which are full, as operators of a traced graph.

The same ranges and intervals as in coverage.py, on tensors without values and with sizes that may
be symbolic. Nothing synchronises, and no shape depends on data. The mask's operators alone decide
in advance whether unknown blocks can exist.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexhop import analysis
from flexhop.block_mask.boxes import Boxes, sizes_of
from flexhop.block_mask.of_ranges import of_one_side
from flexhop.block_mask.scores import Grid, compiled_coverage, existing_blocks, hidden_count
from flexhop.block_mask.unknown import EVERY, NONE, SOME, UNKNOWN, unknown_blocks
from flexhop.compat.compilation import source_fingerprint
from flexhop.compat.sizes import bound_of, is_symbolic
from flexhop.mods.functions import MaskMod

_UNBOUNDED = 2**31  # one more than the largest int32: positions are int32


class Mask(NamedTuple):
    """A mask_mod whose captured tensors are operands, as listed in `captures`.

    captures: None if it holds its own tensors.
    """

    function: Callable[..., Tensor]
    captures: tuple[Any, ...] | None = None

    def __call__(self, *indices: Tensor) -> Tensor:
        """Call the user's function."""
        return self.function(*indices, *(self.captures or ()))


def graph_coverage(mask: Mask, keep: MaskMod, grid: Grid) -> tuple[Tensor, Tensor]:
    """Whether each block is non-empty, and whether it is full: [B or 1, H or 1, R, C] bool each.

    Args:
        mask: the user's function.
        keep: the same, with its results checked.
        grid: the blocks.
    """
    try:
        mod = analysis.trace(mask, grid.device, in_graph=True)
    except Exception:  # anything that the user's function raises: evaluating scores will report it
        return compiled_coverage(keep, grid)
    bounds = {name: bound_of(size) or _UNBOUNDED for name, size in sizes_of(grid).items()}
    forms = analysis.Forms(mod, bounds)
    depends = forms.depends_on(mod.result)
    batch, heads = (grid.batch if "b" in depends else 1), (grid.heads if "h" in depends else 1)
    reduced = grid._replace(batch=batch, heads=heads)
    places = {name: hidden_count(size, grid.device) for name, size in sizes_of(reduced).items()}
    queries = hidden_count(grid.rows * grid.block[0], grid.device)
    places["q"] = queries.clamp(max=grid.q_len - 1)
    span = analysis.find_span(forms, grid.device, places)
    is_open = is_symbolic(grid.q_len) or is_symbolic(grid.kv_len)  # there is room for more blocks
    if span is not None and (span.starts or span.stops):
        some, every = of_one_side(span, reduced, hidden_count(grid.columns, grid.device).long())
        return some & existing_blocks(grid) if is_open else some, every
    if span is not None:
        return _blocks_of_span(span, reduced)
    tables = analysis.GraphTables(grid.block, (grid.q_len, grid.kv_len))
    counts = (grid.rows, grid.columns)
    found = Boxes(mod, reduced, bounds, hidden_count).over_grid(grid.block, tables, counts)
    always, maybe, mixed = (flag.expand(batch, heads, *counts) for flag in found[:3])
    if is_open:
        maybe = maybe & existing_blocks(grid)
    if found.is_decided:
        return maybe, always
    if mask.captures is None:
        return compiled_coverage(keep, reduced)
    states = torch.where(always, EVERY, torch.where(mixed, SOME, UNKNOWN))
    states = torch.where(maybe, states, NONE).to(torch.int8)
    number = hidden_count(2, grid.device)
    lengths = torch.where(number == 0, number * 0 + grid.q_len, number * 0 + grid.kv_len)
    sizes, sources = (batch, heads, grid.q_len, grid.kv_len), source_fingerprint()
    operands = (mask.function, sizes, grid.block, sources, mask.captures)
    (states,) = unknown_blocks(states, lengths, *operands)
    some = states != NONE
    # The operator may evaluate the mask in any block, also in those that do not exist.
    return some & existing_blocks(grid) if is_open else some, states == EVERY


def _blocks_of_span(span: analysis.Span, grid: Grid) -> tuple[Tensor, Tensor]:
    """(some, every) of a mask of ranges, in work linear in queries and blocks.

    Each range adds one where it begins and subtracts one where it ends, for the blocks that it
    touches and for those that it covers; a running sum counts.

    Args:
        span: ranges of all queries of all blocks; the last queries may not exist.
        grid: the blocks.
    """
    (height, size), columns, device = grid.block, grid.columns, grid.device
    shape = (grid.batch, grid.heads, grid.rows, height)
    flat = (grid.batch, grid.heads, grid.rows * height)
    first, end = (t.expand(flat).view(shape) for t in (span.first, span.end))
    row = hidden_count(grid.rows, device)[:, None].long()
    is_real = row * height + hidden_count(height, device) < grid.q_len
    is_some = is_real & (end > first)
    touched = first // size, (end + size - 1) // size
    # The last block may be cut off: it counts as covered if its existing keys are.
    last = torch.full_like(end, columns)
    covered = (first + size - 1) // size, torch.where(end >= grid.kv_len, last, end // size)
    kind, is_end = (hidden_count(2, device).view(-1, *[1] * n) for n in (4, 2))
    begin, stop = (torch.where(kind == 0, a, b) for a, b in zip(touched, covered, strict=True))
    stop = torch.where(is_some, torch.maximum(begin, stop), begin)
    ends = torch.where(is_end == 0, begin[:, :, :, None], stop[:, :, :, None])
    where = ends.clamp(max=columns + 1) + row * (columns + 2)  # [2, B, H, 2, rows, height]
    signs = (1 - 2 * is_end).to(torch.int32).expand(where.shape)
    lists = (2, *shape[:2], 2 * grid.rows * height)
    size_of_marks = (*lists[:3], grid.rows * (columns + 2))
    marks = torch.zeros(size_of_marks, dtype=torch.int32, device=device)
    marks = marks.scatter_add(-1, where.reshape(lists), signs.reshape(lists))
    counts = marks.unflatten(-1, (grid.rows, columns + 2)).cumsum(-1, dtype=torch.int32)
    some, every = counts[..., :columns]
    return some > 0, every == is_real.sum(-1, dtype=torch.int32)[:, None]
