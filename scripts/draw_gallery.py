"""Draw docs/images: one SVG image for each ready mask and mod, and the mask of the tutorial.

    python scripts/draw_gallery.py

Images of masks show 64 queries and 64 keys in blocks of 8. Dark blue blocks are full, light blue
ones partial; in a partial block the visible pairs are blue.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

import flexhop
from flexhop import masks, mods
from flexhop.block_mask.picture import COLORS, FULL, PARTIAL, outline
from flexhop.mods import MaskMod, ScoreMod

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "images"
LENGTH, BLOCK, PIXELS = 64, 8, 192
VISIBLE = "#5b94dc"  # a visible pair in a partial block
HIGHER, LOWER = "#3069b8", "#d08b2c"  # scores that a mod raises, and that it lowers
LEVELS = 5
IDS = masks.ids_from_lengths(torch.tensor([10, 26, 5, 23]))


class HeatMap(NamedTuple):
    """A score mod to draw: what it adds, by query and key, or by head and key."""

    mod: ScoreMod
    by_head: bool = False
    causal: bool = False


def relative_table() -> Tensor:
    """[2 * 63 + 1]: a wave that fades with the distance."""
    distance = torch.arange(1 - LENGTH, LENGTH)
    return torch.cos(distance * (math.pi / 8)) * torch.exp(-distance.abs() / 24)


def t5_table() -> Tensor:
    """[2 * 32 + 1]: a weight for each of T5's buckets, spread over the distances."""
    buckets = mods.t5_buckets(num_buckets=16, max_distance=32)
    return torch.linspace(1, -1, 8).repeat(2)[buckets]


MASKS: dict[str, MaskMod] = {
    "causal": masks.causal,
    "causal_with_offset": masks.causal_with_offset(16),
    "sliding_window": masks.sliding_window(20),
    "dilated_sliding_window": masks.dilated_sliding_window(8, 3),
    "prefix_lm": masks.prefix_lm(20),
    "padding": masks.padding(torch.tensor([44])),
    "global_tokens": flexhop.or_masks(masks.sliding_window(12, True), masks.global_tokens(4)),
    "document": masks.document(IDS),
    "packed_causal": masks.packed_causal(IDS),
    "natten_2d": masks.natten_2d(8, 8, 3, 5),
}
SCORES: dict[str, HeatMap] = {
    "alibi": HeatMap(mods.alibi(mods.alibi_slopes(8)), causal=True),
    "relative_bias": HeatMap(mods.relative_bias(relative_table())),
    "t5_buckets": HeatMap(mods.relative_bias(t5_table())),
    "head_bias": HeatMap(mods.head_bias(torch.linspace(-1, 1, 8)), by_head=True),
    "key_bias": HeatMap(mods.key_bias(torch.sin(torch.arange(LENGTH) / 4))),
}


def draw_mask(mask_mod: MaskMod) -> str:
    """Full and partial blocks, and the visible pairs of partial ones."""
    mask = flexhop.create_block_mask(mask_mod, None, None, LENGTH, LENGTH, "cpu", BLOCK)
    dense = flexhop.create_mask(mask_mod, 1, 1, LENGTH, LENGTH, "cpu")[0, 0]
    visited = mask.to_dense()[0, 0].bool()
    full = dense.view(LENGTH // BLOCK, BLOCK, LENGTH // BLOCK, BLOCK).all(3).all(1)

    def by_pair(blocks: Tensor) -> Tensor:
        return blocks.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)

    partial = by_pair(visited & ~full)
    layers = {
        COLORS[PARTIAL]: outline(partial & ~dense),
        VISIBLE: outline(partial & dense),
        COLORS[FULL]: outline(by_pair(full)),
    }
    lines = [f"M{x} 0v{LENGTH}M0 {x}h{LENGTH}" for x in range(BLOCK, LENGTH, BLOCK)]
    grid = f'<path stroke="#808080" stroke-opacity=".35" stroke-width=".3" d="{"".join(lines)}"/>'
    return frame(paths(layers) + grid, LENGTH, LENGTH)


def draw_scores(heat: HeatMap) -> str:
    """What a mod adds to a score: blue raises it, orange lowers it, in LEVELS shades."""
    rows = torch.arange(8 if heat.by_head else LENGTH)[:, None]
    zero, key = torch.zeros((), dtype=torch.int64), torch.arange(LENGTH)[None]
    head, query = (rows, zero) if heat.by_head else (zero, rows)
    added = heat.mod(torch.zeros(()), zero, head, query, key).expand(len(rows), LENGTH)
    if heat.causal:
        added = added.masked_fill(key > query, 0.0)
    level = (added / added.abs().max() * LEVELS).round()
    level = level.repeat_interleave(LENGTH // len(rows), 0)
    shades = [
        f'<path fill="{HIGHER if sign > 0 else LOWER}" fill-opacity="{number / LEVELS:g}" '
        f'd="{outline(level == sign * number)}"/>'
        for sign in (1, -1)
        for number in range(1, LEVELS + 1)
        if bool((level == sign * number).any())
    ]
    return frame("".join(shades), LENGTH, LENGTH)


def draw_curve(score_mod: ScoreMod, largest: float) -> str:
    """The new score over the old one, from -largest to largest, with the diagonal in grey."""
    scores = torch.linspace(-largest, largest, 97)
    nothing = torch.zeros((), dtype=torch.int64)
    made = score_mod(scores, nothing, nothing, nothing, nothing)
    places = [
        f"{x:.1f} {y:.1f}"
        for x, y in zip(
            torch.linspace(0, LENGTH, 97).tolist(),
            (LENGTH / 2 - made / largest * LENGTH / 2).tolist(),
            strict=True,
        )
    ]
    stroke = 'fill="none" stroke-width="1.2"'
    diagonal = f'<path {stroke} stroke="#808080" stroke-opacity=".5" d="M0 {LENGTH}L{LENGTH} 0"/>'
    return frame(
        f'{diagonal}<path {stroke} stroke="{HIGHER}" d="M{"L".join(places)}"/>', LENGTH, LENGTH
    )


def paths(layers: dict[str, str]) -> str:
    """One path per colour; empty ones are left out."""
    return "".join(f'<path fill="{color}" d="{d}"/>' for color, d in layers.items() if d)


def frame(content: str, width: int, height: int) -> str:
    """An image with a grey border."""
    border = f'<rect width="{width}" height="{height}" fill="none" stroke="#808080"/>'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{PIXELS}" height="{PIXELS}" '
        f'viewBox="0 0 {width} {height}" preserveAspectRatio="none">{content}{border}</svg>\n'
    )


def draw_tutorial() -> str:
    """The mask of docs/tutorial.md: two documents, in blocks of 16."""
    mask_mod = masks.packed_causal(masks.ids_from_lengths(torch.tensor([70, 58])))
    return flexhop.create_block_mask(mask_mod, None, None, 128, 128, "cpu", 16).to_svg() + "\n"


def drawings() -> dict[str, Callable[[], str]]:
    """How to draw each image, by its path below docs/images, without the suffix."""
    images: dict[str, Callable[[], str]] = {
        f"gallery/{name}": lambda mask_mod=mask_mod: draw_mask(mask_mod)
        for name, mask_mod in MASKS.items()
    }
    images |= {
        f"gallery/{name}": lambda heat=heat: draw_scores(heat) for name, heat in SCORES.items()
    }
    images["gallery/softcap"] = lambda: draw_curve(mods.softcap(20.0), 60.0)
    images["tutorial"] = draw_tutorial
    return images


def main() -> int:
    """Write every image."""
    (FOLDER / "gallery").mkdir(parents=True, exist_ok=True)
    for name, draw in drawings().items():
        (FOLDER / f"{name}.svg").write_text(draw())
    return 0


if __name__ == "__main__":
    sys.exit(main())
