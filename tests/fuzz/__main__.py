"""Random problems for as long as wanted: `scripts/fuzz --help`."""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import dataclasses
import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator

import torch

from flexhop.errors import EagerWarning, FlexhopError
from tests.fuzz.checks import check_results, compile_offline
from tests.fuzz.draw import draw
from tests.fuzz.plan import Plan, simpler

BACKENDS = {
    "eager": "eager", "traced": "aot_eager", "compiled": "inductor", "interpreted": "interpreter",
}  # fmt: skip
MODES = (*BACKENDS, "offline")
# Lines that one of several processes prints for the first.
STARTED, COUNTED = "started ", "counted "
Found = collections.defaultdict[str, list[int]]  # numbers of problems, by what came of them


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/fuzz", description=__doc__)
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument(
        "--mode", choices=MODES,
        help="eager; traced (aot_eager); compiled (inductor), the default on cuda; interpreted: "
        "GPU kernels on a CPU; offline: generate kernels and compile them for --arch",
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
    parser.add_argument("--procs", type=int, default=1, help="processes side by side")
    parser.add_argument("--part", default="0/1", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.mode = args.mode or ("compiled" if args.device == "cuda" else "eager")
    given = args.seed if args.seed is not None else os.environ.get("FLEXHOP_FUZZ_SEED")
    args.seed = random.SystemRandom().randrange(10**9) if given is None else int(given)
    return args


def check(args: argparse.Namespace, seed: int, plan: Plan) -> None:
    """One problem as the arguments say."""
    if args.mode == "offline":
        # One architecture for each problem: others come with other numbers.
        compile_offline(plan, (args.arch[seed % len(args.arch)],), args.level)
        return
    if args.mode == "interpreted" and plan.dtype == torch.float64:  # which has no kernel
        plan = dataclasses.replace(plan, dtype=torch.float32)
    check_results(plan, seed, args.device, BACKENDS[args.mode])


def verdict(args: argparse.Namespace, seed: int, plan: Plan) -> tuple[str, str]:
    """What comes of a problem: right, wrong, refused or error; and a note."""
    try:
        check(args, seed, plan)
    except Exception as error:  # every kind is a finding: it is counted, and printed
        status = "wrong" if isinstance(error, AssertionError) else "error"
        refusals = [e for e in _chain(error) if isinstance(e, FlexhopError)]
        status = "refused" if refusals else status
        error = refusals[0] if refusals else error
        lines = [line for line in str(error).splitlines() if line.strip()] or [""]
        return status, f"{type(error).__name__}: {lines[0][:300]}"
    return "right", ""


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


def is_large(args: argparse.Namespace) -> bool:
    return args.mode == "offline" or args.device == "cuda"


def run(args: argparse.Namespace) -> Found:
    """Problems of this process until the time is up; failures are printed when they happen."""
    part, parts = map(int, args.part.split("/"))
    end, found = time.monotonic() + 60 * args.minutes, Found(list)
    fresh = itertools.count(args.seed + part, parts)
    for number, seed in enumerate(itertools.chain(args.first[part::parts], fresh)):
        if time.monotonic() > end or (args.count and number >= args.count):
            break
        problem = draw(seed, large=is_large(args))
        if parts > 1:
            print(f"{STARTED}{seed}", flush=True)
        status, note = verdict(args, seed, problem)
        found[status].append(seed)
        if note:
            print(f"--only {seed} {status} {note}\n    {problem.words()}", flush=True)
    return found


def spread(args: argparse.Namespace) -> Found:
    """Several processes, each with its share of the numbers; their logs are kept apart."""
    command = [sys.executable, "-m", "tests.fuzz", *sys.argv[1:], "--seed", str(args.seed)]
    environment = {"FLEXHOP_PROGRESS": "0"} | os.environ
    parts = [[*command, "--part", f"{i}/{args.procs}"] for i in range(args.procs)]
    with concurrent.futures.ThreadPoolExecutor(args.procs) as pool:
        shares = list(pool.map(lambda part: _follow(part, environment), parts))
    found = Found(list)
    for status, seeds in itertools.chain.from_iterable(share.items() for share in shares):
        found[status] += seeds
    return found


def _follow(command: list[str], environment: dict[str, str]) -> Found:
    """Run one process and print its failures; a problem that ends the process is a crash."""
    found, last = Found(list), -1
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment
        )
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(STARTED):
                last = int(line.removeprefix(STARTED))
            elif line.startswith(COUNTED):
                found.update(json.loads(line.removeprefix(COUNTED)))
            else:
                print(line, end="", flush=True)
        if process.wait() not in (0, 1):
            log.seek(0)
            found["crash"].append(last)
            print(f"--only {last} crash {process.returncode}\n{log.read()[-600:]}", flush=True)
    return found


def summary(found: Found) -> str:
    """How many problems there were, what came of them, and the numbers of those that failed."""
    counts = {status: len(seeds) for status, seeds in found.items()}
    lines = [f"{sum(counts.values())} problems: {counts}"]
    lines += [f"{s}: {sorted(found[s])}" for s in ("wrong", "error", "crash") if found[s]]
    return "\n".join(lines)


def main() -> int:
    """The exit status: 1 if anything was wrong, or failed."""
    args = arguments()
    warnings.simplefilter("ignore", EagerWarning)
    if args.shrink is not None:
        shrink(args, args.shrink, draw(args.shrink, large=is_large(args)))
        return 0
    if args.only is not None:
        problem = draw(args.only, large=is_large(args))
        print(problem.words())
        try:
            check(args, args.only, problem)
        except Exception:
            traceback.print_exc()
            return 1
        return 0
    if args.procs > 1 and args.part == "0/1":
        print(f"problems from {args.seed} on, {args.mode} on {args.device}", flush=True)
        found = spread(args)
    else:
        found = run(args)
    is_part = args.part != "0/1"
    print(COUNTED + json.dumps(found) if is_part else summary(found), flush=True)
    return int(any(found[status] for status in ("wrong", "error", "crash")))


if __name__ == "__main__":
    sys.exit(main())
