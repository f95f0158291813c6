"""A process of ``benchmarks.derivatives``: measures one step."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import statistics
import sys
import time
from collections.abc import Callable, Generator
from typing import Any
from unittest import mock

import torch

import flexhop
from benchmarks.derivatives import PROBLEMS, Problem, Step
from benchmarks.timing import Stopwatch
from benchmarks.turns import answer, wait_for_turn
from flexhop import KernelOptions, create_block_mask, flex_attention
from flexhop.compat.operators.alone import Alone
from flexhop.lowering import tangents
from flexhop.masks import causal
from flexhop.mods import alibi
from flexhop.ops.uncompiled.repeats import forget

Attend = Callable[..., torch.Tensor]
REPEATS = 10
CHECKED = 512  # most tokens at which errors are measured
HOST_CALLS = 1000
DTYPES = {"cuda": torch.bfloat16, "cpu": torch.float32}


class Setting:
    """A problem on a device. Its inputs are query, key, value and, if there are, slopes."""

    def __init__(self, problem: Problem, device: str) -> None:
        """Take a problem as it is."""
        self.problem, self.device, self.dtype = problem, device, DTYPES[device]

    def inputs(self) -> list[torch.Tensor]:
        """Normal random tensors."""
        problem = self.problem
        shape = (problem.batch, problem.heads, problem.tokens, problem.width)
        made = [torch.randn(shape, dtype=self.dtype, device=self.device) for _ in range(3)]
        return made + [torch.randn(problem.heads, device=self.device)] * problem.is_learned

    def flexible(self) -> Attend:
        """Our attention: portable kernels on a GPU."""
        tokens, mask, is_computed = self.problem.tokens, None, self.problem.is_computed
        options = KernelOptions(backend="triton") if self.device == "cuda" else None
        if self.problem.is_causal:
            mask = create_block_mask(causal, None, None, tokens, tokens, self.device)

        def attend(query: Any, key: Any, value: Any, slopes: Any = None) -> torch.Tensor:
            def biased(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
                slope = slopes.exp()[h] if is_computed else slopes[h]
                return score + slope * (kv_idx - q_idx) / tokens

            mod = _capped if self.problem.is_capped else None if slopes is None else biased
            return flex_attention(query, key, value, mod, mask, kernel_options=options)

        return attend

    def math(self) -> Attend:
        """Attention that stores all scores."""
        tokens, is_causal = self.problem.tokens, self.problem.is_causal
        is_computed = self.problem.is_computed

        def attend(query: Any, key: Any, value: Any, slopes: Any = None) -> torch.Tensor:
            scores = query @ key.mT / math.sqrt(query.size(-1))
            if slopes is not None:
                slopes = slopes.exp() if is_computed else slopes
                place = torch.arange(tokens, device=scores.device)
                bias = slopes[:, None, None] * (place - place[:, None]) / tokens
                scores = scores + bias.to(scores.dtype)
            if self.problem.is_capped:
                scores = _capped(scores)
            if is_causal:
                kept = torch.ones_like(scores, dtype=torch.bool).tril()
                scores = torch.where(kept, scores, -math.inf)
            return torch.softmax(scores, -1) @ value

        return attend


def _capped(score: torch.Tensor, *_: Any) -> torch.Tensor:
    return 20 * torch.tanh(score / 20)


def forward(attend: Attend) -> Callable[..., Any]:
    """The output."""
    return lambda x, along: attend(*x)


def training(attend: Attend) -> Callable[..., Any]:
    """Gradients of all inputs."""
    return lambda x, along: torch.func.grad(
        lambda *y: attend(*y).float().square().sum(), argnums=tuple(range(len(x)))
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
        lambda *y: product(*y, along=along), argnums=tuple(range(len(x)))
    )(*x)


def flow(attend: Attend) -> Callable[..., Any]:
    """Gradients of a loss on the output and its tangent, as MeanFlow without a detached target."""
    return _flow(attend, lambda moved: moved)


def detached(attend: Attend) -> Callable[..., Any]:
    """The same with a detached target, as MeanFlow."""
    return _flow(attend, torch.Tensor.detach)


def _flow(attend: Attend, target: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., Any]:
    def loss(*x: Any, along: Any) -> Any:
        out, moved = torch.func.jvp(attend, x, tuple(along))[:2]
        return (out - target(moved)).float().square().sum()

    return lambda x, along: torch.func.grad(
        lambda *y: loss(*y, along=along), argnums=tuple(range(len(x)))
    )(*x)


@contextlib.contextmanager
def in_chunks() -> Generator[None, None, None]:
    """Compute second orders in chunks, and do not reuse code that was compiled otherwise."""
    caches: Any = torch.compiler.config
    with (
        mock.patch.object(tangents, "second_obstacle", lambda _: "chunks are measured"),
        mock.patch.object(caches, "force_disable_caches", True),
    ):
        yield


DERIVATIVES = {
    "forward": forward,
    "training": training,
    "tangent": tangent,
    "second": second,
    "flow": flow,
    "detached": detached,
}


def leaves_of(result: Any) -> list[torch.Tensor]:
    """The tensors of a nested tuple."""
    if isinstance(result, torch.Tensor):
        return [result]
    return [tensor for part in result for tensor in leaves_of(part)]


def synchronize(device: str) -> None:
    """Wait for the device."""
    if device == "cuda":
        torch.cuda.synchronize()


def errors(setting: Setting, derivative: str) -> dict[str, float]:
    """Largest of the mean errors relative to the mean of the exact: ours, and math's."""
    make = DERIVATIVES[derivative]
    x, along = setting.inputs(), setting.inputs()
    exact = make(setting.math())([t.double() for t in x], [t.double() for t in along])
    # Static: another length follows in this process, and dynamic kernels are slower.
    found = {
        "ours": torch.compile(make(setting.flexible()), dynamic=False),
        "plain": make(setting.math()),
    }
    right = leaves_of(exact)
    return {
        name: max(
            float((a.double() - b).abs().mean() / b.abs().mean())
            for a, b in zip(leaves_of(run(x, along)), right, strict=True)
        )
        for name, run in found.items()
    }


def time_step(setting: Setting, step: Step) -> dict[str, Any]:
    """Median milliseconds of a call, and MiB at its peak beside its inputs."""
    attend = setting.flexible() if step.by == "flexhop" else setting.math()
    run = torch.compile(DERIVATIVES[step.derivative](attend), dynamic=False)
    x, along = setting.inputs(), setting.inputs()
    for _ in range(3):
        run(x, along)
    if setting.device == "cuda":
        torch.cuda.empty_cache()  # others measure beside it
    wait_for_turn()
    mebibytes = None
    if setting.device == "cuda":
        run(x, along)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run(x, along)
        torch.cuda.synchronize()
        mebibytes = (torch.cuda.max_memory_allocated() - before) / 2**20
    stopwatch = Stopwatch(torch.device(setting.device))
    milliseconds = stopwatch.round(lambda: None, lambda: run(x, along), REPEATS)
    return {"ms": milliseconds, "mib": mebibytes}


def eager_call(name: str, device: str, *, has_grad: bool) -> Callable[[], Any]:
    """A call so small that it ends before the next one begins."""
    shape = (1, 1, 16, 16)
    made = [torch.randn(shape, dtype=DTYPES[device], device=device) for _ in range(3)]
    q, k, v = (t.requires_grad_(has_grad) for t in made)
    slopes = torch.randn(1, device=device, requires_grad=has_grad)
    mask = None if name == "plain" else create_block_mask(causal, None, None, 16, 16, device)
    if name != "slopes":
        return lambda: flex_attention(q, k, v, block_mask=mask)
    return lambda: flex_attention(q, k, v, alibi(slopes), mask)


def host_time(call: Callable[[], Any], device: str) -> float:
    """Median microseconds until a call returns; on a GPU, before its kernels end."""
    times: list[float] = []
    for number in range(HOST_CALLS):
        if number % 20 == 0:
            synchronize(device)  # a full queue would let the host wait
        start = time.perf_counter_ns()
        call()
        times.append(1e-3 * (time.perf_counter_ns() - start))
    return statistics.median(times)


def compiled_code(call: Callable[[], Any]) -> Callable[[], Any]:
    """What an eager call compiled, called with the same tensors."""
    forget()  # a repeated call does not ask for its code
    ran: list[Any] = []
    original = Alone.__call__

    def note(alone: Alone, leaves: Any) -> Any:
        ran.append((alone, leaves))
        return original(alone, leaves)

    with mock.patch.object(Alone, "__call__", note):
        call()
    ((alone, leaves),) = ran
    return alone.code_for([t.detach() for t in leaves])


def host_times(name: str, device: str) -> dict[str, Any]:
    """Microseconds of the host per eager call, whole, in the compiled code, and above it."""
    found: dict[str, Any] = {}
    with flexhop.eager_kernels():
        calls = {
            kind: eager_call(name, device, has_grad=kind == "grad") for kind in ("no grad", "grad")
        }
        for call in calls.values():
            for _ in range(50):
                call()
        wait_for_turn()
        for kind, call in calls.items():
            whole, code = (host_time(run, device) for run in (call, compiled_code(call)))
            found |= {f"whole, {kind}": whole, f"code, {kind}": code, kind: whole - code}
    return found


def main(device: str, *names: str) -> None:
    """Measure a step, and hand the numbers over."""
    step = Step(*names)
    machine = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    torch.manual_seed(0)
    if step.derivative == "host":
        answer(host_times(step.problem, device) | {"machine": machine})
        return
    problem = PROBLEMS[step.problem]
    with in_chunks() if problem.in_chunks else contextlib.nullcontext():
        answer(measure(problem, step, device) | {"machine": machine})


def measure(problem: Problem, step: Step, device: str) -> dict[str, Any]:
    """Errors, milliseconds and MiB of a step."""
    problem = problem if device == "cuda" else problem.shrunk()
    found: dict[str, Any] = {}
    if step.by == "flexhop":
        small = dataclasses.replace(problem, tokens=min(problem.tokens, CHECKED))
        found |= errors(Setting(small, device), step.derivative)
    return found | time_step(Setting(problem, device), step)


if __name__ == "__main__":
    main(*sys.argv[1:])
