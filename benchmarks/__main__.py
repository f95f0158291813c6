"""``python -m benchmarks``: the whole table, or the part that the options ask for."""

import argparse
import json
import os
import re
import sys
from pathlib import Path

import torch

from benchmarks.cases import QUICK, SUITES
from benchmarks.implementations import NAMES
from benchmarks.report import markdown
from benchmarks.runner import Settings, run


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--cases", default="", metavar="REGEX", help="only matching case names")
    parser.add_argument("--only", choices=("fwd", "bwd"), help="only one direction")
    parser.add_argument(
        "--suite",
        choices=SUITES,
        default="usual",
        help="unusual: masks and mods nobody tuned for; shapes: widths, short sequences, blocks",
    )
    parser.add_argument("--quick", action="store_true", help=f"only {', '.join(QUICK)}")
    parser.add_argument(
        "--peers", nargs="*", choices=NAMES[1:], default=["in-tree", "cudnn"], help="against whom"
    )
    parser.add_argument("--rounds", type=int, default=5, help="interleaved rounds (at least 3)")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) // 2))
    parser.add_argument("--timeout", type=float, default=150.0, help="seconds for each phase")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write all numbers here")
    parser.add_argument("--markdown", type=Path, metavar="PATH", help="write the tables here too")
    parser.add_argument(
        "--device",
        choices=("cuda", "cpu"),
        default="cuda" if torch.cuda.is_available() else "cpu",
        help="cpu: tiny shapes, to try the program out",
    )
    return parser.parse_args(arguments)


def chosen_cases(options: argparse.Namespace) -> list[str]:
    """Names of the cases to run."""
    every = tuple(case.name for case in SUITES[options.suite])
    names = QUICK if options.quick else every
    return [name for name in names if re.search(options.cases, name)]


def describe_machine(device: str) -> str:
    """Device and versions, for the head of the report."""
    on_gpu = device == "cuda"
    name = torch.cuda.get_device_name() if on_gpu else "CPU, tiny shapes: not a measurement"
    return (
        f"{name}; torch {torch.__version__}; {'bfloat16' if on_gpu else 'float32'}, random data."
    )


def main(arguments: list[str]) -> int:
    """Run, print the tables, write the files; fails if flexhop failed or was wrong anywhere."""
    options = parse_arguments(arguments)
    settings = Settings(
        device=options.device,
        directions=(options.only,) if options.only else ("fwd", "bwd"),
        names=("flexhop", *options.peers),
        rounds=max(3, options.rounds),
        compile_timeout=options.timeout,
        time_timeout=options.timeout,
    )
    machine = describe_machine(options.device)
    results = run(chosen_cases(options), settings, options.workers)
    report = markdown(results, machine, settings.names)
    print(report)
    if options.json:
        options.json.write_text(json.dumps({"machine": machine, "results": results}, indent=1))
    if options.markdown:
        options.markdown.write_text(report)
    return int(
        any("error" in r or {"flexhop", "portable"} & set(r.get("failed", {})) for r in results)
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
