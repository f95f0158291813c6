"""Drawing which blocks a mask visits, in characters."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from flexhop.block_mask.lists import block_count

# A cell is two characters wide, because a character is about twice as high as wide.
EMPTY, PARTIAL, FULL = "  ", "░░", "██"


def draw(visited: Tensor, full: Tensor, grid_size: int | tuple[int, int], limit: int) -> str:
    """Draw one grid per batch and head: full cells, partial cells, and cells nobody visits.

    Args:
        visited: [..., R, C] bool, blocks that are partial or full.
        full: [..., R, C] bool.
        grid_size: most rows and columns of a picture; a cell then stands for several blocks.
            -1 draws every block.
        limit: most pictures.
    """
    rows, columns = _grid(grid_size, visited.shape[-2], visited.shape[-1])
    visited, full = visited.cpu(), full.cpu()
    pictures: list[str] = []
    for index in itertools.product(*(range(size) for size in visited.shape[:-2])):
        if len(pictures) == limit:
            pictures += [
                "...",
                "Only the first pictures are drawn; to_string(limit=N) draws more, and",
                "block_mask[batch, head] chooses one.",
            ]
            break
        pictures.append(f"{index}\n" + _picture(visited[index], full[index], rows, columns))
    return "\n".join(pictures)


def _grid(grid_size: int | tuple[int, int], rows: int, columns: int) -> tuple[int, int]:
    """Rows and columns of the picture, each at least 1."""
    wanted = (grid_size, grid_size) if isinstance(grid_size, int) else grid_size
    chosen = (
        size if limit < 0 else min(limit, size)
        for limit, size in zip(wanted, (rows, columns), strict=True)
    )
    height, width = (max(1, size) for size in chosen)
    return height, width


def _picture(visited: Tensor, full: Tensor, rows: int, columns: int) -> str:
    row_step = max(1, block_count(visited.shape[0], rows))
    column_step = max(1, block_count(visited.shape[1], columns))
    lines: list[str] = []
    for top in range(0, visited.shape[0], row_step):
        below = slice(top, top + row_step)
        cells = zip(
            visited[below].split(column_step, dim=1),
            full[below].split(column_step, dim=1),
            strict=True,
        )
        lines.append("".join(_cell(*cell) for cell in cells))
    return "\n".join(lines) + "\n"


def _cell(visited: Tensor, full: Tensor) -> str:
    if not bool(torch.any(visited)):
        return EMPTY
    return FULL if bool(torch.all(full)) else PARTIAL
