"""``python -m benchmarks.decoding``: short queries over many keys, in microseconds and GB/s.

Every implementation is compared with float64 first. Then CUDA graphs of many calls are replayed,
implementations in turn; the calls of a graph go through copies of keys and values that together
exceed the L2 cache. GB/s count the keys and values that queries see, once. Each step has a process
of its own; with ``--at-once N``, that many are prepared side by side, and measured in turn.
"""

import argparse
import functools
import json
import os
import re
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn import attention as sdpa
from torch.nn.attention import flex_attention as intree

import flexhop
from benchmarks import caches
from benchmarks.correctness import rounding_error
from benchmarks.decoding_cases import STEPS, Step, make_mask, make_mask_mod, make_score_mod
from benchmarks.report import decoding_table
from benchmarks.timing import in_rounds, medians
from benchmarks.turns import answer, in_turn, wait_for_turn

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
NAMES = ("flexhop", "in-tree", "cudnn", "flash", "contiguous")
CACHE_BYTES = 200 << 20  # four times an H200's L2
CALLS = 12  # of a graph, at least
ROUNDS = 5


def build(name: str, step: Step, device: torch.device) -> Attention | None:
    """An implementation, or None where it cannot do the step."""
    if step.is_cached and name != "contiguous":
        return caches.build(step, device) if name == "flexhop" else None
    if name == "contiguous":
        return (
            build("flexhop", replace(step, page=0, stored=""), device) if step.is_cached else None
        )
    if name in ("flexhop", "in-tree"):
        module: Any = flexhop if name == "flexhop" else intree
        score_mod = make_score_mod(step, device)
        block_mask = make_mask(module, step, device)
        compiled = torch.compile(module.flex_attention, fullgraph=True)
        return lambda q, k, v: compiled(q, k, v, score_mod, block_mask, enable_gqa=True)
    if not step.is_dense:
        return None
    backends = sdpa.SDPBackend
    backend = backends.CUDNN_ATTENTION if name == "cudnn" else backends.FLASH_ATTENTION

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        with sdpa.sdpa_kernel(backend):
            return torch.nn.functional.scaled_dot_product_attention(
                query, key, value, enable_gqa=True
            )

    return attend


def make_tensors(step: Step, device: torch.device) -> list[Tensors]:
    """Random query, key and value, in as many copies as the cache cannot hold."""
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    query = (step.batch, step.q_heads, step.queries, step.head_dim)
    key = (step.batch, step.kv_heads, step.keys, step.head_dim)
    size = step.columns * dtype.itemsize * step.batch * step.kv_heads * step.keys
    copies = -(-CACHE_BYTES // size) if device.type == "cuda" else 1

    def draw() -> Tensors:
        first, second, third = (
            torch.randn(shape, device=device, dtype=dtype) for shape in (query, key, key)
        )
        if step.latent:
            return first, second, second[..., : step.latent]
        return first, caches.rounded(step, second), caches.rounded(step, third)

    return [draw() for _ in range(copies)]


def scores_of(step: Step, tensors: Tensors) -> torch.Tensor:
    """The scores of the last batch and key head in float64, masked ones -inf: [G, M, N]."""
    query, key, _ = tensors
    device, group = query.device, step.q_heads // step.kv_heads
    h = torch.arange(step.q_heads - group, step.q_heads, device=device)[:, None, None]
    q_idx = torch.arange(step.queries, device=device)[None, :, None]
    kv_idx = torch.arange(step.keys, device=device)[None, None, :]
    scores = query[-1, -group:].double() @ key[-1, -1].double().T / step.head_dim**0.5
    score_mod, mask_mod = make_score_mod(step, device), make_mask_mod(step, device)
    if score_mod is not None:
        scores = score_mod(scores, step.batch - 1, h, q_idx, kv_idx)
    if mask_mod is not None:
        scores = scores.masked_fill(~mask_mod(step.batch - 1, h, q_idx, kv_idx), -torch.inf)
    return scores


def seen_bytes(step: Step, tensors: Tensors, scores: torch.Tensor) -> int:
    """Bytes of the keys and values that any query sees; as many for each batch and key head."""
    keys = int((scores > -torch.inf).any(0).any(0).sum())
    size = 1 if step.stored else tensors[1].element_size()
    return step.columns * size * step.batch * step.kv_heads * keys


def largest_error(exact: torch.Tensor, found: torch.Tensor) -> float:
    """Against the exact [G, M, D] of the last batch and key head; a NaN is infinitely wrong."""
    part = found[-1, -exact.size(0) :].double()
    return float((part - exact).abs().nan_to_num(nan=torch.inf).max())


def budget(errors: dict[str, float], exact: torch.Tensor, dtype: torch.dtype) -> float:
    """Twice in-tree's error plus a rounding; eight roundings stand in for an absent in-tree."""
    rounding = rounding_error(exact, dtype)
    return 2 * errors.get("in-tree", 8 * rounding) + rounding


class Run(NamedTuple):
    """What is timed: some calls, and how many; on a GPU, the replay of a graph.

    attention: kept, for a graph does not keep what it reads.
    """

    start: Callable[[], None]
    calls: int
    attention: Attention


def capture(attention: Attention, copies: list[Tensors]) -> Run:
    """The calls that are timed, through all copies in turn; they were made once."""
    calls = -(-CALLS // len(copies)) * len(copies)

    def run() -> None:
        for call in range(calls):
            attention(*copies[call % len(copies)])

    if copies[0][0].device.type != "cuda":
        run()
        return Run(run, calls, attention)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        attention(*copies[0])
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    graph.replay()
    torch.cuda.synchronize()
    return Run(graph.replay, calls, attention)


def microseconds(run: Run, on_gpu: bool) -> float:
    """Of one call, by CUDA events or the wall clock."""
    if not on_gpu:
        start = time.perf_counter()
        run.start()
        return 1e6 * (time.perf_counter() - start) / run.calls
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    before.record()
    run.start()
    after.record()
    torch.cuda.synchronize()
    return 1e3 * before.elapsed_time(after) / run.calls


def measure(step: Step, names: tuple[str, ...], device: torch.device) -> dict[str, Any]:
    """Check the implementations of one step, and when it is its turn, time them."""
    torch.compiler.reset()
    copies = make_tensors(step, device)
    scores = scores_of(step, copies[0])
    exact = torch.softmax(scores, -1) @ copies[0][2][-1, -1].double()
    errors: dict[str, float] = {}
    failed: dict[str, str] = {}
    runs: dict[str, Run] = {}
    for name in names:
        try:
            attention = build(name, step, device)
            if attention is not None:
                for copy in copies if step.is_cached else ():
                    attention(*copy)  # puts its keys into a cache
                errors[name] = largest_error(exact, attention(*copies[0]))
                runs[name] = capture(attention, copies)
        except Exception as error:  # a peer that cannot must not end the others' measurement
            failed[name] = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            runs.pop(name, None)
    allowed = budget(errors, exact, copies[0][0].dtype)
    if errors.get("flexhop", 0.0) > allowed:
        failed["flexhop"] = f"wrong: error {errors['flexhop']:.3g} > budget {allowed:.3g}"
        runs.pop("flexhop", None)
    size = seen_bytes(step, copies[0], scores)
    wait_for_turn()
    return asdict(step) | {
        "shape": step.shape,
        "bytes": size,
        "microseconds": time_in_turn(runs, device.type == "cuda"),
        "errors": errors,
        "failed": failed,
    }


def time_in_turn(runs: dict[str, Run], on_gpu: bool) -> dict[str, float]:
    """Median microseconds of a call over interleaved rounds."""
    measures = {name: functools.partial(microseconds, run, on_gpu) for name, run in runs.items()}
    return medians(in_rounds(measures, ROUNDS))


def in_processes(
    steps: list[Step], names: tuple[str, ...], device: str, at_once: int
) -> list[dict[str, Any]]:
    """Results of all steps, each from a process of its own.

    Where one dies, say by a wrong address, the next is for flexhop alone, so that the report
    tells whose fault it was.
    """
    results = in_turn([_command(step, names, device) for step in steps], at_once)
    for position, step in enumerate(steps):
        if isinstance(results[position], str):
            print(f"{step.name}: {results[position]}; flexhop alone is next", file=sys.stderr)
            (results[position],) = in_turn([_command(step, names[:1], device)], 1)
    return [
        result if isinstance(result, dict) else _dead(step, result)
        for step, result in zip(steps, results, strict=True)
    ]


def _command(step: Step, names: tuple[str, ...], device: str) -> list[str]:
    options = ["--worker", "--device", device, "--steps", f"^{step.name}$"]
    return ["benchmarks.decoding", *options, "--peers", *names[1:]]


def _dead(step: Step, words: str) -> dict[str, Any]:
    shown = asdict(step) | {"shape": step.shape, "bytes": 0, "microseconds": {}}
    return shown | {"errors": {}, "failed": {"flexhop": words}}


def main(arguments: list[str]) -> int:
    """Measure, print the table; fails if flexhop failed or was wrong anywhere."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.decoding", description=__doc__)
    parser.add_argument("--steps", default="", metavar="REGEX", help="only matching names")
    parser.add_argument("--peers", nargs="*", choices=NAMES[1:], default=list(NAMES[1:]))
    parser.add_argument("--json", type=Path, metavar="PATH", help="write all numbers here")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--at-once", type=int, default=1, metavar="N", help="steps that are prepared side by side"
    )
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    device, names = torch.device(options.device), ("flexhop", *options.peers)
    chosen = [step for step in STEPS if re.search(options.steps, step.name)]
    if device.type == "cpu":
        chosen = [step.shrunk() for step in chosen]
    if options.worker:
        with torch.no_grad():
            for step in chosen:
                answer(measure(step, names, device))
        return 0
    on_gpu = device.type == "cuda"
    name = torch.cuda.get_device_name() if on_gpu else "CPU, tiny shapes: not a measurement"
    print(f"{name}; torch {torch.__version__}; {'bfloat16' if on_gpu else 'float32'}.", flush=True)
    results = in_processes(chosen, names, options.device, options.at_once)
    print(decoding_table(results, names))
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + os.linesep)
    return int(any("flexhop" in result["failed"] for result in results))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
