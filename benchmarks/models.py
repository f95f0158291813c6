"""``python -m benchmarks.models``: models of transformers, a training step or generation.

Each row runs in a process of its own, alone on the machine and with empty caches, because the
first step is measured too. Weights and tokens are random. A training step takes packed documents,
and AdamW changes the weights. ``--generate`` fills a static cache greedily.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.models_worker import IMPLEMENTATIONS, MODELS, generate, train
from benchmarks.report import cell, row
from benchmarks.turns import answer, in_turn, wait_for_turn

Result = dict[str, Any]
GIB = 1 << 30


def training_table(results: Sequence[Result]) -> str:
    """Time and memory of a step, and the losses before the first and the last step."""
    lines = [row(["", "ms per step", "peak GiB", "first step, s", "loss", "loss at the end"])]
    lines.append(row(["---", *["---:"] * 5]))
    for result in results:
        peak = result.get("peak_bytes")
        cells = [
            cell(result.get("milliseconds"), 1),
            cell(peak and peak / GIB, 1),
            cell(result.get("first_seconds"), 1),
            *(cell(result.get(name), 3) for name in ("first_loss", "last_loss")),
        ]
        lines.append(row([title(result), *cells]))
    return "\n".join(lines)


def generation_table(results: Sequence[Result]) -> str:
    """Speed of generation, and how long the first call takes."""
    lines = [row(["", "tokens per second", "first call, s"]), row(["---", "---:", "---:"])]
    for result in results:
        cells = cell(result.get("tokens_per_second")), cell(result.get("first_seconds"), 1)
        lines.append(row([title(result), *cells]))
    return "\n".join(lines)


def title(result: Result) -> str:
    """The model and the implementation of a row."""
    compiled = ", compiled" if result["compiled"] else ""
    return f"{result['model']}{compiled}, `{result['implementation']}`"


def measure(options: argparse.Namespace) -> list[Result]:
    """Results of all rows, one process after the other."""
    results: list[Result] = []
    flags = ["--device", options.device, "--loading", str(options.loading)]
    flags += [flag for flag in ("--compile", "--generate") if getattr(options, flag[2:])]
    for model in options.models:
        for name in options.implementations:
            command = ["benchmarks.models", "--worker", "--models", model]
            command += ["--implementations", name, *flags]
            found = in_turn([command], 1, options.timeout)[0]
            known = {"model": model, "implementation": name, "compiled": options.compile}
            results.append(known | (found if isinstance(found, dict) else {"failed": found}))
            print(f"{title(results[-1])}: {results[-1]}", file=sys.stderr, flush=True)
    return results


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.models", description=__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument(
        "--implementations", nargs="+", choices=IMPLEMENTATIONS, default=list(IMPLEMENTATIONS)
    )
    parser.add_argument("--compile", action="store_true", help="torch.compile the whole model")
    parser.add_argument("--generate", action="store_true", help="generation instead of training")
    parser.add_argument(
        "--loading", type=float, default=0.0, metavar="SECONDS",
        help="sleep before the first step, as long as weights take to load",
    )  # fmt: skip
    parser.add_argument("--timeout", type=float, default=150.0, help="seconds for each row")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write all numbers here")
    parser.add_argument(
        "--device",
        choices=("cuda", "cpu"),
        default="cuda" if torch.cuda.is_available() else "cpu",
        help="cpu: tiny models, to try the program out",
    )
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    """Measure, print the table; fails if flexhop failed anywhere."""
    options = parse_arguments(arguments)
    on_gpu = options.device == "cuda"
    if options.worker:
        wait_for_turn()
        work = generate if options.generate else train
        answer(work(options.models[0], options.implementations[0], options))
        return 0
    import transformers  # here: it is optional, and takes seconds

    machine = torch.cuda.get_device_name() if on_gpu else "CPU, tiny models: not a measurement"
    print(f"{machine}; torch {torch.__version__}; transformers {transformers.__version__}.\n")
    results = measure(options)
    print((generation_table if options.generate else training_table)(results))
    failed = [result for result in results if "failed" in result]
    for result in failed:
        print(f"- {title(result)}: {result['failed']}")
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + os.linesep)
    return int(any(result["implementation"] == "flexhop" for result in failed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
