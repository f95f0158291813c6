"""A mask on boxes of scores: always True, possibly True, or certainly both."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexhop import analysis
from flexhop.analysis import Interval, Mod, Tables
from flexhop.block_mask.scores import Grid


class Found(NamedTuple):
    """For each box: is the mask True everywhere; possibly True somewhere; certainly both?"""

    always: Tensor
    maybe: Tensor
    mixed: Tensor
    is_decided: bool


def _count_up(size: int, device: torch.device) -> Tensor:
    """0 to size - 1, int64, in which intervals are computed."""
    return torch.arange(size, device=device)


class Boxes:
    """Evaluates a mask on boxes of scores.

    Args:
        mod: the mask.
        grid: the matrix.
        bounds: upper bounds of the sizes of b, h, q and k, for symbolic sizes.
        count: gives the numbers below a size.
    """

    def __init__(
        self,
        mod: Mod,
        grid: Grid,
        bounds: dict[str, int] | None = None,
        count: Callable[[int, torch.device], Tensor] = _count_up,
    ) -> None:
        self.mod, self.grid, self.count = mod, grid, count
        self.bounds = sizes_of(grid) if bounds is None else bounds
        self.ends: Any = None  # of the queries [R, 1], and of the keys [C], of `over_grid`

    def ask(
        self,
        b: Tensor,
        h: Tensor,
        q: tuple[Tensor, Tensor],
        k: tuple[Tensor, Tensor],
        tables: Tables,
        *,
        is_grid: bool = False,
    ) -> Found:
        """Evaluate boxes: one batch and head each, and queries and keys between two bounds.

        is_grid: whether the boxes are all blocks, in order.
        """
        inputs = {
            name: analysis.point(index, torch.int32, (0, self.bounds[name] - 1), name)
            for name, index in (("b", b), ("h", h))
        }
        for name, (low, high) in (("q", q), ("k", k)):
            static, uses = (0, self.bounds[name] - 1), frozenset((name,))
            inputs[name] = Interval(low, high, torch.int32, False, static, uses, True, True)
        tables.grid = [inputs[name] for name in analysis.INDICES] if is_grid else []
        found = analysis.evaluate_result(self.mod, inputs, tables)
        some = found.high if found.decided else found.some
        miss = ~found.low if isinstance(found.low, Tensor) else not found.low
        mixed = some & (miss if found.decided else found.miss)
        always, maybe, mixed = map(self._flag, (found.low, found.high, mixed))
        return Found(always, maybe, mixed, found.decided)

    def _flag(self, value: Any) -> Tensor:
        if isinstance(value, Tensor):
            return value
        return torch.full((), value, dtype=torch.bool, device=self.grid.device)

    def over_grid(
        self, block: tuple[int, int], tables: Tables, counts: tuple[int, int] | None = None
    ) -> Found:
        """Evaluate all blocks of one size: flags that broadcast to [B, H, rows, columns].

        counts: rows and columns, if they are not those that cover the lengths.
        """
        grid, device = self.grid, self.grid.device
        rows, columns = counts or (-(-grid.q_len // block[0]), -(-grid.kv_len // block[1]))
        row, column, b, h = (
            self.count(n, device).long() for n in (rows, columns, grid.batch, grid.heads)
        )
        q = ends_of(row[:, None] * block[0], block[0], grid.q_len)
        k = ends_of(column * block[1], block[1], grid.kv_len)
        self.ends = q, k
        inputs = (b[:, None, None, None], h[:, None, None], q, k)
        return self.ask(*inputs, tables, is_grid=True)


def sizes_of(grid: Grid) -> dict[str, Any]:
    """The sizes of b, h, q and k."""
    return {"b": grid.batch, "h": grid.heads, "q": grid.q_len, "k": grid.kv_len}


def ends_of(start: Tensor, size: int, length: int) -> tuple[Tensor, Tensor]:
    """The first and last position of blocks, none beyond the sequence."""
    return start.clamp(max=length - 1), (start + size - 1).clamp(max=length - 1)
