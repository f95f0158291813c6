"""``python -m benchmarks.varlen``: packed sequences, forward and both passes, masks included.

Every call starts from the offsets of the sequences: what an implementation makes of them, a block
mask or tables, is part of its time; "layers" is one of several calls that share them, as the
layers of a model do. A row runs in a process of its own: implementations are
compared with float64 first, then CUDA graphs of whole calls are replayed in turn.
"""

import argparse
import json
import os
import re
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks import area
from benchmarks.report import cell, row
from benchmarks.turns import answer, in_turn, wait_for_turn
from benchmarks.varlen_cases import PACKS, Pack, lengths
from benchmarks.varlen_worker import DIRECTIONS, NAMES, Worker


def table(results: list[dict[str, Any]], names: tuple[str, ...], direction: str) -> str:
    """Milliseconds, our TFLOP/s and nanoseconds per token, and our speed over the others'."""
    peers = [name for name in names if name != "flexhop"]
    head = ["row", "sequences", "tokens", *(f"{name}, ms" for name in names)]
    head += ["TFLOP/s", "ns/token", *(f"x {peer}" for peer in peers)]
    lines = [row(head), row(["---"] + ["---:"] * (len(head) - 1))]
    for result in results:
        times = result["milliseconds"].get(direction, {})
        own = times.get("flexhop")
        flops = area.flops("fwd", result["scores"], result["head_dim"])
        if direction == "both":
            flops += area.flops("bwd", result["scores"], result["head_dim"])
        ratios = [times[p] / own if own and p in times else None for p in peers]
        cells = [cell(times.get(name), 3) for name in names]
        cells.append(cell(own and flops / own / 1e9))
        cells.append(cell(own and 1e6 * own / result["tokens"], 1))
        first = [result["name"], str(result["sequences"]), str(result["tokens"])]
        lines.append(row([*first, *cells, *(cell(ratio, 2) for ratio in ratios)]))
    return "\n".join(lines)


def measure(
    packs: list[Pack], names: tuple[str, ...], device: str, at_once: int
) -> list[dict[str, Any]]:
    """Results of all rows: they are compiled and checked side by side, and timed alone."""
    options = ["--worker", "--device", device, "--peers", *names[1:]]
    commands = [["benchmarks.varlen", *options, "--rows", f"^{pack.name}$"] for pack in packs]
    answers = in_turn(commands, at_once)
    return [facts(pack) | result_of(found) for pack, found in zip(packs, answers, strict=True)]


def facts(pack: Pack) -> dict[str, Any]:
    """What the table needs to know of a row beside its times."""
    scores = pack.heads * sum(n * (n + 1) // 2 for n in lengths(pack))
    return asdict(pack) | {"sequences": len(lengths(pack)), "scores": scores}


def result_of(found: dict[str, Any] | str) -> dict[str, Any]:
    """What a worker found; its last words are flexhop's failure."""
    if isinstance(found, dict):
        return found
    return {"milliseconds": {}, "errors": {}, "failed": {"flexhop": found}}


def main(arguments: list[str]) -> int:
    """Measure, print the tables; fails if flexhop failed or was wrong anywhere."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.varlen", description=__doc__)
    parser.add_argument("--rows", default="", metavar="REGEX", help="only matching names")
    parser.add_argument("--peers", nargs="*", choices=NAMES[1:], default=list(NAMES[1:]))
    parser.add_argument("--json", type=Path, metavar="PATH", help="write all numbers here")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--at-once", type=int, default=max(1, (os.cpu_count() or 2) // 2), metavar="N",
        help="rows that are prepared side by side",
    )  # fmt: skip
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    device, names = torch.device(options.device), ("flexhop", *options.peers)
    on_gpu = device.type == "cuda"
    chosen = [pack for pack in PACKS if re.search(options.rows, pack.name)]
    chosen = chosen if on_gpu else [pack.shrunk() for pack in chosen]
    if options.worker:
        worker = Worker(chosen[0], names, device)
        wait_for_turn()
        answer(worker.time())
        return 0
    machine = torch.cuda.get_device_name() if on_gpu else "CPU, tiny shapes: not a measurement"
    print(f"{machine}; torch {torch.__version__}; {'bfloat16' if on_gpu else 'float32'}.")
    results = measure(chosen, names, options.device, options.at_once)
    for direction, words in zip(DIRECTIONS, ("Forward", "Forward and backward"), strict=True):
        print(f"\n{words}:\n\n{table(results, names, direction)}")
    for result in results:
        for name, why in result["failed"].items():
            print(f"- {result['name']}, {name}: {why}")
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + os.linesep)
    return int(any("flexhop" in result["failed"] for result in results))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
