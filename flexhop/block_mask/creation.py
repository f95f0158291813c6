"""From a mask_mod to the blocks it needs, without ever holding the whole mask.

A block needs two facts: whether mask_mod keeps anything in it, and whether it keeps everything.
Eagerly they are computed chunk by chunk, within CHUNK_ELEMENTS. Under torch.compile they are one
reduction over a pointwise function, which Inductor turns into a loop that stores nothing else.
"""

from __future__ import annotations

import itertools
import traceback
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from flexhop.block_mask.fields import block_size_pair
from flexhop.block_mask.lists import block_count, dense_to_lists
from flexhop.block_mask.mask import BlockMask
from flexhop.compat.indexing import IndexMode
from flexhop.errors import (
    BlockMaskFieldError,
    ModLoweringError,
    ModResultError,
    SequenceLengthError,
)
from flexhop.mods.functions import MaskMod, ScoreMod, check_arity, is_score_mod

# Elements of the mask that eager creation looks at together. A mask of a few comparisons holds
# about 16 bytes of temporaries for each, so this is about 64 MiB.
CHUNK_ELEMENTS = 4 * 1024 * 1024
# Longest side of what it looks at as one; longer blocks are looked at in pieces.
LONGEST = 1024
# vmap's in_dims for mapping over kv_idx, q_idx, h and b in turn; the last one is outermost.
MAPPED = (
    (None, None, None, 0),
    (None, None, 0, None),
    (None, 0, None, None),
    (0, None, None, None),
)


class Grid(NamedTuple):
    """The matrix of one mask, and how it is cut into blocks."""

    batch: int
    heads: int
    q_len: int
    kv_len: int
    block: tuple[int, int]
    device: torch.device

    @property
    def rows(self) -> int:
        """Blocks of queries."""
        return block_count(self.q_len, self.block[0])

    @property
    def columns(self) -> int:
        """Blocks of keys."""
        return block_count(self.kv_len, self.block[1])


def create_block_mask(
    mask_mod: MaskMod,
    B: int | None,
    H: int | None,
    Q_LEN: int,
    KV_LEN: int,
    device: torch.device | str | int | None = None,
    BLOCK_SIZE: int | tuple[int, int] = 128,
    _compile: bool = False,
    separate_full_blocks: bool = True,
    compute_dq_write_order: bool = False,
    dq_kv_order: bool = True,
    *,
    compute_q_blocks: bool = True,
) -> BlockMask:
    """Find the blocks that a mask_mod needs.

    The mask itself is never held: memory is bounded by CHUNK_ELEMENTS eagerly and by the lists
    of blocks under torch.compile. Nothing waits for the device.

    Args:
        mask_mod: mask_mod(b, h, q_idx, kv_idx) -> bool, of 0-d int32 tensors, all in range.
        B: batches; None is 1, which serves every batch.
        H: query heads; None is 1, which serves every head.
        Q_LEN: number of queries.
        KV_LEN: number of keys.
        device: where the lists will be; None is the accelerator, or the CPU if there is none.
        BLOCK_SIZE: queries and keys of a block; an int stands for a square.
        _compile: build with torch.compile; the same as torch.compile(create_block_mask).
        separate_full_blocks: list full blocks apart, so that kernels skip mask_mod there.
        compute_dq_write_order: also compute dq_write_order.
        dq_kv_order: the order behind it: True is descending, False ascending.
        compute_q_blocks: also list the query blocks of each key block; needed for gradients.

    Raises:
        SequenceLengthError: a size is not positive.
        BlockSizeError: BLOCK_SIZE is not positive.
        ModArityError, ModResultError: mask_mod takes or returns something else.
        ModLoweringError: mask_mod branches on the value of an index.
        BlockMaskFieldError: dq_kv_order is not a bool.
    """
    if not isinstance(dq_kv_order, bool):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise BlockMaskFieldError(
            field="dq_kv_order", reason="dq_kv_order must be a bool for create_block_mask"
        )
    _check_mask_mod(mask_mod)
    grid = _grid(B, H, (Q_LEN, KV_LEN), block_size_pair(BLOCK_SIZE), device)
    build = torch.compile(_block_mask) if _compile else _block_mask
    mask = build(mask_mod, grid, separate_full_blocks, compute_q_blocks)
    if compute_dq_write_order:
        mask.compute_dq_write_order(dq_kv_order)
    return mask


def create_mask(
    mod_fn: ScoreMod | MaskMod,
    B: int | None,
    H: int | None,
    Q_LEN: int,
    KV_LEN: int,
    device: torch.device | str | int | None = None,
) -> Tensor:
    """Evaluate a mod everywhere: [B, H, Q_LEN, KV_LEN] bool, dense by definition.

    Args:
        mod_fn: a mask_mod, or a score_mod: it keeps what it does not send from 0 to -inf.
        B: batches; None is 1.
        H: query heads; None is 1.
        Q_LEN: number of queries.
        KV_LEN: number of keys.
        device: None is the accelerator, or the CPU if there is none.

    Raises:
        SequenceLengthError, ModArityError, ModResultError, ModLoweringError: as create_block_mask.
    """
    grid = _grid(B, H, (Q_LEN, KV_LEN), (1, 1), device)
    if is_score_mod(mod_fn):
        keep = _keep_of_scores(cast(ScoreMod, mod_fn))
    else:
        keep = _checked(cast(MaskMod, mod_fn))
    sizes = (grid.batch, grid.heads, Q_LEN, KV_LEN)
    return _evaluate(keep, *(_indices(size, grid.device) for size in sizes))


def _grid(
    batch: int | None,
    heads: int | None,
    lengths: tuple[int, int],
    block: tuple[int, int],
    device: torch.device | str | int | None,
) -> Grid:
    batch, heads = 1 if batch is None else batch, 1 if heads is None else heads
    named = {"B": batch, "H": heads, "Q_LEN": lengths[0], "KV_LEN": lengths[1]}
    for name, size in named.items():
        if size <= 0:
            raise SequenceLengthError(argument=name, length=size)
    if device is None:
        device = torch.accelerator.current_accelerator(check_available=True) or "cpu"
    return Grid(batch, heads, *lengths, block, torch.device(device))


def _check_mask_mod(mask_mod: MaskMod) -> None:
    if not torch.compiler.is_compiling():  # signatures cannot be traced
        check_arity(mask_mod, "mask_mod")


def _block_mask(
    mask_mod: MaskMod, grid: Grid, separate_full_blocks: bool, compute_q_blocks: bool
) -> BlockMask:
    keep = _checked(mask_mod)
    if torch.compiler.is_compiling():
        some, every = _coverage(keep, grid)
    else:
        some, every = _coverage_by_chunks(keep, grid)
    full: tuple[Tensor | None, Tensor | None] = (None, None)
    if separate_full_blocks:
        full_blocks = every & _whole_blocks(grid)
        full = dense_to_lists(full_blocks)
        some = some & ~full_blocks
    return BlockMask.from_kv_blocks(
        *dense_to_lists(some),
        *full,
        BLOCK_SIZE=grid.block,
        mask_mod=mask_mod,
        seq_lengths=(grid.q_len, grid.kv_len),
        compute_q_blocks=compute_q_blocks,
    )


def _whole_blocks(grid: Grid) -> Tensor:
    """[R, C] bool: blocks that do not overhang; only they can be full."""
    rows = _indices(grid.rows, grid.device) < grid.q_len // grid.block[0]
    columns = _indices(grid.columns, grid.device) < grid.kv_len // grid.block[1]
    return rows[:, None] & columns


def _coverage(keep: MaskMod, grid: Grid) -> tuple[Tensor, Tensor]:
    """Whether each block keeps something, and everything: [B, H, R, C] bool each.

    Two things keep Inductor from storing the mask. All indices have the shape of the whole, so
    that whatever it computes on the way has the loops of the final sum and fuses with it. And one
    sum says both facts, so that the mask has one reader.
    """
    device = grid.device
    queries = _pieces(grid.q_len, grid.block[0], device)
    keys = _pieces(grid.kv_len, grid.block[1], device)
    shape = (grid.batch, grid.heads, len(queries), len(keys), queries.shape[1], keys.shape[1])
    indices = (
        _indices(grid.batch, device)[:, None, None, None, None, None],
        _indices(grid.heads, device)[:, None, None, None, None],
        queries[:, None, :, None],
        keys[:, None, :],
    )
    for _ in shape:
        keep = torch.vmap(keep)
    with torch.no_grad(), IndexMode():
        kept = keep(*(index.expand(shape) for index in indices))
    area = shape[4] * shape[5]
    count = kept.sum((4, 5), dtype=torch.int32 if area < 2**31 else torch.int64)
    return count > 0, count == area


def _coverage_by_chunks(keep: MaskMod, grid: Grid) -> tuple[Tensor, Tensor]:
    """The same as `_coverage`, looking at CHUNK_ELEMENTS at a time."""
    batch, heads = _indices(grid.batch, grid.device), _indices(grid.heads, grid.device)
    queries = _pieces(grid.q_len, grid.block[0], grid.device, LONGEST)
    keys = _pieces(grid.kv_len, grid.block[1], grid.device, LONGEST)
    shape = (grid.batch, grid.heads, len(queries), len(keys))
    some = torch.empty(shape, dtype=torch.bool, device=grid.device)
    every = torch.empty_like(some)
    for b, h, q, kv in _chunks(shape, queries.shape[1] * keys.shape[1]):
        kept = _evaluate(keep, batch[b], heads[h], queries[q].flatten(), keys[kv].flatten())
        tiles = kept.unflatten(3, (-1, keys.shape[1])).unflatten(2, (-1, queries.shape[1]))
        some[b, h, q, kv] = tiles.any(5).any(3)
        every[b, h, q, kv] = tiles.all(5).all(3)
    some, every = (
        table.unflatten(3, (grid.columns, -1)).unflatten(2, (grid.rows, -1))
        for table in (some, every)
    )
    return some.any(5).any(3), every.all(5).all(3)


def _pieces(length: int, block: int, device: torch.device, longest: int | None = None) -> Tensor:
    """Positions in order, a row for each block, or for each piece of a block: [P, size] int32.

    What a piece lacks at the end of its block, or a block at the end of the sequence, is filled
    by repeating the last position, which changes neither "some" nor "every" and keeps captured
    tables from being read out of range.
    """
    reach = min(block, length)
    size = reach if longest is None else min(reach, longest)
    within = torch.arange(block_count(reach, size) * size, device=device, dtype=torch.int32)
    start = torch.arange(block_count(length, block), device=device, dtype=torch.int32) * block
    position = (start[:, None] + within.clamp(max=reach - 1)).clamp(max=length - 1)
    return position.view(-1, size)


def _chunks(shape: tuple[int, ...], area: int) -> Iterator[tuple[slice, ...]]:
    """Cut a table into parts of at most CHUNK_ELEMENTS, if each entry stands for `area`."""
    room = max(1, CHUNK_ELEMENTS // area)
    spans: list[list[slice]] = []
    for size in reversed(shape):  # the last dimension first: its parts are contiguous
        step = min(size, room)
        room = max(1, room // step)
        spans.insert(0, [slice(start, start + step) for start in range(0, size, step)])
    return itertools.product(*spans)


def _evaluate(
    mod: Callable[..., Tensor], b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor
) -> Tensor:
    """Apply a mod to each combination of indices: [len(b), len(h), len(q_idx), len(kv_idx)].

    Mapped and not broadcast, because a mod may index in steps, `table[b][q_idx]`, which means
    something else for indices that have dimensions.
    """
    for dims in MAPPED:
        mod = torch.vmap(mod, in_dims=dims)
    with torch.no_grad(), IndexMode():
        return mod(b, h, q_idx, kv_idx)


def _indices(size: int, device: torch.device) -> Tensor:
    """0 to size - 1, as kernels count: int32."""
    return torch.arange(size, device=device, dtype=torch.int32)


def _checked(mask_mod: MaskMod) -> MaskMod:
    """mask_mod with its result, and its attempts to branch, checked."""

    def keep(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        result = _call("mask_mod", mask_mod, (b, h, q_idx, kv_idx))
        if not isinstance(result, Tensor) or result.dtype != torch.bool or result.dim():
            raise _result_error("mask_mod", mask_mod, "a bool tensor of no dimensions", result)
        return result

    return keep


def _keep_of_scores(score_mod: ScoreMod) -> MaskMod:
    """What a score_mod keeps, as a mask_mod: all that it does not send from 0 to -inf."""

    def keep(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        score = torch.zeros((), device=q_idx.device)
        result = _call("score_mod", score_mod, (score, b, h, q_idx, kv_idx))
        if not isinstance(result, Tensor) or not result.is_floating_point() or result.dim():
            raise _result_error("score_mod", score_mod, "a floating-point tensor", result)
        return ~torch.isneginf(result)

    return keep


def _call(kind: str, mod: Callable[..., Any], indices: tuple[Tensor, ...]) -> Any:
    """Call a mod, and say in our words when it looks at the value of an index."""
    if torch.compiler.is_compiling():
        return mod(*indices)
    try:
        return mod(*indices)
    except RuntimeError as error:
        if "data-dependent control flow" not in str(error) and ".item()" not in str(error):
            raise
        frames = traceback.extract_tb(error.__traceback__)
        frame = frames[min(1, len(frames) - 1)]  # frame 0 is this function
        raise ModLoweringError(
            mod=f"{kind} {_name(mod)!r}",
            operation="reading the value of an index (if, while, .item(), int())",
            location=f"{frame.filename}:{frame.lineno}",
            reason="indices are tensors; use torch.where, & and | instead",
        ) from error


def _result_error(
    kind: str, mod: Callable[..., Any], expected: str, found: object
) -> ModResultError:
    words = type(found).__name__
    if isinstance(found, Tensor):
        words = f"a {found.dtype} tensor of shape {tuple(found.shape)}"
    return ModResultError(mod=kind, name=_name(mod), expected=expected, found=words)


def _name(mod: Callable[..., Any]) -> str:
    return getattr(mod, "__name__", None) or type(mod).__name__
