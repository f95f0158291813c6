"""Pictures of a BlockMask: text for a terminal, SVG for a notebook, matplotlib axes."""

from __future__ import annotations

import html
import importlib
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from flexhop.block_mask.fields import MaskFields, dense_blocks
from flexhop.block_mask.lists import block_count
from flexhop.errors import MissingPackageError, OptionValueError

# Cell values, which are also indices into GLYPHS and COLORS.
EMPTY, PARTIAL, FULL = range(3)
NAMES = ("empty", "partial", "full")
# A cell is two characters wide, because a character is about twice as tall as wide.
GLYPHS = ("  ", "░░", "██")
# Blues that are visible on white and on black pages; empty cells are transparent.
COLORS = ("none", "#a3c4f3", "#3069b8")
PICTURE_PIXELS = 260
MAX_PICTURES = 4


class MaskPictures(MaskFields):
    """The drawing methods of a BlockMask. All of them synchronise."""

    def sparsity(self) -> float:
        """The fraction of the matrix that is not visited, in percent."""
        raise NotImplementedError

    def to_string(self, grid_size: int | tuple[int, int] = (20, 20), limit: int = 4) -> str:
        """Draw the blocks in characters: `██` full, `░░` partial, blank empty.

        Args:
            grid_size: most rows and columns of cells. If the mask has more blocks, a cell stands
                for several: `██` if all are full, blank if all are empty. -1 draws every block.
            limit: most (batch, head) pictures.
        """
        grids = self._grids(grid_size)
        pictures = [
            f"{index}\n{_as_text(cells)}" for index, cells in itertools.islice(grids, limit)
        ]
        if next(grids, None) is not None:
            pictures += [
                "...",
                "Only the first pictures are drawn; to_string(limit=N) draws more, and",
                "block_mask[batch, head] chooses one.",
            ]
        return "\n".join(pictures)

    def __str__(self) -> str:
        return f"{self._title()[:-1]}, \n{self.to_string().strip()}\n)"

    def to_svg(self, batch: int = 0, head: int = 0, grid_size: int = 64) -> str:
        """Draw the blocks of one batch and head as an SVG image, as text.

        Args:
            batch: which batch of the mask, 0 if all share one.
            head: which head of the mask, 0 if all share one.
            grid_size: most rows and columns of cells, as in to_string.

        Raises:
            OptionValueError: the mask has no such batch or head.
        """
        return svg(self._cells(batch, head, grid_size))

    def _repr_html_(self) -> str:
        """A notebook's view: pictures of the first batches and heads, and a legend."""
        if self.device.type == "meta":
            return f"<pre>{html.escape(repr(self))}</pre>"
        figures = [
            f"<figure style='margin:0'>{svg(cells)}<figcaption>{index}</figcaption></figure>"
            for index, cells in itertools.islice(self._grids(64), MAX_PICTURES)
        ]
        total = int(torch.tensor(self.kv_indices.shape[:-2]).prod())
        more = f"<div>and {total - MAX_PICTURES} more</div>" if total > MAX_PICTURES else ""
        row = f"<div style='display:flex;gap:1em'>{''.join(figures)}{more}</div>"
        return f"<div><code>{html.escape(self._title())}</code>{_LEGEND}{row}</div>"

    def plot(self, ax: Any = None, *, batch: int = 0, head: int = 0, grid_size: int = 256) -> Any:
        """Draw the blocks of one batch and head with matplotlib.

        Args:
            ax: the Axes to draw into. None creates a figure.
            batch: which batch of the mask, 0 if all share one.
            head: which head of the mask, 0 if all share one.
            grid_size: most rows and columns of cells, as in to_string.

        Returns:
            The Axes, in units of tokens: keys to the right, queries downwards.

        Raises:
            MissingPackageError: matplotlib is not installed.
            OptionValueError: the mask has no such batch or head.
        """
        colors, patches, pyplot = _matplotlib("colors", "patches", "pyplot")
        cells = self._cells(batch, head, grid_size)
        axes = pyplot.subplots()[1] if ax is None else ax
        bottom, right = (
            self._step(i, grid_size) * self.BLOCK_SIZE[i] * cells.shape[i] for i in (0, 1)
        )
        axes.imshow(
            cells.tolist(), cmap=colors.ListedColormap(COLORS), vmin=EMPTY, vmax=FULL,
            extent=(0, right, bottom, 0), interpolation="nearest", aspect="auto",
        )  # fmt: skip
        queries, keys = self.seq_lengths
        axes.set(xlim=(0, keys), ylim=(queries, 0), xlabel="key", ylabel="query")
        # A few queries with a long cache would be a thin line: only similar lengths keep their
        # ratio.
        axes.set_aspect("equal" if queries <= 4 * keys and keys <= 4 * queries else "auto")
        axes.set_title(f"{100 - self.sparsity():.1f} % of the matrix is visited")
        handles = [
            patches.Patch(facecolor=COLORS[kind], edgecolor="gray", label=NAMES[kind])
            for kind in (FULL, PARTIAL, EMPTY)
        ]
        axes.legend(handles=handles, loc="upper left", bbox_to_anchor=(1, 1))
        return axes

    def _title(self) -> str:
        return f"BlockMask(shape={self.shape}, sparsity={self.sparsity():.2f}%)"

    def _step(self, dimension: int, limit: int) -> int:
        """Blocks per cell, along queries (0) or keys (1)."""
        blocks = block_count(self.seq_lengths[dimension], self.BLOCK_SIZE[dimension])
        return 1 if limit < 0 else max(1, block_count(blocks, max(1, limit)))

    def _grids(self, grid_size: int | tuple[int, int]) -> Iterator[tuple[tuple[int, ...], Tensor]]:
        """The index and the cells, [rows, columns] int8, of each batch and head."""
        limits = (grid_size, grid_size) if isinstance(grid_size, int) else grid_size
        steps = (self._step(0, limits[0]), self._step(1, limits[1]))
        partial, full = (dense.cpu() for dense in dense_blocks(self))
        for index in itertools.product(*(range(size) for size in partial.shape[:-2])):
            yield index, _reduce(partial[index] | full[index], full[index], steps)

    def _cells(self, batch: int, head: int, grid_size: int) -> Tensor:
        """The cells of one batch and head."""
        sizes = (1, 1, *self.kv_indices.shape[:-2])[-2:]
        for name, place, size in zip(("batch", "head"), (batch, head), sizes, strict=True):
            if not 0 <= place < size:
                allowed = f"0 to {size - 1}, because the mask has {size}"
                raise OptionValueError(name=name, value=place, allowed=allowed)
        wanted = batch * sizes[1] + head
        return next(itertools.islice(self._grids(grid_size), wanted, None))[1]


def svg(cells: Tensor, pixels: int = PICTURE_PIXELS) -> str:
    """An SVG image of cells, [rows, columns] of EMPTY, PARTIAL and FULL.

    Args:
        cells: on the CPU.
        pixels: length of the longer side; small grids get whole pixels per cell.
    """
    rows, columns = cells.shape
    scale = pixels / max(rows, columns, 1)
    size = f'width="{max(1, round(columns * scale))}" height="{max(1, round(rows * scale))}"'
    paths = [
        f'<path fill="{COLORS[kind]}" d="{outline(cells == kind)}"/>' for kind in (PARTIAL, FULL)
    ]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} viewBox="0 0 {columns} {rows}" '
        'preserveAspectRatio="none" shape-rendering="crispEdges">'
        f'<rect width="{columns}" height="{rows}" fill="none" stroke="#808080" '
        f'stroke-width="{2 / scale:.3g}"/>{"".join(paths)}</svg>'
    )


def outline(chosen: Tensor) -> str:
    """The path of an SVG image over the chosen cells: a rectangle for each run in equal rows.

    Args:
        chosen: [rows, columns] bool, on the CPU.
    """
    rows, heights = torch.unique_consecutive(chosen, dim=0, return_counts=True)
    edges = pad(rows.to(torch.int8), (1, 1)).diff(dim=1)
    starts, ends = (edges == 1).nonzero().tolist(), (edges == -1).nonzero().tolist()
    tops, heights = (heights.cumsum(0) - heights).tolist(), heights.tolist()
    return "".join(
        f"M{start} {tops[row]}h{end - start}v{heights[row]}h{start - end}z"
        for (row, start), (_, end) in zip(starts, ends, strict=True)
    )


def _reduce(visited: Tensor, full: Tensor, steps: tuple[int, int]) -> Tensor:
    """Merge steps[0] x steps[1] blocks per cell; blocks beyond the grid do not count."""
    rows, columns = (block_count(visited.shape[i], steps[i]) for i in (0, 1))
    missing = (0, columns * steps[1] - visited.shape[1], 0, rows * steps[0] - visited.shape[0])
    grouped = (rows, steps[0], columns, steps[1])
    seen = pad(visited, missing, value=False).view(grouped).any(3).any(1)
    whole = pad(full, missing, value=True).view(grouped).all(3).all(1)
    return torch.where(seen, torch.where(whole, FULL, PARTIAL), EMPTY).to(torch.int8)


def _as_text(cells: Tensor) -> str:
    return "\n".join("".join(GLYPHS[cell] for cell in row) for row in cells.tolist()) + "\n"


def _matplotlib(*names: str) -> list[Any]:
    try:
        return [importlib.import_module(f"matplotlib.{name}") for name in names]
    except ImportError:
        raise MissingPackageError(feature="BlockMask.plot", package="matplotlib") from None


_LEGEND = "<div>" + "".join(
    f"<span style='display:inline-block;width:.8em;height:.8em;border:1px solid #808080;"
    f"background:{COLORS[kind].replace('none', 'transparent')}'></span> {NAMES[kind]} &nbsp;"
    for kind in (FULL, PARTIAL, EMPTY)
) + "</div>"  # fmt: skip
