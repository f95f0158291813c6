"""Numbers to text: TFLOP/s by unmasked area, ratios, the geometric mean, a Markdown table.

``python -m benchmarks.report`` takes the tables that docs/benchmarks.md records. It draws them in
docs/images and writes the table of README.md.
"""

import math
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.area import flops
from benchmarks.chart import bar_chart, read_results, summary

Result = dict[str, Any]
SPEED_BEGIN = "<!-- speed: begin (python -m benchmarks.report writes this table) -->"
SPEED_END = "<!-- speed: end -->"


def tflops(result: Result, direction: str, name: str) -> float | None:
    """TFLOP/s of an implementation: the median over its rounds, or None if it was not timed."""
    rounds = result.get("milliseconds", {}).get(direction, {}).get(name)
    if not rounds:
        return None
    work = flops(direction, result["area"], result["head_dim"], result.get("value_dim"))
    return work / (statistics.median(rounds) * 1e-3) / 1e12


def ratio(result: Result, direction: str, peer: str) -> float | None:
    """How many times faster flexhop is than a peer."""
    own, other = tflops(result, direction, "flexhop"), tflops(result, direction, peer)
    return None if own is None or other is None else own / other


def geometric_mean(values: Iterable[float | None]) -> float | None:
    """Geometric mean of what is there; None of nothing."""
    logs = [math.log(value) for value in values if value is not None]
    return math.exp(statistics.fmean(logs)) if logs else None


def cell(value: float | None, digits: int = 0, suffix: str = "") -> str:
    """A number for a table, or a dash."""
    return "–" if value is None else f"{value:.{digits}f}{suffix}"


def row(cells: Iterable[str]) -> str:
    """One line of a Markdown table."""
    return "| " + " | ".join(cells) + " |"


def direction_table(results: list[Result], direction: str, names: tuple[str, ...]) -> list[str]:
    """Lines of the table of one direction; ratios are flexhop's speed over the peer's."""
    peers = [name for name in names if name != "flexhop"]
    digits = 0 if max_tflops(results, direction) >= 10 else 3
    head = ["case", "(B,Hq,Hkv,S,D)", *names, *(f"x {peer}" for peer in peers)]
    lines = [row(head), row(["---"] * 2 + ["---:"] * (len(head) - 2))]
    for result in results:
        speeds = [cell(tflops(result, direction, name), digits) for name in names]
        ratios = [cell(ratio(result, direction, peer), 2) for peer in peers]
        lines.append(row([result["case"], result.get("shape", "–"), *speeds, *ratios]))
    means = [geometric_mean(ratio(r, direction, peer) for r in results) for peer in peers]
    blank = [""] * len(names)
    lines.append(row(["geometric mean", "", *blank, *(cell(mean, 2) for mean in means)]))
    return lines


def max_tflops(results: list[Result], direction: str) -> float:
    """The fastest flexhop or in-tree speed, to choose the number of digits."""
    speeds = [tflops(r, direction, name) for r in results for name in ("flexhop", "in-tree")]
    return max((speed for speed in speeds if speed is not None), default=0.0)


def first_call_table(results: list[Result]) -> list[str]:
    """Lines of the table of cold first calls, forward plus backward, in seconds."""
    measured = {name for result in results for name in result.get("first_call", {})}
    names = [name for name in ("flexhop", "portable", "in-tree") if name in measured]
    lines = [row(["case", *names]), row(["---", *["---:"] * len(names)])]
    for result in results:
        seconds = [cell(result.get("first_call", {}).get(name), 1) for name in names]
        lines.append(row([result["case"], *seconds]))
    return lines


def block_table(results: list[Result]) -> list[str]:
    """Lines of the table of small mask blocks: flexhop's speed per visited area over that of
    blocks of 128; none if those were not timed."""
    timed = [r for r in results if r["case"].startswith("blocks-")]
    large = next((r for r in timed if r["case"].startswith("blocks-128-")), None)
    if large is None:
        return []
    lines = [row(["case", "fwd", "bwd"]), row(["---", "---:", "---:"])]
    for result in timed:
        cells = []
        for direction in ("fwd", "bwd"):
            own, whole = (tflops(r, direction, "flexhop") for r in (result, large))
            cells.append(cell(None if own is None or whole is None else own / whole, 2))
        lines.append(row([result["case"], *cells]))
    return ["## Speed per visited area over that of blocks of 128", "", *lines, ""]


def failures(results: list[Result]) -> list[str]:
    """One line for everything that failed or was wrong."""
    lines = [f"- {r['case']}: {r['error']}" for r in results if "error" in r]
    for result in results:
        lines += [f"- {result['case']}, {n}: {why}" for n, why in result.get("failed", {}).items()]
    return lines


def markdown(results: list[Result], machine: str, names: tuple[str, ...]) -> str:
    """The whole report."""
    shown = {d for result in results for d in result.get("milliseconds", {})}
    titles = {"fwd": "Forward, TFLOP/s", "bwd": "Backward, TFLOP/s"}
    lines = [machine, ""]
    for direction, title in titles.items():
        if direction in shown:
            lines += [f"## {title}", "", *direction_table(results, direction, names), ""]
    lines += block_table(results)
    lines += ["## First call, cold, seconds", "", *first_call_table(results), ""]
    if failed := failures(results):
        lines += ["## Not measured", "", *failed, ""]
    return "\n".join(lines)


def decoding_table(results: list[dict[str, Any]], names: tuple[str, ...]) -> str:
    """Microseconds and GB/s of every implementation, and flexhop's speed over the others'."""
    peers = [name for name in names if name != "flexhop"]
    head = ["step", "(B,Hq,Hkv,M,N,D)", *(f"{name}, us" for name in names)]
    head += [*(f"{name}, GB/s" for name in names), *(f"x {peer}" for peer in peers)]
    lines = [row(head), row(["---"] * 2 + ["---:"] * (len(head) - 2))]
    for result in results:
        times = [result["microseconds"].get(name) for name in names]
        speeds = [None if time is None else result["bytes"] / time / 1e3 for time in times]
        own = result["microseconds"].get("flexhop")
        others = [result["microseconds"].get(peer) for peer in peers]
        ratios = [None if own is None or time is None else time / own for time in others]
        cells = [*(cell(t, 1) for t in times), *(cell(s) for s in speeds)]
        lines.append(row([result["name"], result["shape"], *cells, *(cell(r, 2) for r in ratios)]))
    for result in results:
        lines += [f"- {result['name']}, {n}: {why}" for n, why in result["failed"].items()]
    return "\n".join(lines)


def record(root: Path) -> dict[Path, str]:
    """What README.md and docs/images have to hold, by path, according to docs/benchmarks.md.

    Args:
        root: the checkout.
    """
    page = (root / "docs" / "benchmarks.md").read_text()
    forward, backward = (read_results(page, name) for name in ("Forward", "Backward"))
    head, rest = (root / "README.md").read_text().split(SPEED_BEGIN, 1)
    table = f"{SPEED_BEGIN}\n{summary(forward, backward)}\n{SPEED_END}"
    title = "{}, TFLOP/s on an H200 in bf16 (higher is better; below: flexhop over flex_attention)"
    return {
        root / "README.md": head + table + rest.split(SPEED_END, 1)[1],
        root / "docs/images/forward.svg": bar_chart(forward, title.format("Forward")),
        root / "docs/images/backward.svg": bar_chart(backward, title.format("Backward")),
    }


if __name__ == "__main__":
    for path, text in record(Path(__file__).resolve().parents[1]).items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
