"""``python -m benchmarks.derivatives``: forward mode and second orders: error, time and memory.

Every problem is compared with float64 math attention under the same transform, at 512 tokens; then
timed at its own length beside our portable forward kernel, our backward pass and compiled math
attention. Each measurement has a process of its own.
"""

import argparse
import math
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from flexhop import KernelOptions, create_block_mask, flex_attention
from flexhop.masks import causal

Attend = Callable[..., torch.Tensor]
REPEATS = 10
CHECKED = 512  # tokens at which errors are measured
PORTABLE = KernelOptions(backend="triton")


@dataclass(frozen=True)
class Problem:
    """Self-attention of [batch, heads, tokens, width] in bf16."""

    batch: int
    heads: int
    tokens: int
    width: int
    is_causal: bool = False

    def inputs(self, count: int) -> list[torch.Tensor]:
        """Normal random tensors."""
        shape = (self.batch, self.heads, self.tokens, self.width)
        return [torch.randn(shape, dtype=torch.bfloat16, device="cuda") for _ in range(count)]

    def flexible(self) -> Attend:
        """Our attention."""
        mask = None
        if self.is_causal:
            mask = create_block_mask(causal, None, None, self.tokens, self.tokens, "cuda")
        return lambda *x: flex_attention(*x, block_mask=mask, kernel_options=PORTABLE)

    def math(self) -> Attend:
        """Attention that stores all scores."""

        def attend(query: Any, key: Any, value: Any) -> torch.Tensor:
            scores = query @ key.mT / math.sqrt(self.width)
            if self.is_causal:
                kept = torch.ones_like(scores, dtype=torch.bool).tril()
                scores = torch.where(kept, scores, -math.inf)
            return torch.softmax(scores, -1) @ value

        return attend


PROBLEMS = {
    "4k": Problem(4, 16, 4096, 128),
    "8k-causal": Problem(4, 16, 8192, 128, is_causal=True),
    "4k-causal": Problem(4, 16, 4096, 128, is_causal=True),
    "4k-64": Problem(4, 16, 4096, 64),
    "2x4k-64": Problem(2, 16, 4096, 64),
    "2x4k": Problem(2, 16, 4096, 128),
    "2x16k-64": Problem(2, 16, 16384, 64),
}


def forward(attend: Attend) -> Callable[..., Any]:
    """The output."""
    return lambda x, along: attend(*x)


def training(attend: Attend) -> Callable[..., Any]:
    """Gradients of query, key and value."""
    return lambda x, along: torch.func.grad(
        lambda *y: attend(*y).float().square().sum(), argnums=(0, 1, 2)
    )(*x)


def tangent(attend: Attend) -> Callable[..., Any]:
    """The output and its tangent."""
    return lambda x, along: torch.func.jvp(attend, tuple(x), tuple(along))


def second(attend: Attend) -> Callable[..., Any]:
    """Gradients of a product of gradients."""

    def product(*x: Any, along: Any) -> Any:
        grads = training(attend)(x, along)
        return sum((g.to(y.dtype) * y).sum() for g, y in zip(grads, along, strict=True))

    return lambda x, along: torch.func.grad(
        lambda *y: product(*y, along=along), argnums=(0, 1, 2)
    )(*x)


def flow(attend: Attend) -> Callable[..., Any]:
    """Gradients of a loss on the output and its tangent, as MeanFlow without a detached target."""

    def loss(*x: Any, along: Any) -> Any:
        out, moved = torch.func.jvp(attend, x, tuple(along))[:2]
        return (out - moved).float().square().sum()

    return lambda x, along: torch.func.grad(lambda *y: loss(*y, along=along), argnums=(0, 1, 2))(
        *x
    )


DERIVATIVES = {
    "forward": forward,
    "training": training,
    "tangent": tangent,
    "second": second,
    "flow": flow,
}


def leaves(result: Any) -> list[torch.Tensor]:
    """The tensors of a nested tuple."""
    if isinstance(result, torch.Tensor):
        return [result]
    return [tensor for part in result for tensor in leaves(part)]


def error(problem: Problem, derivative: str) -> tuple[float, float]:
    """Largest of the mean errors relative to the mean of the exact: ours, and math's in bf16."""
    small = replace(problem, tokens=CHECKED)
    make = DERIVATIVES[derivative]
    x, along = small.inputs(3), small.inputs(3)
    exact = make(small.math())([t.double() for t in x], [t.double() for t in along])
    found = [torch.compile(make(small.flexible()))(x, along), make(small.math())(x, along)]
    exact, *results = (leaves(r) for r in (exact, *found))
    errors = (
        max(
            float((a.double() - b).abs().mean() / b.abs().mean())
            for a, b in zip(result, exact, strict=True)
        )
        for result in results
    )
    ours, plain = errors
    return ours, plain


def measure(problem: Problem, derivative: str, implementation: str) -> tuple[float, float]:
    """Median milliseconds of a call, and MiB at its peak beside its inputs."""
    attend = problem.flexible() if implementation == "flexhop" else problem.math()
    run = torch.compile(DERIVATIVES[derivative](attend))
    x, along = problem.inputs(3), problem.inputs(3)
    for _ in range(3):
        run(x, along)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    times = []
    for _ in range(REPEATS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run(x, along)
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    peak = torch.cuda.max_memory_allocated() - before
    return statistics.median(times), peak / 2**20


STEPS = [
    *(("4k", name, "flexhop") for name in ("forward", "tangent")),
    ("4k", "tangent", "math"),
    *(("4k-causal", name, "flexhop") for name in ("forward", "tangent")),
    *(("8k-causal", name, "flexhop") for name in ("forward", "tangent")),
    *(("4k-64", name, "flexhop") for name in ("forward", "tangent")),
    *(("2x4k-64", name, "flexhop") for name in ("training", "second", "flow")),
    *(("2x4k-64", name, "math") for name in ("second", "flow")),
    *(("2x4k", name, "flexhop") for name in ("training", "second", "flow")),
    ("2x16k-64", "second", "flexhop"),
]


def one(name: str, derivative: str, implementation: str) -> str:
    """A row of the table."""
    problem = PROBLEMS[name]
    milliseconds, mebibytes = measure(problem, derivative, implementation)
    errors = ""
    if implementation == "flexhop":
        ours, plain = error(problem, derivative)
        errors = f"{ours:.1e} ({plain:.1e})"
    row = (name, derivative, implementation, f"{milliseconds:.2f}", f"{mebibytes:.0f}", errors)
    return "| " + " | ".join(row) + " |"


def main() -> None:
    """Print the table, or one row of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--row", nargs=3, metavar=("PROBLEM", "DERIVATIVE", "IMPLEMENTATION"))
    row = parser.parse_args().row
    if row is not None:
        print(one(*row))
        return
    print("| problem | derivative | by | ms | MiB | error (of math in bf16) |")
    print("| --- | --- | --- | --- | --- | --- |", flush=True)
    for step in STEPS:
        command = [sys.executable, "-m", "benchmarks.derivatives", "--row", *step]
        done = subprocess.run(command, capture_output=True, text=True)
        failure = (done.stderr.strip().splitlines() or ["no output"])[-1]
        print(done.stdout.strip() if done.returncode == 0 else f"| {step} | {failure} |")


if __name__ == "__main__":
    main()
