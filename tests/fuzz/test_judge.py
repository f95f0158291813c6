"""What the judge of random problems must know of kernels."""

from __future__ import annotations

import pytest
import torch

from tests.budgets import truncate
from tests.case_inputs import Shape
from tests.fuzz.checks import check_results, is_unstable, judge, judge_fillings, runner
from tests.fuzz.plan import Plan
from tests.fuzz.problem import make_problem

TF32 = (("backend", "triton"), ("float32_precision", "tf32"))
# Errors of an H200, in units of the error of a formula that truncates weights after it divides
# them by their sum: 2.7, and 2.1 for a captured gradient.
TRUNCATED = {
    "dropped weights": Plan(
        shape=Shape(1, 3, 3, 7, 7, 16, 8), masks=("remainder",), scores=("zeros",), train="",
        options=TF32, dropout=0.1,
    ),
    "captured gradient": Plan(
        shape=Shape(2, 3, 1, 65, 127, 72, 72), scores=("head", "without_nan"), train="",
        learned=("head_factor",), scale=1.0, options=TF32, dropout=0.5,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TRUNCATED)
def test_tf32_weights_are_truncated_before_they_are_divided(name):
    assert check_results(TRUNCATED[name], 731, backend="interpreter") == ""


@pytest.mark.parametrize(("weight", "is_right"), [(1 - 2.0**-11, True), (1 - 2.0**-9, False)])
@pytest.mark.filterwarnings("ignore::flexhop.errors.EagerWarning")
def test_tf32_makes_less_of_a_weight_of_one(weight, is_right):
    """With one key, a weight is 1; a kernel finds it again, perhaps a bit lower."""
    plan = Plan(shape=Shape(1, 3, 3, 1, 1, 17, 17), options=TF32)
    problem = make_problem(plan, 559)
    problem.is_for_gpu = True
    found = runner(problem, "eager")()["grad_v"]
    assert (judge(problem, {"grad_v": truncate(found) * weight}) == {}) is is_right


@pytest.mark.parametrize(("scale", "expected"), [(1.0, True), (None, False)])
def test_exponentials_of_large_scores_are_open(scale, expected):
    """Scores of 60 whose exponential is the score: fp32 leaves differences of tens open."""
    shape = Shape(1, 1, 1, 128, 128, 256, 16)
    plan = Plan(shape=shape, dtype=torch.bfloat16, scores=("exp",), scale=scale)
    assert is_unstable(make_problem(plan, 5, "cpu")) is expected


def test_usual_problems_are_determined():
    plan = Plan(
        shape=Shape(1, 2, 1, 128, 128, 64, 64), dtype=torch.float16, scores=("exp", "square")
    )
    assert not is_unstable(make_problem(plan, 6, "cpu"))


@pytest.mark.parametrize(
    "plan",
    [
        Plan("paged", Shape(2, 2, 1, 3, 6, 8, 8), train="", keys=(2, 6), page=3),
        Plan("cached", Shape(2, 2, 1, 3, 6, 8, 8), train="", stored=torch.int8, key_mod="shift"),
        Plan("cached", Shape(2, 2, 1, 3, 6, 8, 8), train="", stored=torch.int8, key_mod="key"),
    ],
    ids=["paged", "shift", "key"],
)
@pytest.mark.filterwarnings("ignore::flexhop.errors.EagerWarning")
def test_caches_are_filled_again(plan):
    """A call of three keys may be exact in plain PyTorch by luck, in one filling of them."""
    problem, other = make_problem(plan, 3), make_problem(plan, 4)
    run = runner(problem, "eager")
    before = run()["out"]
    problem.fill(other)
    after = run()
    assert not torch.equal(before, after["out"])
    assert torch.equal(after["out"], runner(other, "eager")()["out"])
    assert judge(problem, after) == {}


def _fillings(problem, spoil):
    """What judge_fillings says of results that `spoil` changes in every filling."""
    exact = runner(problem, "eager")
    number = iter(range(100))

    def run():
        return {name: spoil(t.clone(), next(number)) for name, t in exact().items()}

    judge_fillings(problem, 7, run, {"grad_q": run()["grad_q"]})


@pytest.mark.filterwarnings("ignore::flexhop.errors.EagerWarning")
def test_a_wrong_row_is_found_in_fillings():
    """One row in 300 is wrong, in each filling; or in one of the 16, but by far."""
    plan = Plan(shape=Shape(1, 2, 2, 150, 37, 1, 1), dtype=torch.bfloat16, scores=("sine",))

    def spoil_row(tensor, number):
        return tensor.index_add_(-2, torch.tensor([3]), tensor[..., 3:4, :] * 0.1)

    def spoil_filling(tensor, number):
        return spoil_row(tensor * 1.0, number) * (1 if number else 3)

    _fillings(make_problem(plan, 7), lambda tensor, number: tensor)
    for spoil in (spoil_row, spoil_filling):
        with pytest.raises(AssertionError, match=r"is wrong by|exceeds"):
            _fillings(make_problem(plan, 7), spoil)
