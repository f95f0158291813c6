"""``python -m benchmarks.drawn``: random mods and masks beside in-tree, at sizes of training.

Masks and score_mods come from the vocabulary of the random problems (tests/fuzz), so nobody chose
them because they are fast. A number gives the same problem everywhere. Processes compile side by
side, and one at a time measures, while others compare results. So what looks slow is measured
again when all are done, with the device to itself. Rows are sorted by the smaller ratio.

``--sizes`` short: up to 512 tokens. decode: one query behind all keys, forward alone.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import fcntl
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch.nn.attention import flex_attention as intree

import flexhop
from benchmarks.report import cell, geometric_mean, row
from benchmarks.timing import Stopwatch, fastest, interleaved
from benchmarks.turns import last_words
from tests.case_inputs import Random, Shape
from tests.fuzz import compared, later, rarer
from tests.fuzz.functions import chain_scores, combine_masks
from tests.fuzz.masks import BY_BATCH, BY_HEAD, MASKS
from tests.fuzz.scores import HIDING, IGNORING, SCORES

LENGTHS = {
    "training": (1000, 1024, 2048, 2048, 3000, 4096),
    "short": (64, 128, 197, 256, 256, 512),
    "decode": (3000, 4096, 8192),
}
WIDTHS = (64, 64, 64, 128, 128, 128, 128, 32, 80, 96, 256)
MOST_BATCHES = {"training": 64, "short": 512}
DECODED_BATCHES = (4, 16, 32)
ROUNDS = 5
WORK = 3e11  # operations of a dense forward pass, about half a millisecond on an H200
LIBRARIES: dict[str, ModuleType] = {"flexhop": flexhop, "in-tree": intree}
PORTABLE = "portable"  # flexhop without its Hopper kernels
DIRECTIONS = ("fwd", "bwd")
# The smallest numbers of problems that may have these.
NEWER = {710_000: later, 760_000: rarer, 790_000: compared}
STARTED, DONE = "started ", "done "
SLOW = 1.05  # times as fast as another's pass: whatever is below is measured again
AGAIN = 150.0  # seconds for that, after the problems


@dataclasses.dataclass(frozen=True)
class Drawn:
    """One problem. learned: names of captured tensors whose gradients are timed as well."""

    number: int
    shape: Shape
    dtype: torch.dtype
    masks: tuple[str, ...]
    how: str
    scores: tuple[str, ...]
    learned: tuple[str, ...]

    @property
    def words(self) -> str:
        """The problem in a cell of a table."""
        s = self.shape
        sizes = f"({s.batch},{s.heads},{s.kv_heads},{s.kv_len},{s.head_dim})"
        mods = [f" {self.how} ".join(self.masks), " then ".join(self.scores)]
        learned = f"learned {' '.join(self.learned)}" if self.learned else ""
        parts = [sizes, str(self.dtype).removeprefix("torch."), *mods, learned]
        return "; ".join(part for part in parts if part)


def draw(number: int, shrunk: int = 1, sizes: str = "training") -> Drawn:
    """The problem of a number; on a CPU its lengths are divided."""
    r = random.Random(f"speed {number}" if sizes == "training" else f"{sizes} {number}")
    # Problems keep their numbers.
    unknown = [newer for first, newer in NEWER.items() if number < first]
    masks = sorted({*MASKS}.difference(*(newer.MASKS for newer in unknown)))
    names = sorted({*SCORES}.difference(*(newer.SCORES for newer in unknown)))
    mask_names = tuple(r.sample(masks, r.choice([0, 1, 1, 1, 2])))
    names = r.sample(names, r.choice([0, 1, 1, 1, 2] if mask_names else [1, 1, 2]))
    ignoring = [name for name in names if name in IGNORING][:1]
    names = [name for name in names if name not in IGNORING]
    scores = (*ignoring, *sorted(names, key=lambda name: name in HIDING))
    named = tuple(name for score in scores for name in SCORES[score].learned)
    return Drawn(
        number, _shape(r, shrunk, sizes), r.choice([torch.bfloat16] * 3 + [torch.float16]),
        mask_names, r.choice(["and", "or"]), scores, named if r.random() < 0.6 else (),
    )  # fmt: skip


def _shape(r: random.Random, shrunk: int, sizes: str) -> Shape:
    length, width = r.choice(LENGTHS[sizes]), r.choice(WIDTHS)
    heads, group = r.choice([8, 12, 16]), r.choice([1, 1, 1, 4])
    if sizes == "decode":
        batch = r.choice(DECODED_BATCHES)
    else:
        fitting = round(WORK / (4 * heads * length**2 * width))
        batch = max(1, min(MOST_BATCHES[sizes], fitting))
    if shrunk > 1:
        length, heads, batch = max(16, length // shrunk), group * 2, 2
    queries = 1 if sizes == "decode" else length
    return Shape(batch, heads, heads // group, queries, length, width, width)


class Call:
    """A compiled call of one library on shared tensors."""

    def __init__(self, drawn: Drawn, library: str, tensors: Any, device: str) -> None:
        """Make the mask; nothing compiles before the first call."""
        self.leaves, self.grad_out, captures = tensors
        module = LIBRARIES.get(library, flexhop)
        s, mask = drawn.shape, None
        first = s.kv_len - s.q_len
        if drawn.masks:
            square = combine_masks([MASKS[name] for name in drawn.masks], drawn.how)(captures)
            behind = lambda b, h, q, k: square(b, h, q + first, k)  # noqa: E731
            mod = behind if first else square
            batch = s.batch if BY_BATCH & {*drawn.masks} else None
            heads = s.heads if BY_HEAD & {*drawn.masks} else None
            mask = module.create_block_mask(mod, batch, heads, s.q_len, s.kv_len, device)
        scores = [SCORES[name] for name in drawn.scores]
        score = chain_scores(scores)(captures) if scores else None
        later = lambda s, b, h, q, k: score(s, b, h, q + first, k)  # noqa: E731
        self.keywords = {
            "score_mod": later if score and first else score,
            "block_mask": mask, "enable_gqa": s.heads != s.kv_heads,
        }  # fmt: skip
        if library == PORTABLE:
            self.keywords["kernel_options"] = flexhop.KernelOptions(backend="triton")
        self.compiled = torch.compile(module.flex_attention, fullgraph=True)
        self.out: torch.Tensor | None = None

    def forward(self) -> None:
        """Keep the output, for the backward pass."""
        self.out = self.compiled(*self.leaves[:3], **self.keywords)

    def forward_alone(self) -> None:
        """Without gradients, as forward is timed."""
        with torch.no_grad():
            self.compiled(*self.leaves[:3], **self.keywords)

    def backward(self) -> tuple[torch.Tensor | None, ...]:
        """Gradients of all leaves."""
        assert self.out is not None
        return torch.autograd.grad(self.out, self.leaves, self.grad_out, allow_unused=True)

    def backward_alone(self) -> None:
        """As it is timed; `forward` goes before."""
        self.backward()

    def results(self) -> list[torch.Tensor]:
        """Output and gradients of one call."""
        self.forward()
        assert self.out is not None
        found = [self.out.detach()]
        if self.out.requires_grad:
            found += [grad for grad in self.backward() if grad is not None]
            self.forward_alone()
        return found


def make_tensors(drawn: Drawn, device: str) -> Any:
    """Leaves (query, key, value, what is learned), the output's gradient, captured values."""
    r, s = Random(drawn.number), drawn.shape
    square = dataclasses.replace(s, q_len=s.kv_len)  # what mods read
    entries = [*(MASKS[name] for name in drawn.masks), *(SCORES[name] for name in drawn.scores)]
    values = {k: v for entry in entries for k, v in entry.captures(square, r).items()}
    values = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in values.items()}
    torch.manual_seed(drawn.number)
    made = [torch.randn(size, dtype=drawn.dtype, device=device) for size in (s.query, s.key)]
    made += [torch.randn(s.value, dtype=drawn.dtype, device=device)]
    leaves = [*made, *(values[name] for name in drawn.learned)]
    for leaf in leaves:
        # In-tree has no gradients on a CPU, and a decoded query has none.
        leaf.requires_grad_(device == "cuda" and s.q_len > 1)
    return leaves, torch.randn_like(made[0]), SimpleNamespace(**values, shape=square)


def _difference(own: list[torch.Tensor], other: list[torch.Tensor]) -> float:
    """The largest distance of results, each relative to the other's norm."""
    found = 0.0
    for mine, theirs in zip(own, other, strict=True):
        difference = (mine.double() - theirs.double()).norm()
        found = max(found, float(difference / theirs.double().norm().clamp(min=1e-12)))
    return found


@contextlib.contextmanager
def _locked(path: str, how: int = fcntl.LOCK_EX) -> Generator[None, None, None]:
    """One process at a time; or with LOCK_SH several, while none has it alone."""
    with open(path, "w") as file:
        fcntl.flock(file, how)
        yield


def measure(drawn: Drawn, device: str, lock: str, *, portable: bool = False) -> dict[str, Any]:
    """Compile both libraries' calls, compare results and time them."""
    tensors = make_tensors(drawn, device)
    calls, results, failed = {}, {}, {}
    for name in (*LIBRARIES, PORTABLE) if portable else LIBRARIES:
        try:
            call = Call(drawn, name, tensors, device)
            results[name] = call.results()
            calls[name] = call
        except Exception as error:  # whatever a library says of a call that it does not take
            failed[name] = f"{type(error).__name__}: {str(error).strip()[:200]!r}"
    found: dict[str, Any] = {"words": drawn.words, "failed": failed, "milliseconds": {}}
    if not LIBRARIES.keys() - results.keys():
        found["difference"] = _difference(*(results[name] for name in LIBRARIES))
    results.clear()
    with _locked(lock):
        stopwatch = Stopwatch(torch.device(device))
        steps = {name: (lambda: None, call.forward_alone) for name, call in calls.items()}
        found["milliseconds"]["fwd"] = fastest(interleaved(stopwatch, steps, ROUNDS))
        if tensors[0][0].requires_grad:
            steps = {name: (call.forward, call.backward_alone) for name, call in calls.items()}
            found["milliseconds"]["bwd"] = fastest(interleaved(stopwatch, steps, ROUNDS))
    return found


def work(args: argparse.Namespace) -> None:
    """One of several processes: its share of the problems, a line of JSON for each.

    Those that look slow get a second line, measured when no other process uses the device.
    """
    numbers = args.only or range(args.seed, args.seed + 10**6)
    again = []
    quiet = f"{args.lock}.quiet"
    with _locked(quiet, fcntl.LOCK_SH):
        for place, number in enumerate(numbers):
            if time.time() > args.until:
                break
            if place % args.procs != args.part:
                continue
            print(f"{STARTED}{number}", flush=True)
            if looks_slow(_report(number, args)):
                again.append(number)
    for number in again:
        with _locked(quiet):
            if time.time() > args.until + AGAIN:
                return
            _report(number, args)


def _report(number: int, args: argparse.Namespace) -> dict[str, Any]:
    """Measure a problem and print its line."""
    drawn = draw(number, 1 if args.device == "cuda" else 16, args.sizes)
    found = measure(drawn, args.device, args.lock, portable=args.portable)
    print(DONE + json.dumps(found | {"number": number}), flush=True)
    torch.compiler.reset()
    if args.device == "cuda":
        torch.cuda.empty_cache()
    return found


def looks_slow(found: dict[str, Any]) -> bool:
    """Whether another's pass is about as fast as flexhop's, or faster."""
    ratios = [ratio(found, way, to) for way in DIRECTIONS for to in ("in-tree", PORTABLE)]
    return any(one is not None and one < SLOW for one in ratios)


def spread(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Results of all processes; problems in which one died are named."""
    with tempfile.NamedTemporaryFile() as lock:
        command = [sys.executable, "-m", "benchmarks.drawn", *sys.argv[1:]]
        command += ["--lock", lock.name, "--until", str(args.until), "--seed", str(args.seed)]
        logs = [tempfile.TemporaryFile("w+") for _ in range(args.procs)]
        workers = [
            subprocess.Popen([*command, "--part", str(part)], stdout=log, stderr=log)
            for part, log in enumerate(logs)
        ]
        late = args.until + 45 + AGAIN  # for what has begun, and for what is measured again
        for worker in workers:
            # What was measured before an interrupt is reported.
            with contextlib.suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
                worker.wait(max(1.0, late - time.time()))
            worker.kill()
    found: dict[int, dict[str, Any]] = {}
    for worker, log in zip(workers, logs, strict=True):
        log.seek(0)
        text = log.read()
        lines = text.splitlines()
        done = [json.loads(line[len(DONE) :]) for line in lines if line.startswith(DONE)]
        found |= {one["number"]: one for one in done}
        begun = [line for line in lines if line.startswith(STARTED)]
        if worker.returncode and begun:
            print(f"a process ended in {begun[-1]}: {last_words(text)}")
    return list(found.values())


def ratio(result: dict[str, Any], direction: str, to: str = "in-tree") -> float | None:
    """How many times as fast as in-tree, or as the portable kernels."""
    times = result["milliseconds"].get(direction, {})
    return times[to] / times["flexhop"] if {to, "flexhop"} <= times.keys() else None


def choices(results: list[dict[str, Any]]) -> list[str]:
    """Lines of Markdown: passes whose kernels are not the faster ones of flexhop."""
    lines = [row(["number", "problem", "", "ms", "portable"]), row(["---"] * 3 + ["---:"] * 2)]
    passes = [(one, way) for one in results for way in DIRECTIONS if ratio(one, way, PORTABLE)]
    for one, way in sorted(passes, key=lambda p: ratio(*p, PORTABLE) or 1.0):
        times = one["milliseconds"][way]
        if times[PORTABLE] < times["flexhop"] / 1.05:
            cells = [cell(times["flexhop"], 3), cell(times[PORTABLE], 3)]
            lines.append(row([str(one["number"]), one["words"], way, *cells]))
    return lines


def table(results: list[dict[str, Any]]) -> list[str]:
    """Lines of Markdown, the slowest first, then means and what failed."""
    timed = [result for result in results if ratio(result, "fwd") is not None]
    timed.sort(key=lambda result: min(ratio(result, way) or 9.0 for way in DIRECTIONS))
    lines = [row(["number", "problem", "fwd ms", "x in-tree", "bwd ms", "x", "difference"])]
    lines.append(row(["---"] * 2 + ["---:"] * 5))
    for result in timed:
        cells = [str(result["number"]), result["words"]]
        for way in DIRECTIONS:
            own = result["milliseconds"].get(way, {}).get("flexhop")
            cells += [cell(own, 3), cell(ratio(result, way), 2)]
        lines.append(row([*cells, f"{result['difference']:.0e}"]))
    for way in DIRECTIONS:
        ratios = [ratio(result, way) for result in timed]
        below = sum(1 for one in ratios if one is not None and one < 1)
        mean = cell(geometric_mean(ratios), 2)
        lines.append(f"{way}: {len(timed)} problems, mean {mean}x, {below} below in-tree")
    for result in results:
        for name, error in result["failed"].items():
            lines.append(f"{name} failed: {result['number']} {result['words']}: {error}")
    return lines


def main() -> None:
    """Measure, print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.drawn", description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--seed", type=int, help="the first problem")
    parser.add_argument("--only", type=int, nargs="+", help="these problems")
    parser.add_argument("--sizes", choices=LENGTHS, default="training")
    parser.add_argument("--procs", type=int, default=12, help="processes side by side")
    parser.add_argument("--portable", action="store_true", help="flexhop's portable kernels, too")
    parser.add_argument("--json", type=Path, help="a file for all numbers")
    for name, kind in (("--part", int), ("--until", float), ("--lock", str)):
        parser.add_argument(name, type=kind, help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.until = args.until or time.time() + 60 * args.minutes
    args.seed = random.SystemRandom().randrange(2 * 10**9) if args.seed is None else args.seed
    if args.part is not None:
        work(args)
        return
    print(f"from {args.seed} on", flush=True)
    results = spread(args)
    if args.json:
        args.json.write_text(json.dumps(results))
    print("\n".join(table(results)))
    if args.portable:
        print("\n".join(choices(results)))


if __name__ == "__main__":
    main()
