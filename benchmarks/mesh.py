"""Context parallelism: one GPU, several, and PyTorch's own; both passes of layers in a row.

Run it on every rank of a host::

    torchrun --nproc-per-node 2 -m benchmarks.mesh --jobs 'window|documents'

Every job has processes of its own, one per rank. All of them compile side by side, check the
output against its definition in float64, and every result against one process; then they measure
in turn. Rows of layers follow each other without waiting, so times do not count an idle start.
"one" is the same call without a mesh, on every GPU by itself. Efficiency compares with the slowest
of them, because GPUs of one host differ; the time of the first one is printed as well.
"""

import argparse
import dataclasses
import json
import os
import re
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.report import cell, row
from benchmarks.turns import in_turn

# In order of interest: time may run out.
JOBS = (
    ("window", 128), ("documents", 128), ("causal", 64), ("window", 64), ("documents", 64),
    ("causal", 128),
)  # fmt: skip
HEAD = (
    "job", "first, ms", "one, ms", "in-tree, ms", "ranks, ms", "efficiency", "host, ms",
    "MB forward", "planned", "MB backward", "computing", "moving", "hidden", "idle",
)  # fmt: skip
SHRUNK = 128  # lengths are divided by this on a CPU
_END = 12.0  # seconds that are kept for what a job has begun


@dataclasses.dataclass(frozen=True)
class Job:
    """What a worker measures. who: "flexhop" or "in-tree". until: when to stop, in Unix time."""

    mask: str
    tokens: int
    who: str
    device: str
    layers: int
    rounds: int
    until: float
    trace: str = ""

    @property
    def name(self) -> str:
        """Its name in tables."""
        return f"{self.mask}-{self.tokens >> 10}k"

    @property
    def shrunk(self) -> int:
        """Lengths are divided by this."""
        return 1 if self.device == "cuda" else SHRUNK

    @property
    def length(self) -> int:
        """Tokens that are really computed."""
        return self.tokens // self.shrunk


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="torchrun -m benchmarks.mesh", description=__doc__)
    parser.add_argument("--jobs", default="", metavar="REGEX", help="only matching jobs")
    parser.add_argument("--seconds", type=float, default=600.0, help="then print what there is")
    parser.add_argument("--layers", type=int, default=4, help="layers in a row")
    parser.add_argument("--rounds", type=int, default=7, help="most rows that are timed")
    parser.add_argument("--in-tree", action="store_true", help="also PyTorch's; compiles slowly")
    parser.add_argument("--at-once", type=int, default=8, help="jobs that compile side by side")
    parser.add_argument("--trace", default="", metavar="FOLDER", help="write chrome traces here")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write all numbers here")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options = parser.parse_args(arguments)
    if options.in_tree and options.device == "cpu":
        parser.error("PyTorch's FlexAttention has no backward pass on a CPU")
    return options


def make_jobs(options: argparse.Namespace) -> list[Job]:
    """The jobs to run; all of flexhop's come first."""
    until = time.time() + options.seconds - _END
    made = [
        Job(
            mask, thousands << 10, who, options.device, options.layers, options.rounds, until,
            options.trace,
        )
        for who in (("flexhop", "in-tree") if options.in_tree else ("flexhop",))
        for mask, thousands in JOBS
    ]  # fmt: skip
    return [job for job in made if re.search(options.jobs, job.name)]


def measure(jobs: list[Job], options: argparse.Namespace) -> list[dict[str, Any] | str]:
    """What this rank's workers found."""
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "4")
    commands = [["benchmarks.mesh_worker", json.dumps(dataclasses.asdict(job))] for job in jobs]
    return in_turn(commands, options.at_once, options.seconds)


def table(jobs: list[Job], found: list[dict[str, Any] | str]) -> str:
    """Times per layer; where they go, on the rank that computes longest."""
    intree = {
        job.name: slowest(result, "row")
        for job, result in zip(jobs, found, strict=True)
        if job.who == "in-tree" and isinstance(result, dict)
    }
    lines = [row(HEAD), row(["---"] + ["---:"] * (len(HEAD) - 1))]
    for job, result in zip(jobs, found, strict=True):
        if job.who == "flexhop" and isinstance(result, dict):
            lines.append(row([job.name, *_cells(job, result, intree.get(job.name))]))
    return "\n".join(lines)


def _cells(job: Job, result: dict[str, Any], intree: float | None) -> list[str]:
    ranks = [rank["mesh"] for rank in result["ranks"] if "mesh" in rank]
    first = result["ranks"][0].get("one", {}).get("row")
    one, mesh = slowest(result, "row", "one"), slowest(result, "row")
    efficiency = one / (len(ranks) * mesh) if one and mesh else None
    busiest = max(ranks, key=lambda rank: rank.get("computing", rank["row"]), default={})
    sent = [received(rank["moved"], forward=True) for rank in ranks]
    back = [received(rank["moved"], forward=False) for rank in ranks]
    parts = [busiest.get(name) for name in ("computing", "moving", "hidden", "idle")]
    return [
        cell(first, 2), cell(one, 2), cell(intree, 2), cell(mesh, 2), cell(efficiency, 3),
        cell(slowest(result, "host"), 2), cell(max(sent, default=None), 1),
        cell(1e-6 * result["ranks"][0]["planned"], 1), cell(max(back, default=None), 1),
        *(cell(part, 2) for part in parts),
    ]  # fmt: skip


def received(moved: dict[str, float], *, forward: bool) -> float:
    """MB per layer that a rank received in one direction."""
    return 1e-6 * sum(n for name, n in moved.items() if (name == "return") != forward)


def slowest(result: dict[str, Any], name: str, where: str = "mesh") -> float | None:
    """A number of the rank where it is largest."""
    found = [rank[where][name] for rank in result["ranks"] if where in rank]
    return max(found, default=None)


def details(job: Job, result: dict[str, Any] | str) -> str:
    """What a table has no room for: kernels, errors, times of compilation."""
    title = f"{job.name}, {job.who}"
    if isinstance(result, str):
        return f"- {title}: {result}"
    lines = [f"- {title}: {result['ranks'][0]['words']}"]
    for rank in result["ranks"]:
        compiled = ", ".join(f"{seconds:.1f}" for seconds in rank["compiled"])
        errors = ", ".join(f"{name} {error:.1e}" for name, error in rank["errors"].items())
        lines.append(f"    rank {rank['rank']}: first calls {compiled} s; errors: {errors}")
        for where in ("one", "mesh"):
            if "kernels" in rank.get(where, {}):
                named = ", ".join(f"{n} {ms:.3f}" for n, ms in rank[where]["kernels"].items())
                lines.append(f"      {where}, ms by kernel: {named}")
                lines.append(f"      {where}, ms: {_times(rank[where])}")
    return "\n".join(lines)


def _times(found: dict[str, Any]) -> str:
    names = ("row", "host", "span", "computing", "moving", "hidden", "idle")
    rows = " ".join(f"{ms:.1f}" for ms in found["rows"])
    return (
        ", ".join(f"{name} {found[name]:.2f}" for name in names)
        + f"; rows {rows}; {found['state']}"
    )


def main(arguments: list[str]) -> int:
    """Measure on this rank; the first one prints. Fails if a job of flexhop's failed."""
    options = parse_arguments(arguments)
    jobs = make_jobs(options)
    found = measure(jobs, options)
    if os.environ["RANK"] != "0":  # torchrun would end the first rank if this one failed
        return 0
    machines = {r["ranks"][0]["machine"] for r in found if isinstance(r, dict)}
    print(
        f"{'; '.join(machines)}; milliseconds per layer, forward and backward, "
        f"{options.layers} layers in a row.\n"
    )
    print(table(jobs, found) + "\n")
    for job, result in zip(jobs, found, strict=True):
        print(details(job, result))
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + os.linesep)
    ours = (r for job, r in zip(jobs, found, strict=True) if job.who == "flexhop")
    return int(any(isinstance(result, str) for result in ours))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
