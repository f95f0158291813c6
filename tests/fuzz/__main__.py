"""Random problems for as long as wanted: `scripts/fuzz --help`."""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import contextlib
import dataclasses
import itertools
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Iterator

import torch

from flexhop.errors import FlexhopError, KernelFallbackWarning
from flexhop.offline.emulate import Emulator, Schedule, When
from tests.fuzz.checks import check_results, compile_offline
from tests.fuzz.draw import SEEDS, draw, for_hopper
from tests.fuzz.plan import Plan, simpler
from tests.fuzz.settings import compile_quickly
from tests.problems import few_multiprocessors

BACKENDS = {
    "eager": "eager", "traced": "aot_eager", "compiled": "inductor", "interpreted": "interpreter",
    "emulated": "interpreter",
}  # fmt: skip
MODES = (*BACKENDS, "offline")
WHEN: tuple[When, ...] = ("random", "late", "early")  # of what is asynchronous in an emulator
# Lines that one of several processes prints for the first: a problem, and what came of it.
STARTED, DONE = "started ", "done "
BROKEN = 3  # exit status of a process whose GPU answers no more: another one goes on
Found = collections.defaultdict[str, list[int]]  # numbers of problems, by what came of them


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/fuzz", description=__doc__)
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument(
        "--mode", choices=MODES,
        help="eager; traced (aot_eager); compiled (inductor), the default on cuda; interpreted: "
        "portable kernels on a CPU; emulated: the machine code of --arch, with Hopper kernels on "
        "90; offline: generate kernels and compile them for --arch",
    )  # fmt: skip
    parser.add_argument("--minutes", type=float, default=2.0)
    parser.add_argument("--count", type=int, default=0, help="at most so many problems")
    parser.add_argument("--seed", type=int, help="the first problem; FLEXHOP_FUZZ_SEED likewise")
    parser.add_argument("--first", type=int, nargs="+", default=[], help="problems before these")
    parser.add_argument("--only", type=int, help="one problem, with its traceback")
    parser.add_argument("--shrink", type=int, help="one problem, and the smallest like it")
    parser.add_argument(
        "--level", choices=("text", "llvm", "cubin"), default="cubin",
        help="offline: generate texts only; compile as far as Triton goes; machine code",
    )  # fmt: skip
    parser.add_argument("--arch", type=int, nargs="+", default=[90], help="such as 80 90 100 120")
    parser.add_argument(
        "--small", action="store_true",
        help="on cuda: sizes as on a CPU, every second problem for Hopper kernels; for tools that "
        "slow a GPU down",
    )  # fmt: skip
    parser.add_argument("--procs", type=int, default=1, help="processes side by side")
    # Of one of several processes: its share; how many of it are done; when to end.
    parser.add_argument("--part", default="", help=argparse.SUPPRESS)
    parser.add_argument("--done", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.mode = args.mode or ("compiled" if args.device == "cuda" else "eager")
    given = args.seed if args.seed is not None else os.environ.get("FLEXHOP_FUZZ_SEED")
    args.seed = random.SystemRandom().randrange(SEEDS) if given is None else int(given)
    args.until = args.until or time.time() + 60 * args.minutes
    return args


def check(args: argparse.Namespace, seed: int, plan: Plan) -> str:
    """One problem as the arguments say: what is lucky about it, or ""."""
    # One architecture for each problem: others come with other numbers.
    architecture, how = args.arch[seed % len(args.arch)], {}
    if args.mode == "offline":
        compile_offline(plan, (architecture,), args.level)
        return ""
    if args.mode == "emulated":
        plan = for_hopper(plan, seed) if architecture == 90 else plan
        emulator = Emulator(architecture, True, Schedule(WHEN[seed % len(WHEN)], seed))
        how = {"emulator": emulator, "capability": divmod(architecture, 10)}
    if (BACKENDS[args.mode] == "interpreter" or args.small) and plan.dtype == torch.float64:
        plan = dataclasses.replace(plan, dtype=torch.float32)  # which has kernels
    is_small_gpu = args.mode == "emulated" and seed % 2
    with few_multiprocessors(architecture) if is_small_gpu else contextlib.nullcontext():
        return check_results(plan, seed, args.device, BACKENDS[args.mode], **how)


def verdict(args: argparse.Namespace, seed: int, plan: Plan) -> tuple[str, str]:
    """What comes of a problem (right, served, lucky, unstable, wrong, refused, error); a note.

    Served: right, by another kernel than the chosen one, which failed to compile. Lucky: plain
    PyTorch is exact by luck, and this one filling of the operands fails. Unstable: a rounding of
    its scores in fp32 changes the results by more than is allowed.
    """
    try:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("ignore")
            warnings.simplefilter("always", KernelFallbackWarning)
            note = check(args, seed, plan)
    except Exception as error:  # every kind is a finding: it is counted, and printed
        status = "wrong" if isinstance(error, AssertionError) else "error"
        refusals = [e for e in _chain(error) if isinstance(e, FlexhopError)]
        status = "refused" if refusals else status
        error = refusals[0] if refusals else error
        lines = [line for line in str(error).splitlines() if line.strip()] or [""]
        # An error in full: ptxas' words come after Triton's.
        text = "\n    ".join(lines)[:2000] if status == "error" else lines[0][:300]
        return status, f"{type(error).__name__}: {text}"
    finally:
        if args.device == "cuda":
            torch.cuda.empty_cache()  # other processes need the memory, too
    if seen:
        return "served", str(seen[0].message)[:300]
    if note.startswith("unstable"):
        return "unstable", note
    return ("lucky", note) if note else ("right", "")


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def shrink(args: argparse.Namespace, seed: int, plan: Plan) -> None:
    """Print smaller problems that fail alike, until none does."""
    first = verdict(args, seed, plan)
    print(*first, flush=True)
    found = first[0] != "right"
    while found:
        found = False
        for what, smaller in simpler(plan):
            status, note = verdict(args, seed, smaller)
            if status == first[0] and note[:40] == first[1][:40]:
                print(f"still without {what}: {note}", flush=True)
                plan, found = smaller, True
                break
    print("smallest:", plan.words())


def drawn(args: argparse.Namespace, seed: int) -> Plan:
    """The problem of a number, in sizes for the mode and the device."""
    on_gpu = args.device == "cuda"
    plan = draw(seed, large=args.mode == "offline" or (on_gpu and not args.small))
    return for_hopper(plan, seed) if on_gpu and args.small and seed % 2 else plan


def run(args: argparse.Namespace, found: Found) -> int:
    """Problems of this process until the time is up; failures are printed when they happen.

    Returns:
        The exit status.
    """
    part, parts = map(int, (args.part or "0/1").split("/"))
    fresh = itertools.count(args.seed + part, parts)
    seeds = itertools.chain(args.first[part::parts], fresh)
    for number, seed in itertools.islice(enumerate(seeds), args.done, None):
        if time.time() > args.until or (args.count and number >= args.count):
            break
        problem = drawn(args, seed)
        tell(args, f"{STARTED}{seed}")
        status, note = verdict(args, seed, problem)
        found[status].append(seed)
        tell(args, f"{DONE}{status} {seed}")
        if note:
            print(f"--only {seed} {status} {note}\n    {problem.words()}", flush=True)
        if status == "error" and args.device == "cuda" and not gpu_answers():
            return BROKEN
    return has_failures(found)


def tell(args: argparse.Namespace, line: str) -> None:
    """Print a line for the first process, if there are several."""
    if args.part:
        print(line, flush=True)


def gpu_answers() -> bool:
    """Whether the GPU still computes for this process; after some errors it does not."""
    try:
        torch.cuda.synchronize()
        return bool(torch.ones(2, device="cuda").sum() == 2)
    except RuntimeError:
        return False


def has_failures(found: Found) -> int:
    return int(any(found[status] for status in ("wrong", "error", "crash")))


class Spread:
    """Several processes, each with its share of the numbers; their logs are kept apart."""

    def __init__(self, args: argparse.Namespace, found: Found) -> None:
        self.args, self.found = args, found
        self.running: dict[int, subprocess.Popen[str]] = {}
        self.is_stopped = threading.Event()

    def run(self) -> None:
        """Until the time is up; a process that ends before is replaced."""
        with concurrent.futures.ThreadPoolExecutor(self.args.procs) as pool:
            try:
                list(pool.map(self._follow, range(self.args.procs)))
            except KeyboardInterrupt:
                self.is_stopped.set()
                for process in self.running.values():
                    process.kill()

    def _follow(self, part: int) -> None:
        done, status = 0, BROKEN
        while status not in (0, 1) and not self.is_stopped.is_set():
            done, status = self._run_once(part, done)

    def _run_once(self, part: int, done: int) -> tuple[int, int]:
        """Run one process and print its failures; a problem that ends the process is a crash."""
        last, is_open = -1, False
        with tempfile.TemporaryFile("w+") as log:
            process = subprocess.Popen(
                self._command(part, done), stdout=subprocess.PIPE, stderr=log, text=True,
                env={"FLEXHOP_PROGRESS": "0"} | os.environ | visible_gpu(part),
            )  # fmt: skip
            self.running[part] = process
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith(STARTED):
                    last, is_open = int(line.removeprefix(STARTED)), True
                elif line.startswith(DONE):
                    status, seed = line.removeprefix(DONE).split()
                    self.found[status].append(int(seed))
                    done, is_open = done + 1, False
                else:
                    print(line, end="", flush=True)
            status = process.wait()
            if status not in (0, 1, BROKEN) and not self.is_stopped.is_set():
                log.seek(0)
                print(f"--only {last} crash {status}\n{log.read()[-600:]}", flush=True)
                self.found["crash"].append(last)
                if not is_open:  # it did not start, and would not
                    return done, 1
                done += 1
        return done, status

    def _command(self, part: int, done: int) -> list[str]:
        own = ["--part", f"{part}/{self.args.procs}", "--done", str(done)]
        own += ["--seed", str(self.args.seed), "--until", str(self.args.until)]
        return [sys.executable, "-m", "tests.fuzz", *sys.argv[1:], *own]


def visible_gpu(part: int) -> dict[str, str]:
    """The GPU of one of several processes: each of them in turn."""
    count = torch.cuda.device_count()
    if "CUDA_VISIBLE_DEVICES" in os.environ or count < 2:
        return {}
    return {"CUDA_VISIBLE_DEVICES": str(part % count)}


def summary(found: Found) -> str:
    """How many problems there were, what came of them, and the numbers of those that failed."""
    counts = {status: len(seeds) for status, seeds in found.items()}
    lines = [f"{sum(counts.values())} problems: {counts}"]
    lines += [
        f"{s}: {sorted(found[s])}"
        for s in ("served", "lucky", "unstable", "wrong", "error", "crash")
        if found[s]
    ]
    return "\n".join(lines)


def stop(*_: object) -> None:
    """End the run, and print what was done. Signals come twice: to a process and to its group."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


def main() -> int:
    """The exit status: 1 if anything was wrong, or failed."""
    args = arguments()
    compile_quickly(args.device)
    if args.shrink is not None:
        shrink(args, args.shrink, drawn(args, args.shrink))
        return 0
    if args.only is not None:
        problem = drawn(args, args.only)
        print(problem.words())
        try:
            print(check(args, args.only, problem))
        except Exception:
            traceback.print_exc()
            return 1
        return 0
    found = Found(list)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    if args.procs > 1 and not args.part:
        print(f"problems from {args.seed} on, {args.mode} on {args.device}", flush=True)
        Spread(args, found).run()
        status = has_failures(found)
    else:
        try:
            status = run(args, found)
        except KeyboardInterrupt:  # what was done until then counts
            status = has_failures(found)
    if not args.part:
        print(summary(found), flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main())
