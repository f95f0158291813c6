"""From non-empty and full blocks to a mask's lists."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flexhop.block_mask.lists import dense_to_lists
from flexhop.block_mask.scores import Grid, whole_blocks


def listed(
    covered: tuple[Tensor, Tensor], grid: Grid, sides: tuple[bool, bool], *, in_graph: bool
) -> tuple[Tensor, ...]:
    """The lists of a mask; lists that all batches and heads share are computed once.

    Args:
        covered: for each block, whether it is non-empty, and whether it is full: [B', H', R, C]
            bool.
        grid: the blocks.
        sides: whether to list full blocks separately, and the query side.
        in_graph: whether a graph is being traced.

    Returns:
        Counts and indices of partial blocks, and of full ones if they are separate; then the same
        of the query side, if it is wanted.
    """
    some, every = covered
    separate, with_queries = sides
    full = every & whole_blocks(grid)
    parts = [some & ~full, full] if separate else [some]
    if with_queries:
        parts += [part.mT for part in parts]
    lists = (t for part in parts for t in dense_to_lists(part, in_graph=in_graph))
    return tuple(_for_all(t, grid) for t in lists)


def all_lists(fields: Sequence[Tensor], sides: tuple[bool, bool]) -> list[Tensor | None]:
    """Lists in BlockMask's order, with None for those that `listed` omits."""
    separate, with_queries = sides
    found: list[Tensor | None] = list(fields)
    if not separate:
        found[2:2] = [None, None]
        found += [None, None] if with_queries else []
    return found if with_queries else [*found, None, None, None, None]


def _for_all(lists: Tensor, grid: Grid) -> Tensor:
    """Lists for every batch and head of the grid, in their own memory.

    Never a view, not even of the same shape: an AOTInductor package with views of other tensors as
    constants read the wrong memory.
    """
    shape = (grid.batch, grid.heads, *lists.shape[2:])
    return lists.expand(shape).clone(memory_format=torch.contiguous_format)
