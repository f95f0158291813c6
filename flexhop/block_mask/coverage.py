"""Which blocks of a mask are non-empty and which are full, from its operators.

1. If each query sees one contiguous range of keys: from its first and last key.
2. Intervals over blocks: all, none, certainly partial, or unknown. Large grids start with coarse
   blocks.
3. For unknown blocks: a few scores, intervals of smaller parts, more scores, then every score.

The result equals that of evaluating every score (scores.py). Memory is O(blocks). Only listing
unknown blocks synchronises; masks of the first kind never do.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from flexhop import analysis
from flexhop.analysis import Mod, Tables
from flexhop.block_mask.boxes import Boxes, ends_of, sizes_of
from flexhop.block_mask.of_ranges import blocks_of_span
from flexhop.block_mask.scores import (
    CHUNK_ELEMENTS,
    MAPPED,
    Grid,
    count_up,
    coverage_by_chunks,
)
from flexhop.compat.mods.indexing import IndexMode
from flexhop.compat.sizes import broadcast
from flexhop.errors import VmapError
from flexhop.mods.functions import MaskMod

COARSE = 16  # side of a coarse block, in blocks
FEW = {"cpu": 1 << 14, "other": 1 << 20}  # most blocks without a coarse grid
PATIENCE = 0.05  # fraction of a trial's blocks that a step must settle to be applied to the rest
AT_ONCE = {"cpu": 1 << 17, "other": 1 << 24}  # scores that are cheaper than another step
TRIAL = 256  # blocks in a trial
MANY = 4096  # fewest blocks for a trial


class Look(NamedTuple):
    """What a mask's operators say: (some, every), and for which blocks they are unknown.

    Args:
        some, every: [B', H', R, C] bool.
        unknown: [B', H', R, C] bool, or [U, 4] if they are listed; None if there are none.
        search: settles the unknown blocks.
        is_constant: whether the operators read no captured tensor: it is the same for every call.
    """

    some: Tensor
    every: Tensor
    unknown: Tensor | None = None
    search: _Search | None = None
    is_constant: bool = False


def coverage(mask_mod: MaskMod, keep: MaskMod, grid: Grid) -> tuple[Tensor, Tensor]:
    """Whether each block is non-empty, and whether it is full: [B or 1, H or 1, R, C] bool each.

    Args:
        mask_mod: the user's function.
        keep: the same, with its results checked.
        grid: the blocks.
    """
    look = first_look(mask_mod, keep, grid)
    return look[:2] if look.unknown is None else settled(look, keep)


def first_look(mask_mod: MaskMod, keep: MaskMod, grid: Grid) -> Look:
    """The same, except perhaps for unknown blocks; may wait for the device in large grids."""
    probe = torch.empty(0, device=grid.device)
    if type(probe) is not Tensor or probe.is_meta:  # fake tensors hold no values to read
        return Look(*coverage_by_chunks(keep, grid))
    mod = _traced(mask_mod, grid.device)
    if mod is None:
        return Look(*coverage_by_chunks(keep, grid))
    forms = analysis.Forms(mod, sizes_of(grid))
    depends = forms.depends_on(mod.result)
    batch, heads = (grid.batch if "b" in depends else 1), (grid.heads if "h" in depends else 1)
    reduced = grid._replace(batch=batch, heads=heads)
    forms.sizes |= sizes_of(reduced)
    span = analysis.find_span(forms, grid.device)
    if span is not None:
        return Look(*blocks_of_span(span, reduced), is_constant=not mod.captures)
    try:
        look = _Search(mod, keep, reduced).look()
        return look._replace(is_constant=not mod.captures)
    except (analysis.OutOfRange, _WouldWait):
        return Look(*coverage_by_chunks(keep, reduced))


def settled(look: Look, keep: MaskMod) -> tuple[Tensor, Tensor]:
    """(some, every) of all blocks."""
    some, every, unknown, search, _ = look
    assert unknown is not None and search is not None
    try:
        left = unknown if unknown.dtype != torch.bool else search.listed(unknown)
        return search.settle_all(some, every, left) if len(left) else (some, every)
    except (analysis.OutOfRange, _WouldWait):
        return coverage_by_chunks(keep, search.grid)


def look_again(mask_mod: MaskMod, keep: MaskMod, grid: Grid, known: Look) -> Look:
    """The first look at a mask, from its results for the same captured tensors."""
    mod = _traced(mask_mod, grid.device)
    if mod is None:
        return first_look(mask_mod, keep, grid)
    batch, heads = known.some.shape[:2]
    return known._replace(search=_Search(mod, keep, grid._replace(batch=batch, heads=heads)))


def _traced(mask_mod: MaskMod, device: torch.device) -> Mod | None:
    """The graph of a mask; None if tracing fails: evaluating scores will report the error."""
    try:
        return analysis.trace(mask_mod, device)
    except analysis.Mapped as error:
        words = "a tensor that mask_mod captures in an eager create_block_mask"
        raise VmapError(argument=words) from error
    except Exception:  # anything that the user's function raises
        return None


def may_wait(device: torch.device) -> bool:
    """Whether the host may synchronise: not in a CUDA graph, nor if the user forbids it."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return True  # without a GPU, the first tensor on it raises PyTorch's error
    return not torch.cuda.is_current_stream_capturing() and not torch.cuda.get_sync_debug_mode()


def has_unknown(unknown: Tensor) -> bool:
    """Whether a block is unknown, or has to be taken for it because the host may not wait."""
    if unknown.dtype != torch.bool:
        return len(unknown) > 0
    return not may_wait(unknown.device) or bool(unknown.any())


class _WouldWait(Exception):
    """Unknown blocks would have to be listed, but the host may not synchronise."""


# Intervals, then scores.


class _Step(NamedTuple):
    """look(blocks [U, 4]) -> (kept, missed, decided), [U] bool each.

    area: scores, or boxes, evaluated per block.
    """

    look: Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]
    area: int


class _Search:
    def __init__(self, mod: Mod, keep: MaskMod, grid: Grid) -> None:
        self.mod, self.keep, self.grid = mod, keep, grid
        self.tables = Tables(grid.block)
        self.boxes = Boxes(mod, grid)
        self.can_compute = analysis.can_compute(mod)
        self.shape = (grid.batch, grid.heads, grid.rows, grid.columns)

    def look(self) -> Look:
        """Evaluate intervals."""
        few = FEW.get(self.grid.device.type, FEW["other"])
        return self._one_grid() if math.prod(self.shape) <= few else self._two_grids()

    def settle_all(self, some: Tensor, every: Tensor, left: Tensor) -> tuple[Tensor, Tensor]:
        """Find (some, every) of the blocks that are left, [U, 4]."""
        self.some, self.every = (
            t.clone(memory_format=torch.contiguous_format) for t in (some, every)
        )
        dense = self._dense()
        steps = [self._probe(2), self._parts(64), self._probe(16), self._parts(16), dense]
        at_once = AT_ONCE.get(self.grid.device.type, AT_ONCE["other"])
        for step in steps:
            step = dense if len(left) * dense.area <= at_once else step
            left = self._settle(step, left, must=step is dense)
            if not len(left):
                break
        return self.some, self.every

    def _one_grid(self) -> Look:
        """Intervals over all blocks."""
        found = self.boxes.over_grid(self.grid.block, self.tables)
        some, every = found.maybe.expand(self.shape), found.always.expand(self.shape)
        if found.is_decided:
            return Look(some, every)
        mixed = found.mixed
        if self.mod.captures and self.can_compute:
            mixed = mixed | self._witnessed()
        unknown = ((found.maybe > found.always) > mixed).expand(self.shape)
        return Look(some, every, unknown, self)

    def _witnessed(self) -> Tensor:
        """Whether scores of each block differ: at its corners, and at the ends of its diagonal.

        Returns [B' or 1, H' or 1, R, C] bool.
        """
        block = self.grid.block
        (q, last_q), (k, last_k) = self.boxes.ends
        # Queries and keys stay apart: what a mask reads by one of them is small.
        kept = self._kept(
            torch.stack([q, last_q], -1)[..., None], torch.stack([k, last_k], -1)[:, None]
        )
        differ = kept.any((-1, -2)) > kept.all((-1, -2))
        if block[0] == block[1]:  # the ends of the diagonal are corners
            return differ
        ends = torch.stack([torch.maximum(q, k), torch.minimum(last_q, last_k)], -1)
        queries = ends.clamp(q[..., None], last_q[..., None])
        diagonal = self._kept(queries, ends.clamp(k[..., None], last_k[..., None]))
        return differ | (diagonal != kept[..., :1, 0]).any(-1)

    def _kept(self, queries: Tensor, keys: Tensor) -> Tensor:
        """The mask at positions of each block: [B' or 1, H' or 1, R, C, ...]."""
        device = self.grid.device
        shape = broadcast(queries.shape, keys.shape)
        inputs = {
            "b": count_up(self.grid.batch, device).view(-1, *[1] * (1 + len(shape))),
            "h": count_up(self.grid.heads, device).view(-1, *[1] * len(shape)),
            "q": queries[None, None].int(),
            "k": keys[None, None].int(),
        }
        with torch.no_grad():
            values = analysis.Values(self.mod, inputs, device)
            kept = values.compute(self.mod.operators, self.mod.result)
        return kept.expand(*kept.shape[: kept.dim() - len(shape)], *shape)

    def _nothing(self) -> Tensor:
        return torch.empty((0, 4), dtype=torch.int64, device=self.grid.device)

    def listed(self, flags: Tensor) -> Tensor:
        """The marked blocks, [U, 4]. Waits for the device."""
        if not may_wait(self.grid.device):
            raise _WouldWait
        return flags.nonzero()

    def _two_grids(self) -> Look:
        """The same with a coarse grid first: most blocks are settled many at a time."""
        grid, device = self.grid, self.grid.device
        large = (grid.block[0] * COARSE, grid.block[1] * COARSE)
        found = self.boxes.over_grid(large, Tables(large))
        rows, columns = -(-grid.rows // COARSE), -(-grid.columns // COARSE)
        shape = (grid.batch, grid.heads, rows, columns)
        left = self.listed((found.maybe & ~found.always).expand(shape))
        padded = (*shape[:3], COARSE, columns, COARSE)
        maybe, always = (
            flag.expand(shape)[..., None, :, None].expand(padded).contiguous()
            for flag in (found.maybe, found.always)
        )
        within = torch.arange(COARSE, device=device)
        unknown = [self._nothing()]
        for part in left.split(max(1, CHUNK_ELEMENTS // COARSE**2)):
            b, h, r, c = part.unbind(1)
            row = r[:, None, None] * COARSE + within[:, None]
            column = c[:, None, None] * COARSE + within
            q = ends_of(row * grid.block[0], grid.block[0], grid.q_len)
            k = ends_of(column * grid.block[1], grid.block[1], grid.kv_len)
            found = self.boxes.ask(b[:, None, None], h[:, None, None], q, k, self.tables)
            maybe[b, h, r, :, c], always[b, h, r, :, c] = (
                flag.expand(len(part), COARSE, COARSE) for flag in (found.maybe, found.always)
            )
            if found.is_decided:
                continue
            is_real = (row < grid.rows) & (column < grid.columns)
            flags = found.maybe & ~found.always & ~found.mixed & is_real
            n, i, j = flags.expand(len(part), COARSE, COARSE).nonzero().unbind(1)
            unknown.append(torch.stack([b[n], h[n], r[n] * COARSE + i, c[n] * COARSE + j], 1))
        some, every = (
            flag.flatten(4, 5).flatten(2, 3)[..., : grid.rows, : grid.columns]
            for flag in (maybe, always)
        )
        return Look(some, every, torch.cat(unknown), self)

    # The remaining unknown blocks.

    def _settle(self, step: _Step, left: Tensor, must: bool) -> Tensor:
        """Apply a step to the remaining blocks, a chunk at a time; return those still unknown."""
        size = max(1, CHUNK_ELEMENTS // step.area)
        is_trial = not must and len(left) > MANY and size > TRIAL
        remaining, start = [self._nothing()], 0
        while start < len(left):
            part = left[start : start + (TRIAL if is_trial else size)]
            kept, missed, decided = step.look(part)
            where = tuple(part.unbind(1))
            self.some[where], self.every[where] = kept, ~missed
            start += len(part)
            if must:
                continue
            remaining.append(part[~((kept & missed) | decided)])
            if is_trial and len(remaining[-1]) > (1 - PATIENCE) * len(part):
                remaining.append(left[start:])
                break
            is_trial = False
        return torch.cat(remaining)

    def _probe(self, side: int) -> _Step:
        """Some scores of each block: a visible one and a hidden one make it partial."""
        device = self.grid.device
        rows, columns = (_scattered(side, n, i, device) for i, n in enumerate(self.grid.block))
        return self._evaluated(rows, columns, decides=False, area=side * side)

    def _dense(self) -> _Step:
        """Every score of each block."""
        height, width = self.grid.block
        rows, columns = (torch.arange(n, device=self.grid.device) for n in self.grid.block)
        return self._evaluated(rows, columns, decides=True, area=height * width)

    def _evaluated(self, rows: Tensor, columns: Tensor, *, decides: bool, area: int) -> _Step:
        """The scores at some rows and columns of each block."""

        def look(part: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            kept = self._scores(part, rows, columns).flatten(1)
            some, every = kept.any(1), kept.all(1)
            return some, ~every, torch.full_like(some, decides)

        return _Step(look, area)

    def _parts(self, side: int) -> _Step:
        """Intervals over smaller parts of each block."""
        grid = self.grid
        row, column = (
            torch.arange(-(-size // side), device=grid.device) * side for size in grid.block
        )
        is_even = grid.block[0] % side == 0 and grid.block[1] % side == 0
        tables = Tables((side, side) if is_even else None)

        def look(part: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            b, h, r, c = (index[:, None, None] for index in part.unbind(1))
            q = _within(r * grid.block[0], row[:, None], side, (grid.block[0], grid.q_len))
            k = _within(c * grid.block[1], column, side, (grid.block[1], grid.kv_len))
            found = self.boxes.ask(b, h, q, k, tables)
            shape = (len(part), len(row), len(column))
            always, maybe, mixed = (flag.expand(shape).flatten(1) for flag in found[:3])
            settled = (always | ~maybe).all(1)
            return (always | mixed).any(1), (~maybe | mixed).any(1), settled

        return _Step(look, len(row) * len(column))

    def _scores(self, part: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        """The mask at some rows and columns of blocks: [U, rows, columns]."""
        grid = self.grid
        b, h, r, c = part.to(torch.int32).unbind(1)
        q = (r[:, None] * grid.block[0] + rows).clamp(max=grid.q_len - 1).to(torch.int32)
        k = (c[:, None] * grid.block[1] + columns).clamp(max=grid.kv_len - 1).to(torch.int32)
        shape = (len(part), q.shape[1], k.shape[1])
        with torch.no_grad():
            if self.can_compute:
                one = {"b": b[:, None, None], "h": h[:, None, None]}
                inputs = one | {"q": q[:, :, None], "k": k[:, None, :]}
                values = analysis.Values(self.mod, inputs, grid.device)
                return values.compute(self.mod.operators, self.mod.result).expand(shape)
            keep = torch.vmap(torch.vmap(self.keep, in_dims=MAPPED[0]), in_dims=MAPPED[1])
            with IndexMode():
                return torch.vmap(keep)(b, h, q, k).expand(shape)


def _within(
    start: Tensor, offset: Tensor, side: int, sizes: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    """The ends of parts, clamped to their block and to the last position."""
    block, length = sizes
    last = (length - 1) // side * side if block % side == 0 else length - 1
    first = torch.minimum((start + offset).clamp(max=last), start + block - 1)
    return first, torch.minimum(first + side, start + block).clamp(max=length) - 1


def _scattered(side: int, size: int, axis: int, device: torch.device) -> Tensor:
    """The two ends of a block and some places between, at irregular increasing distances.

    Regular distances would see only one residue of a dilated mask.
    """
    if side >= size:
        return torch.arange(size, device=device)
    ratio = (0.6180339887, 0.7548776662)[axis]
    inner = sorted({1 + int((size - 2) * ((n * ratio) % 1.0)) for n in range(1, side - 1)})
    return torch.tensor([0, *inner, size - 1], device=device)
