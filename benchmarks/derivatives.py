"""``python -m benchmarks.derivatives``: forward mode and second orders: error, time, memory, host.

Problems are timed beside our portable forward kernel, our portable backward pass and compiled math
attention. Errors are those at 512 tokens against float64 math attention under the same transform,
beside those of math attention in the same dtype. Host times are those of calls from eager code
under `flexhop.eager_kernels()`. A last table compares ratios with what they must reach.

Every measurement has a process of its own; some compile side by side, and measure in turn.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.report import cell, row
from benchmarks.turns import in_turn

Found = dict[str, dict[str, Any]]  # by the name of a step; steps that failed are not in it
SHRUNK = 64  # lengths are divided by this on a CPU


@dataclasses.dataclass(frozen=True)
class Problem:
    """Self-attention of [batch, heads, tokens, width].

    is_learned: with a slope per head. is_computed: the mod takes their exponentials. is_capped:
    20 * tanh(score / 20), which has a second derivative of its own. in_chunks: second orders run
    the chunked reference, as third ones do.
    """

    batch: int
    heads: int
    tokens: int
    width: int
    is_causal: bool = False
    is_learned: bool = False
    is_computed: bool = False
    is_capped: bool = False
    in_chunks: bool = False

    def shrunk(self) -> Problem:
        """The same for a trial on a CPU."""
        return dataclasses.replace(
            self, batch=1, heads=2, tokens=self.tokens // SHRUNK, width=self.width // 4
        )


PROBLEMS = {
    "4k": Problem(4, 16, 4096, 128),
    "8k-causal": Problem(4, 16, 8192, 128, is_causal=True),
    "4k-causal": Problem(4, 16, 4096, 128, is_causal=True),
    "4k-64": Problem(4, 16, 4096, 64),
    "2x4k-64": Problem(2, 16, 4096, 64),
    "2x4k-64-slopes": Problem(2, 16, 4096, 64, is_learned=True),
    "2x4k-64-computed": Problem(2, 16, 4096, 64, is_learned=True, is_computed=True),
    "2x4k-64-capped": Problem(2, 16, 4096, 64, is_capped=True),
    "2x4k-64-chunks": Problem(2, 16, 4096, 64, is_learned=True, in_chunks=True),
    "2x4k": Problem(2, 16, 4096, 128),
    "2x4k-256": Problem(2, 16, 4096, 256),
    "2x16k-64": Problem(2, 16, 16384, 64),
    "2x16k-64-slopes": Problem(2, 16, 16384, 64, is_learned=True),
    "2x16k-64-chunks": Problem(2, 16, 16384, 64, is_learned=True, in_chunks=True),
}
CALLS = ("plain", "causal", "slopes")  # eager calls whose host time is measured


class Step(NamedTuple):
    """A measurement. derivative: of benchmarks.derivatives_worker, or "host" for an eager call."""

    problem: str
    derivative: str
    by: str = "flexhop"

    @property
    def name(self) -> str:
        """Its name in options and tables."""
        return f"{self.problem} {self.derivative} {self.by}"


# Slopes are inputs like the others: "second" and "flow" move them, and return their gradients.
STEPS = [
    *(Step("4k", name) for name in ("forward", "tangent", "training", "detached")),
    Step("4k", "tangent", "math"),
    *(Step("4k-causal", name) for name in ("forward", "tangent")),
    *(Step("8k-causal", name) for name in ("forward", "tangent")),
    *(Step("4k-64", name) for name in ("forward", "tangent")),
    *(Step("2x4k-64", name) for name in ("forward", "training", "second", "flow")),
    *(Step("2x4k-64", name, "math") for name in ("second", "flow")),
    *(Step("2x4k-64-slopes", name) for name in ("forward", "training", "second", "flow")),
    *(Step("2x4k-64-computed", name) for name in ("forward", "training", "second", "flow")),
    *(Step("2x4k-64-capped", name) for name in ("forward", "training", "second", "flow")),
    *(Step("2x4k-64-chunks", name) for name in ("forward", "training", "flow")),
    *(Step("2x4k", name) for name in ("forward", "training", "second", "flow")),
    *(Step("2x4k-256", name) for name in ("forward", "training", "second", "flow")),
    Step("2x16k-64", "second"),
    Step("2x16k-64-slopes", "second"),
    Step("2x16k-64-chunks", "flow"),
    *(Step(call, "host") for call in CALLS),
]


class Must(NamedTuple):
    """What a number has to reach; number: None if a step that it needs did not run."""

    what: str
    number: Callable[[Found], float | None]
    line: float
    is_most: bool = True

    def cells(self, found: Found) -> list[str]:
        """What, the number, its line, and whether it is reached."""
        number = self.number(found)
        line = f"{'<=' if self.is_most else '>='} {self.line:g}"
        if number is None:
            return [self.what, "–", line, "–"]
        is_reached = number <= self.line if self.is_most else number >= self.line
        return [self.what, f"{number:.2f}", line, "yes" if is_reached else "NO"]


def of(name: str, field: str = "ms") -> Callable[[Found], float | None]:
    """A number of a step."""
    return lambda found: found.get(name, {}).get(field)


def over(
    above: Callable[[Found], float | None], below: Callable[[Found], float | None]
) -> Callable[[Found], float | None]:
    """Their quotient."""

    def quotient(found: Found) -> float | None:
        top, bottom = above(found), below(found)
        return None if top is None or not bottom else top / bottom

    return quotient


def backward(problem: str) -> Callable[[Found], float | None]:
    """Milliseconds of one backward pass: of training without its forward pass."""

    def difference(found: Found) -> float | None:
        both, forward = (
            of(f"{problem} {name} flexhop")(found) for name in ("training", "forward")
        )
        return None if both is None or forward is None else both - forward

    return difference


def largest_error(found: Found) -> float | None:
    """The largest error in units of that of math attention."""
    ratios = [r["ours"] / r["plain"] for r in found.values() if r.get("plain")]
    return max(ratios, default=None)


def _tangents(name: str) -> list[Must]:
    pair = [f"{name} {derivative} flexhop" for derivative in ("tangent", "forward")]
    return [
        Must(f"tangent / forward, {name}", over(*(of(n) for n in pair)), 4.0),
        Must(f"their memory, {name}", over(*(of(n, "mib") for n in pair)), 2.5),
    ]


def _seconds(name: str, kind: str, line: float, derivative: str = "second") -> list[Must]:
    second, training = (f"{name} {each} flexhop" for each in (derivative, "training"))
    memory = over(of(second, "mib"), of(training, "mib"))
    return [
        Must(f"{derivative}, {kind} / backward, {name}", over(of(second), backward(name)), line),
        Must(f"memory, {derivative} / training, {name}", memory, 3.0),
    ]


def _gigabytes(name: str) -> Callable[[Found], float | None]:
    return over(of(name, "mib"), lambda _: 1e9 / 2**20)


MUSTS = [
    *_tangents("4k"),
    *_tangents("8k-causal"),
    Must(
        "compiled math / flexhop, 4k tangent",
        over(of("4k tangent math"), of("4k tangent flexhop")), 6.0, is_most=False,
    ),
    Must(
        "causal / dense, 4k tangent",
        over(of("4k-causal tangent flexhop"), of("4k tangent flexhop")), 0.6,
    ),
    *_seconds("2x4k-64", "fused", 6.0),
    *_seconds("2x4k-64-slopes", "fused", 6.0),
    *_seconds("2x4k-64-computed", "fused", 6.0, "flow"),
    *_seconds("2x4k-64-capped", "second derivative of the mod", 25.0),
    *_seconds("2x4k-64-chunks", "chunked", 25.0, "flow"),
    Must("GB, 2x16k-64 second", _gigabytes("2x16k-64 second flexhop"), 20.0),
    Must("GB, 2x16k-64-slopes second", _gigabytes("2x16k-64-slopes second flexhop"), 20.0),
    Must("GB, 2x16k-64-chunks flow", _gigabytes("2x16k-64-chunks flow flexhop"), 20.0),
    *(
        Must(f"us above the compiled code, {call}, {kind}", of(f"{call} host flexhop", kind), 60.0)
        for call in CALLS for kind in ("no grad", "grad")
    ),
    Must("largest error / math's in the same dtype", largest_error, 1.1),
]  # fmt: skip


def table(steps: Sequence[Step], found: Found) -> str:
    """Times, memory and errors."""
    names = ("problem", "derivative", "by", "ms", "MiB", "error", "math's")
    lines = [row(names), row(["---"] * 3 + ["---:"] * 4)]
    for step in steps:
        if step.derivative != "host" and step.name in found:
            numbers = found[step.name]
            cells = (cell(numbers["ms"], 2), cell(numbers["mib"]))
            errors = (f"{numbers[n]:.1e}" if n in numbers else "" for n in ("ours", "plain"))
            lines.append(row([*step, *cells, *errors]))
    return "\n".join(lines)


def host_table(steps: Sequence[Step], found: Found) -> str:
    """Microseconds of the host in eager calls."""
    names = ("eager call, us", "whole call", "compiled code", "above it")
    lines = [row(names), row(["---"] + ["---:"] * 3)]
    for step in steps:
        if step.derivative == "host" and step.name in found:
            numbers = found[step.name]
            for kind in ("no grad", "grad"):
                parts = (numbers[f"whole, {kind}"], numbers[f"code, {kind}"], numbers[kind])
                lines.append(row([f"{step.problem}, {kind}", *(cell(n, 1) for n in parts)]))
    return "\n".join(lines)


def must_table(found: Found) -> str:
    """Every ratio, its line, and whether it is reached."""
    head = [row(["ratio", "is", "must", "reached"]), row(["---", "---:", "---:", "---"])]
    return "\n".join(head + [row(must.cells(found)) for must in MUSTS])


def main(arguments: list[str]) -> int:
    """Print the tables; fails if a step did."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", metavar="REGEX", help="only matching steps")
    parser.add_argument("--at-once", type=int, default=6, help="steps that compile side by side")
    parser.add_argument("--seconds", type=float, default=580.0, help="then print what there is")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write all numbers here")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options = parser.parse_args(arguments)
    steps = [step for step in STEPS if re.search(options.only, step.name)]
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "4")
    commands = [["benchmarks.derivatives_worker", options.device, *step] for step in steps]
    results = in_turn(commands, options.at_once, options.seconds)
    named = list(zip(steps, results, strict=True))
    found: Found = {step.name: result for step, result in named if isinstance(result, dict)}
    machines = {result.get("machine", "") for result in found.values()}
    print(f"{'; '.join(sorted(machines))}; torch {torch.__version__}\n")
    print("\n\n".join([table(steps, found), host_table(steps, found), must_table(found)]))
    failed = [f"- {step.name}: {why}" for step, why in named if isinstance(why, str)]
    print("\n".join(["", *failed]))
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + os.linesep)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
