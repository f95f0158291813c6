"""Blocks of masks whose queries see one range of keys, against the dense definition."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flexhop.block_mask import create_block_mask
from flexhop.block_mask.fields import dense_blocks
from flexhop.block_mask.lists import find_ranges, list_rows, lists_to_dense, ranges_to_dense


def ranges(draw_steps: list[tuple[int, int]], keys: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Never decreasing ends from steps: the first key moves on by one, the end by another."""
    first, end = [], []
    low = high = 0
    for step_low, step_high in draw_steps:
        high = min(keys, high + step_high)
        low = min(high, low + step_low)
        first.append(low)
        end.append(high)
    return torch.tensor(first), torch.tensor(end)


def seen_by_keys(
    seen: tuple[torch.Tensor, torch.Tensor], keys: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The queries that see each key: from the first that ends behind it to the last that begins
    before."""
    key = torch.arange(keys)
    first, end = seen
    return torch.searchsorted(end, key, right=True), torch.searchsorted(first, key, right=True)


@settings(max_examples=80, deadline=None)
@given(
    steps=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 12)), min_size=1, max_size=70),
    keys=st.integers(1, 90),
    block=st.tuples(st.sampled_from([4, 16]), st.sampled_from([8, 16])),
)
def test_the_blocks_are_those_of_the_dense_mask(steps, keys, block):
    first, end = ranges(steps, keys)
    queries = len(steps)

    def mask(b, h, q, k):
        return (k >= first[q]) & (k < end[q])

    expected = create_block_mask(mask, None, None, queries, keys, "cpu", block)
    some, every = (grid[0, 0] for grid in dense_blocks(expected))
    by_row = ranges_to_dense((first, end), some.size(1), block)
    seen = seen_by_keys((first, end), keys)
    by_column = ranges_to_dense(seen, some.size(0), block[::-1])
    for (partial, full), turn in ((by_row, False), (by_column, True)):
        visited = (some | every).mT if turn else some | every
        assert not (partial & full).any()
        # A block whose rows see nothing may be visited: its mask hides everything.
        assert not (visited & ~(partial | full)).any()
        # What overhangs is never full in the dense mask, nor here.
        assert torch.equal(full, every.mT if turn else every)


def test_ends_that_decrease_stay_within_the_grid():
    first = torch.tensor([50, 3, 70, 0] * 8)
    end = torch.tensor([10, 90, 2, 64] * 8)
    for columns in (2, 5, 9):
        start, stop, full_start, full_count = find_ranges((first, end), columns, (8, 16))
        assert ((start >= 0) & (start <= stop) & (stop <= columns)).all()
        assert ((full_start >= start) & (full_count >= 0)).all()
        assert (full_start + full_count <= stop).all()


def test_lists_say_what_ranges_say():
    first = torch.tensor([0, 0, 1, 5, 5, 9, 30, 30, 31, 60, 62, 62] * 1)
    end = torch.tensor([4, 40, 40, 41, 45, 45, 60, 60, 80, 80, 80, 80])
    grids = ranges_to_dense((first, end), 10, (2, 8))
    lists = list_rows((first[None], end[None]), 80, (2, 8), 10)
    for grid, listed in zip(grids, (lists[:2], lists[2:]), strict=True):
        assert torch.equal(grid, lists_to_dense(*listed, 10)[0])
