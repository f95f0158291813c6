"""Recorded results to pictures: the tables of docs/benchmarks.md as bar charts in SVG."""

from __future__ import annotations

import html
import re
from typing import NamedTuple

# Cases of the charts and of README.md, with the names that readers see.
SHOWN = {
    "full-4k-d128": "dense 4k",
    "causal-8k-d128": "causal 8k",
    "document-16k": "documents 16k",
    "alibi-8k": "ALiBi 8k",
    "causal-8k-d256": "head size 256",
    "sliding-16k": "window 16k",
    "rel-bias-4k": "relative bias 4k",
}
# One colour per implementation, and a grey for text; each stands out on white and on black.
SERIES = {
    "flexhop": ("flexhop", "#3069b8"),
    "in-tree": ("PyTorch flex_attention", "#98a4b0"),
    "cudnn": ("cuDNN (dense and causal only)", "#d08b2c"),
}
TEXT = "#768390"
WIDTH, HEIGHT, TOP, BOTTOM = 840, 300, 64, 40
BAR = 30


class Results(NamedTuple):
    """One recorded table: the number in each row and column, where there is one."""

    rows: dict[str, dict[str, float]]

    def speedup(self, case: str) -> float:
        """How many times faster flexhop is than in-tree flex_attention."""
        return self.rows[case]["x in-tree"]


def read_results(page: str, direction: str) -> Results:
    """The table of a direction in the text of docs/benchmarks.md.

    Args:
        page: text of the page.
        direction: "Forward" or "Backward".
    """
    section = page.split(f"## {direction}, TFLOP/s\n", 1)[1].split("\n## ", 1)[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    head, _, *body = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    return Results(
        {
            cells[0]: {
                name: float(cell)
                for name, cell in zip(head, cells, strict=True)
                if re.fullmatch(r"\d+(\.\d+)?", cell)
            }
            for cells in body
        }
    )


def bar_chart(results: Results, title: str) -> str:
    """An SVG image: TFLOP/s of each implementation in each shown case.

    Args:
        results: a recorded table.
        title: the line above the bars.
    """
    top = 100 * -(-max(row.get(name, 0) for row in _shown(results) for name in SERIES) // 100)
    height = HEIGHT - TOP - BOTTOM
    group = WIDTH / len(SHOWN)
    parts = [_text(12, 20, title, bold=True, anchor="start"), *_legend()]
    for position, (case, label) in enumerate(SHOWN.items()):
        row = results.rows[case]
        present = [name for name in SERIES if name in row]
        left = position * group + (group - BAR * len(present)) / 2
        for place, name in enumerate(present):
            tall = row[name] / top * height
            x, y = left + place * BAR, HEIGHT - BOTTOM - tall
            parts.append(
                f'<rect x="{x + 1:.1f}" y="{y:.1f}" width="{BAR - 2}" height="{tall:.1f}" '
                f'fill="{SERIES[name][1]}"/>'
            )
            parts.append(_text(x + BAR / 2, y - 4, f"{row[name]:.0f}", bold=name == "flexhop"))
        parts.append(_text((position + 0.5) * group, HEIGHT - BOTTOM + 16, label))
        ratio = f"{results.speedup(case):.2f}x"
        parts.append(_text((position + 0.5) * group, HEIGHT - BOTTOM + 32, ratio, bold=True))
    axis = f'<path d="M8 {HEIGHT - BOTTOM}h{WIDTH - 16}" stroke="{TEXT}"/>'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" '
        f'viewBox="0 0 {WIDTH} {HEIGHT}" font-family="Helvetica, Arial, sans-serif">'
        f"<title>{html.escape(title)}</title>\n" + "\n".join([*parts, axis]) + "\n</svg>\n"
    )


def summary(forward: Results, backward: Results) -> str:
    """The table of README.md: five cases, both directions, flexhop over in-tree."""
    lines = ["| | forward | backward |", "| --- | ---: | ---: |"]
    for case in tuple(SHOWN)[:5]:
        speeds = (f"{results.speedup(case):.2f}x" for results in (forward, backward))
        lines.append(f"| {SHOWN[case]} | " + " | ".join(speeds) + " |")
    return "\n".join(lines)


def _shown(results: Results) -> list[dict[str, float]]:
    return [results.rows[case] for case in SHOWN]


def _legend() -> list[str]:
    parts: list[str] = []
    x = 12.0
    for label, color in SERIES.values():
        parts.append(f'<rect x="{x:.0f}" y="34" width="11" height="11" fill="{color}"/>')
        parts.append(_text(x + 16, 44, label, anchor="start"))
        x += 34 + 6.2 * len(label)
    return parts


def _text(x: float, y: float, words: str, *, bold: bool = False, anchor: str = "middle") -> str:
    weight = "bold" if bold else "normal"
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="12" font-weight="{weight}" '
        f'text-anchor="{anchor}" fill="{TEXT}">{html.escape(words)}</text>'
    )
