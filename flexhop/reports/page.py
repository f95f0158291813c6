"""A report as HTML, for notebooks: the picture of the mask, a bar per kernel, and the text."""

from __future__ import annotations

import html
from typing import Any, NamedTuple

# Chip: dense 16-bit products per second, bytes per second of memory; from NVIDIA's data sheets.
RATES = {
    "H200": (989e12, 4.8e12),
    "H100": (989e12, 3.35e12),
    "B200": (2250e12, 8e12),
    "A100": (312e12, 2.0e12),
    "L40": (181e12, 0.864e12),
    "4090": (165e12, 1.01e12),
    "A10": (125e12, 0.6e12),
}
_ROW = (
    "<tr><td style='text-align:left'>{name}</td><td style='text-align:right'>{words}</td>"
    "<td style='width:20em;text-align:left'><div style='height:0.8em;width:{part:.1f}%;"
    "background:#4c78a8'></div></td><td style='text-align:left'>{limit}</td></tr>"
)


class Estimate(NamedTuple):
    """Lower bound of a kernel's time on its chip: amount in `unit`, and the bottleneck."""

    amount: float
    unit: str
    limit: str


def estimate(device: str, flops: int | None, moved: int) -> Estimate:
    """The roofline of one kernel.

    Args:
        device: the name of the GPU. A chip that is not in RATES gives GFLOP instead of a time.
        flops: operations of the matrix products, None if unknown.
        moved: bytes that it must read and write.
    """
    rates = next((rates for chip, rates in RATES.items() if chip in device), None)
    if rates is None:
        return Estimate((flops or 0) / 1e9, "GFLOP", "")
    products, memory = (flops or 0) / rates[0], moved / rates[1]
    limit = "products" if products > memory else "memory"
    return Estimate(1e6 * max(products, memory), "µs", f"bounded by {limit}")


def page(report: Any, picture: str | None) -> str:
    """The HTML of a Report.

    Args:
        report: see report.py.
        picture: the mask as SVG, or None.
    """
    device, passes = report.device, report.passes
    found = [(part.kernel, estimate(device, part.flops, part.bytes)) for part in passes]
    most = max((guess.amount for _, guess in found), default=0) or 1
    rows = "".join(
        _ROW.format(
            name=html.escape(kernel),
            words=f"{guess.amount:.3g} {guess.unit}",
            part=100 * guess.amount / most,
            limit=guess.limit,
        )
        for kernel, guess in found
    )
    heading = f"{html.escape(report.call)} on {html.escape(device)}"
    table = f"<table><caption>least time of each kernel</caption>{rows}</table>" if rows else ""
    text = f"<details><summary>report</summary><pre>{html.escape(str(report))}</pre></details>"
    return f"<div><p>{heading}</p>{picture or ''}{table}{text}</div>"
