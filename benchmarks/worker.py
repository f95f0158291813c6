"""One case in one process: compile on "compile", check and time on "time", as the parent says.

The parent (``benchmarks/runner.py``) lets several workers compile at once and only one of them
time. A worker keeps its compiled functions in between but no tensors. It answers each request
with one line of JSON that starts with ``ANSWER``.
"""

import gc
import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from benchmarks import area, correctness
from benchmarks.cases import SUITES, Case, make_mask_mod
from benchmarks.implementations import Attention, build
from benchmarks.timing import Step, Stopwatch, interleaved

ANSWER = "ANSWER "
Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


class Worker:
    """The state of one case between the parent's requests."""

    def __init__(self, request: dict[str, Any]) -> None:
        """Read the case and the settings; nothing touches the device yet."""
        every = (case for suite in SUITES.values() for case in suite)
        case = next(case for case in every if case.name == request["case"])
        self.device = torch.device(request["device"])
        self.case = case if self.device.type == "cuda" else case.shrunk()
        self.dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        self.directions: list[str] = request["directions"]
        self.rounds: int = request["rounds"]
        self.names: list[str] = request["names"]
        self.attentions: dict[str, Attention] = {}
        self.failed: dict[str, str] = {}

    def tensors(self, case: Case) -> Tensors:
        """Fresh random query, key, value (leaves) and grad_out."""
        torch.manual_seed(0)
        q_shape = (case.batch, case.q_heads, case.length)
        kv_shape = (case.batch, case.kv_heads, case.length)
        needs = "bwd" in self.directions
        query, key, value, grad_out = (
            torch.randn(shape, device=self.device, dtype=self.dtype)
            for shape in (
                (*q_shape, case.head_dim),
                (*kv_shape, case.head_dim),
                (*kv_shape, case.v_dim),
                (*q_shape, case.v_dim),
            )
        )
        leaves = [tensor.requires_grad_(needs) for tensor in (query, key, value)]
        return leaves[0], leaves[1], leaves[2], grad_out

    def run_once(self, attention: Attention, tensors: Tensors) -> dict[str, torch.Tensor]:
        """The output of one call, with gradients where backward is measured."""
        *leaves, grad_out = tensors
        out = attention(*leaves)
        results = {"out": out}
        if "bwd" in self.directions:
            grads = torch.autograd.grad(out, [*leaves, *learned_by(attention)], grad_out)
            results |= dict(zip(("dq", "dk", "dv"), grads, strict=False))
        self.synchronize()
        return results

    def synchronize(self) -> None:
        """Wait for the GPU, if there is one."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def attempt(self, name: str, action: Callable[[], Any]) -> Any:
        """Run an action for one implementation; a failure is recorded and drops it."""
        try:
            return action()
        except Exception as error:
            self.failed[name] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            self.attentions.pop(name, None)
            return None

    def compile(self) -> dict[str, Any]:
        """First calls, cold: seconds of forward plus backward for every implementation."""
        small = replace(self.case.shrunk(), length=128, head_dim=16)
        first: dict[str, float] = {}
        for name in self.names:
            # A small problem first, so that what is timed is this kernel, not importing Inductor.
            self.attempt(name, lambda name=name: self.first_call(name, small))
        self.failed.clear()
        torch.compiler.reset()
        for name in self.names:
            seconds = self.attempt(name, lambda name=name: self.first_call(name, self.case))
            if seconds is not None:
                first[name] = seconds
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        return {"first_call": first, "failed": self.failed}

    def first_call(self, name: str, case: Case) -> float | None:
        """Seconds of the first call; the attention stays for timing when it is the real case."""
        attention = build(name, case, self.device)
        if attention is None:
            return None
        tensors = self.tensors(case)
        start = time.perf_counter()
        self.run_once(attention, tensors)
        seconds = time.perf_counter() - start
        if case is self.case:
            with torch.no_grad():  # forward is timed without gradients: another graph, not counted
                attention(*tensors[:3])
            self.attentions[name] = attention
        return seconds

    def check(self, tensors: Tensors) -> dict[str, Any]:
        """Errors of every implementation; one that is wrong is dropped and never timed."""
        with_grads = "bwd" in self.directions
        exact = correctness.reference(self.case, tensors, with_grads)
        rounding = {n: correctness.rounding_error(t, self.dtype) for n, t in exact.items()}
        errors: dict[str, dict[str, float]] = {}
        for name in list(self.attentions):
            found = self.attempt(
                name, lambda name=name: self.run_once(self.attentions[name], tensors)
            )
            if found is not None:
                cut = correctness.cut(self.case, found)
                errors[name] = correctness.largest_errors(exact, cut)
        for name in set(errors) & {"flexhop", "portable"}:
            peer = errors.get("in-tree") or self.plain_errors(tensors, exact)
            if missed := correctness.misses(self.case, errors[name], peer, rounding):
                self.failed[name] = "wrong: " + "; ".join(missed)
                self.attentions.pop(name)
        return errors

    def plain_errors(self, tensors: Tensors, exact: dict[str, torch.Tensor]) -> dict[str, float]:
        """Errors of the definition itself in the working precision."""
        with_grads = "bwd" in self.directions
        plain = correctness.reference(self.case, tensors, with_grads, self.dtype)
        return correctness.largest_errors(exact, plain)

    def steps(self, direction: str, attention: Attention, tensors: Tensors) -> tuple[Step, Step]:
        """What is not counted and what is, for one call in one direction."""
        *leaves, grad_out = tensors
        wanted = [*leaves, *learned_by(attention)]
        outs: list[torch.Tensor] = []

        def forward() -> None:
            outs[:] = [attention(*leaves)]

        def forward_only() -> None:
            with torch.no_grad():
                attention(*leaves)

        def backward() -> None:
            torch.autograd.grad(outs.pop(), wanted, grad_out)

        return (forward, backward) if direction == "bwd" else (lambda: None, forward_only)

    def time(self) -> dict[str, Any]:
        """Check, then time every implementation that is right."""
        tensors = self.tensors(self.case)
        errors = self.check(tensors)
        stopwatch = Stopwatch(self.device)
        milliseconds: dict[str, dict[str, list[float]]] = {}
        for direction in self.directions:
            steps = {
                name: self.steps(direction, attention, tensors)
                for name, attention in self.attentions.items()
            }
            milliseconds[direction] = interleaved(stopwatch, steps, self.rounds)
        mask_mod = make_mask_mod(self.case, self.device)
        unmasked = area.unmasked_area(self.case, mask_mod, self.device)
        return {
            "milliseconds": milliseconds,
            "errors": errors,
            "failed": self.failed,
            "area": unmasked,
            "head_dim": self.case.head_dim,
            "value_dim": self.case.v_dim,
            "shape": self.case.shape,
        }


def learned_by(attention: Attention) -> tuple[torch.Tensor, ...]:
    """What the score_mod of an implementation learns."""
    return getattr(attention, "learned", ())


def answer(content: dict[str, Any]) -> None:
    """Send one reply to the parent."""
    print(ANSWER + json.dumps(content), flush=True)


def main() -> None:
    """Serve requests from standard input until it ends."""
    worker = Worker(json.loads(sys.argv[1]))
    answer({"ready": True})
    for line in sys.stdin:
        answer(worker.compile() if line.strip() == "compile" else worker.time())


if __name__ == "__main__":
    main()
