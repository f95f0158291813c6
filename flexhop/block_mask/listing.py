"""From non-empty and full blocks to a mask's lists."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flexhop.block_mask.lists import LISTED_AT_ONCE, dense_to_lists
from flexhop.block_mask.scores import Grid, whole_blocks
from flexhop.compat.mods.recorded import copies


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
        of the query side, if it is wanted. Each has memory of its own, of [B', H', ...].
    """
    some, every = covered
    separate, with_queries = sides
    count = (1 + separate) * (1 + with_queries)
    if not in_graph and count * some.numel() <= LISTED_AT_ONCE:
        is_cut = grid.q_len % grid.block[0] or grid.kv_len % grid.block[1]
        full = every & whole_blocks(grid) if is_cut else every
        parts = [some > full, full] if separate else [some]
        return copies(_at_once(parts, with_queries, is_square=grid.rows == grid.columns))
    full = every & whole_blocks(grid)
    parts = [some & ~full, full] if separate else [some]
    if with_queries:
        parts += [part.mT for part in parts]
    lists = (t for part in parts for t in dense_to_lists(part, in_graph=in_graph))
    # AOTInductor's packages did not read constants right that were views of others.
    return tuple(t.clone(memory_format=torch.contiguous_format) for t in lists)


def _at_once(parts: list[Tensor], with_queries: bool, *, is_square: bool) -> list[Tensor]:
    """The lists of parts, [B', H', R, C] bool each, by few operators; they share memory."""
    sides = [parts, [part.mT for part in parts]] if with_queries else [parts]
    if with_queries and is_square:
        sides = [[*sides[0], *sides[1]]]
    found: list[Tensor] = []
    for side in sides:
        lists = dense_to_lists(torch.stack(side))
        pairs = zip(*(t.contiguous().unbind() for t in lists), strict=True)
        found += [t for pair in pairs for t in pair]
    return found


def all_lists(fields: Sequence[Tensor], sides: tuple[bool, bool]) -> list[Tensor | None]:
    """Lists in BlockMask's order, with None for those that `listed` omits."""
    separate, with_queries = sides
    found: list[Tensor | None] = list(fields)
    if not separate:
        found[2:2] = [None, None]
        found += [None, None] if with_queries else []
    return found if with_queries else [*found, None, None, None, None]
