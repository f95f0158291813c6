"""Which blocks of a mask are non-empty and which are full, by evaluating every score.

Eager mode evaluates chunks of CHUNK_ELEMENTS. Under torch.compile it is one reduction over a
pointwise function, which Inductor turns into a loop that stores nothing else.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from flexhop.block_mask.lists import block_count, listed_count
from flexhop.compat.mods.indexing import IndexMode
from flexhop.compat.sizes import is_symbolic
from flexhop.mods.functions import MaskMod

# Mask elements that eager creation evaluates at once. A mask of a few comparisons needs about 16
# bytes of temporaries each, so this is about 64 MiB.
CHUNK_ELEMENTS = 4 * 1024 * 1024
# Longest side of a piece that is evaluated at once; longer blocks are split.
LONGEST = 1024
# vmap's in_dims for mapping over kv_idx, q_idx, h and b in turn; the last one is outermost.
MAPPED = (
    (None, None, None, 0),
    (None, None, 0, None),
    (None, 0, None, None),
    (0, None, None, None),
)


class Grid(NamedTuple):
    """The matrix of one mask, and its division into blocks."""

    batch: int
    heads: int
    q_len: int
    kv_len: int
    block: tuple[int, int]
    device: torch.device

    @property
    def rows(self) -> int:
        """Blocks of queries that are listed."""
        return listed_count(self.q_len, self.block[0])

    @property
    def columns(self) -> int:
        """Blocks of keys that are listed."""
        return listed_count(self.kv_len, self.block[1])


def whole_blocks(grid: Grid) -> Tensor:
    """[R, C] bool: blocks within both lengths; only they can be full."""
    return _first_blocks(grid, grid.q_len // grid.block[0], grid.kv_len // grid.block[1])


def existing_blocks(grid: Grid) -> Tensor:
    """[R, C] bool: blocks with a query and a key; others are listed if a length is symbolic."""
    return _first_blocks(grid, *map(block_count, (grid.q_len, grid.kv_len), grid.block))


def _first_blocks(grid: Grid, rows: int, columns: int) -> Tensor:
    """[R, C] bool: the first rows and columns of blocks."""
    is_row = count_up(grid.rows, grid.device) < rows
    is_column = count_up(grid.columns, grid.device) < columns
    return is_row[:, None] & is_column


def compiled_coverage(keep: MaskMod, grid: Grid) -> tuple[Tensor, Tensor]:
    """Whether each block is non-empty, and whether it is full: [B, H, R, C] bool each.

    Two things keep Inductor from storing the mask. All indices have the shape of the whole, so
    intermediate results have the loops of the final sum and fuse with it. And one sum encodes both
    facts, so the mask has one reader.
    """
    device = grid.device
    queries = _pieces(grid.q_len, grid.block[0], device)
    keys = _pieces(grid.kv_len, grid.block[1], device)
    shape = (grid.batch, grid.heads, queries.size(0), keys.size(0), queries.size(1), keys.size(1))
    indices = (
        count_up(grid.batch, device)[:, None, None, None, None, None],
        count_up(grid.heads, device)[:, None, None, None, None],
        queries[:, None, :, None],
        keys[:, None, :],
    )
    for _ in shape:
        keep = torch.vmap(keep)
    with torch.no_grad(), IndexMode():
        kept = keep(*(index.expand(shape) for index in indices))
    area = shape[4] * shape[5]
    count = kept.sum((4, 5), dtype=torch.int32 if area < 2**31 else torch.int64)
    some, every = count > 0, count == area
    if is_symbolic(grid.q_len) or is_symbolic(grid.kv_len):
        some = some & existing_blocks(grid)
    return some, every


def coverage_by_chunks(keep: MaskMod, grid: Grid) -> tuple[Tensor, Tensor]:
    """The same as `compiled_coverage`, CHUNK_ELEMENTS at a time."""
    batch, heads = count_up(grid.batch, grid.device), count_up(grid.heads, grid.device)
    queries = _pieces(grid.q_len, grid.block[0], grid.device, LONGEST)
    keys = _pieces(grid.kv_len, grid.block[1], grid.device, LONGEST)
    shape = (grid.batch, grid.heads, len(queries), len(keys))
    some = torch.empty(shape, dtype=torch.bool, device=grid.device)
    every = torch.empty_like(some)
    for b, h, q, kv in _chunks(shape, queries.shape[1] * keys.shape[1]):
        kept = evaluate_mod(keep, batch[b], heads[h], queries[q].flatten(), keys[kv].flatten())
        tiles = kept.unflatten(3, (-1, keys.shape[1])).unflatten(2, (-1, queries.shape[1]))
        some[b, h, q, kv] = tiles.any(5).any(3)
        every[b, h, q, kv] = tiles.all(5).all(3)
    some, every = (
        table.unflatten(3, (grid.columns, -1)).unflatten(2, (grid.rows, -1))
        for table in (some, every)
    )
    return some.any(5).any(3), every.all(5).all(3)


def _pieces(length: int, block: int, device: torch.device, longest: int | None = None) -> Tensor:
    """Positions in order, one row per block, or per piece of a block: [P, size] int32.

    Pieces are padded, at the end of their block or of the sequence, by repeating the last
    position. That changes neither "some" nor "every" and keeps captured tables in range.
    """
    # Do not compare a symbolic length: that would be a guard.
    reach = block if is_symbolic(length) else min(block, length)
    size = reach if longest is None else min(reach, longest)
    within = torch.arange(block_count(reach, size) * size, device=device, dtype=torch.int32)
    start = torch.arange(listed_count(length, block), device=device, dtype=torch.int32) * block
    position = (start[:, None] + within.clamp(max=reach - 1)).clamp(max=length - 1)
    return position.view(-1, size)


def _chunks(shape: tuple[int, ...], area: int) -> Iterator[tuple[slice, ...]]:
    """Split a table into parts of at most CHUNK_ELEMENTS, if each entry stands for `area`."""
    room = max(1, CHUNK_ELEMENTS // area)
    spans: list[list[slice]] = []
    for size in reversed(shape):  # the last dimension first: its parts are contiguous
        step = min(size, room)
        room = max(1, room // step)
        spans.insert(0, [slice(start, start + step) for start in range(0, size, step)])
    return itertools.product(*spans)


def evaluate_mod(
    mod: Callable[..., Tensor], b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor
) -> Tensor:
    """Evaluate a mod for each combination of indices: [len(b), len(h), len(q_idx), len(kv_idx)].

    Uses vmap rather than broadcasting: a mod may index in steps, `table[b][q_idx]`, which means
    something else if indices have dimensions.
    """
    for dims in MAPPED:
        mod = torch.vmap(mod, in_dims=dims)
    with torch.no_grad(), IndexMode():
        return mod(b, h, q_idx, kv_idx)


def count_up(size: int, device: torch.device) -> Tensor:
    """0 to size - 1, as in kernels: int32."""
    return torch.arange(size, device=device, dtype=torch.int32)


def hidden_count(size: int, device: torch.device) -> Tensor:
    """0 to size - 1, int32, hidden from Inductor as loop counters.

    Inductor writes sums and quotients of counters as formulas. That is slow for many counters,
    fails for some (2.13), and drops the rest of a length that is no multiple of a divisor (2.11 to
    2.15, on a CPU).
    """
    return count_up(size, device).bitwise_or(0)
