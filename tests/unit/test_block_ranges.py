"""Block lists of masks whose queries see one range of keys, against the dense definition."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flexhop.block_lists import lists_to_dense, ranges_to_dense
from flexhop.block_ranges import list_ranges, list_rows
from flexhop.mask_creation import create_block_mask


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


@settings(max_examples=80, deadline=None)
@given(
    steps=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 12)), min_size=1, max_size=70),
    keys=st.integers(1, 90),
    block=st.tuples(st.sampled_from([4, 16]), st.sampled_from([8, 16])),
    has_full=st.booleans(),
)
def test_the_lists_are_those_of_the_dense_mask(steps, keys, block, has_full):
    first, end = ranges(steps, keys)
    queries = len(steps)

    def mask(b, h, q, k):
        return (k >= first[q]) & (k < end[q])

    expected = create_block_mask(mask, None, None, queries, keys, "cpu", block)
    partial, full = expected._dense()
    sides = list_ranges((first, end), keys, block, has_full=has_full)
    grids = ((partial, full), (partial.mT, full.mT))
    for lists, (some, every) in zip(sides, grids, strict=True):
        columns = some.shape[-1]
        listed = ranges_to_dense(lists.num_blocks, lists.indices, columns)
        listed_full = ranges_to_dense(lists.full_num_blocks, lists.full_indices, columns)
        assert not (listed & listed_full).any()
        # A block whose rows see nothing may be listed: its mask hides everything.
        assert not ((some | every)[0, 0] & ~(listed | listed_full)).any()
        # An overhanging column of keys is never full in the dense mask, nor here.
        assert torch.equal(listed_full, every[0, 0] if has_full else torch.zeros_like(listed))


def test_ends_that_decrease_stay_within_the_grid():
    first = torch.tensor([50, 3, 70, 0] * 8)
    end = torch.tensor([10, 90, 2, 64] * 8)
    for lists, columns in zip(
        list_ranges((first, end), 80, (8, 16), has_full=True), (5, 4), strict=True
    ):
        for counts, indices in (
            (lists.num_blocks, lists.indices), (lists.full_num_blocks, lists.full_indices)
        ):  # fmt: skip
            start, at, gap = indices.unbind(-1)
            last = counts - 1
            final = start + last + torch.where(last >= at, gap, 0)
            assert (counts >= 0).all() and (gap >= 0).all()
            assert ((start >= 0) & (final < columns))[counts > 0].all()


def test_ranges_say_what_lists_say():
    first = torch.tensor([0, 0, 1, 5, 5, 9, 30, 30, 31, 60, 62, 62] * 1)
    end = torch.tensor([4, 40, 40, 41, 45, 45, 60, 60, 80, 80, 80, 80])
    by_row, _ = list_ranges((first, end), 80, (2, 8), has_full=True)
    lists = list_rows((first[None], end[None]), 80, (2, 8), 10)
    for ranges, listed in zip(
        (by_row[:2], by_row[2:]), ((lists[0][0], lists[1][0]), (lists[2][0], lists[3][0])),
        strict=True,
    ):  # fmt: skip
        assert torch.equal(ranges[0], listed[0])
        assert torch.equal(ranges_to_dense(*ranges, 10), lists_to_dense(*listed, 10))


def test_memory_grows_with_the_blocks():
    first = torch.arange(1 << 16)
    lists, _ = list_ranges((first // 2, first + 1), 1 << 16, (128, 128), has_full=True)
    assert sum(t.numel() for t in lists) == 8 * 512
