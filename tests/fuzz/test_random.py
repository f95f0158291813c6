"""Random problems, new ones in each run: a failure names its number, which draws it again.

FLEXHOP_FUZZ_SEED=123 scripts/test tests/fuzz      # problem 123, and those after it
scripts/fuzz --help                                # hours of them, GPUs, offline compilation
"""

from __future__ import annotations

import os
import random

import pytest

from flexhop.errors import OptionConflictError
from tests.fuzz.checks import check_results, compile_offline
from tests.fuzz.draw import SEEDS, draw
from tests.fuzz.plan import simpler
from tests.fuzz.problem import make_call, make_problem

FIRST = int(os.environ.get("FLEXHOP_FUZZ_SEED") or random.SystemRandom().randrange(SEEDS))
# Eager and traced problems, and problems whose kernels are generated and compiled.
COUNTS = {"eager": 24, "aot_eager": 8}
OFFLINE = 2
pytestmark = [
    pytest.mark.filterwarnings("ignore::flexhop.errors.EagerWarning"),
    # Gradients of some mods meet PyTorch's own batching rules, some of which say they are slow.
    pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning"),
]


def report(seed: int, words: str, mode: str) -> str:
    return f"random problem {seed} fails: {words}\nagain: scripts/fuzz --mode {mode} --only {seed}"


# Names are numbers of this run: workers of pytest must collect the same tests.
@pytest.mark.parametrize("backend", COUNTS)
def test_results(backend):
    for seed in range(FIRST, FIRST + COUNTS[backend]):
        plan = draw(seed)
        try:
            check_results(plan, seed, backend=backend)
        except Exception as error:
            mode = "eager" if backend == "eager" else "traced"
            raise AssertionError(report(seed, plan.words(), mode)) from error


@pytest.mark.slow
def test_kernels_compile():
    for seed in range(FIRST, FIRST + OFFLINE):
        plan = draw(seed, large=True)  # as --mode offline draws it
        try:
            assert compile_offline(plan) > 0
        except OptionConflictError:  # a kernel that cannot have these operands was asked for
            assert "backend" in dict(plan.options)
        except Exception as error:
            raise AssertionError(report(seed, plan.words(), "offline")) from error


def test_smaller_problems_are_problems():
    """The search for the smallest failure takes one thing away at a time."""
    for seed in range(FIRST, FIRST + 20):
        plan = draw(seed)
        for what, smaller in simpler(plan):
            assert smaller != plan, what
            assert make_call(make_problem(smaller, 0)), smaller.words()
