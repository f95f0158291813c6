"""What the judge of random problems must know of kernels."""

from __future__ import annotations

import pytest
import torch

from tests.budgets import truncate
from tests.case_inputs import Shape
from tests.fuzz.checks import check_results, is_unstable, judge, judge_fillings, runner
from tests.fuzz.derivatives import compute_derivative
from tests.fuzz.oracle import compute
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


# With one key, the gradient of a score is 0. Of eight columns, plain PyTorch sums the products of
# out and of value alike, in every order, and finds exactly 0; kernels sum them apart.
ONE_KEY = {
    "dropped weights": (Plan(shape=Shape(1, 6, 3, 17, 1, 8, 8), dropout=0.5), 103),
    "many rows": (Plan(shape=Shape(2, 6, 3, 31, 1, 8, 8)), 199),
}


@pytest.mark.parametrize("name", ONE_KEY)
def test_sums_over_out_and_products_have_other_roundings(name):
    plan, seed = ONE_KEY[name]
    assert not compute(make_problem(plan, seed), None, order=3)["grad_q"].any()
    assert check_results(plan, seed, backend="interpreter") == ""


def _lose_delta(problem, found):
    """The sum over out is forgotten."""
    _, key, value = (t.detach().repeat_interleave(2, 1) for t in problem.operands)
    return {"grad_q": found["grad_q"] + problem.grad_out @ value.mT * key / 8**0.5}


def _round_out(problem, found):
    """The sum is that of an out of 16 bits."""
    lost = ((found["out"].half() - found["out"]) * problem.grad_out).sum(-1, keepdim=True)
    key = problem.operands[1].detach().repeat_interleave(2, 1)
    return {"grad_q": found["grad_q"] - lost * key / 8**0.5}


def _off_in_a_row(problem, found):
    return {"grad_q": found["grad_q"].index_fill(-2, torch.tensor([3]), 1e-4)}


FAULTS = {
    "weight": lambda problem, found: {n: found[n] * 1.001 for n in ("out", "grad_v")},
    "delta": _lose_delta,
    "rounded out": _round_out,
    "row": _off_in_a_row,
    "heads": lambda problem, found: {"grad_v": found["grad_v"].roll(1, 1)},
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.filterwarnings("ignore::flexhop.errors.EagerWarning")
def test_faults_of_rows_with_one_key_are_found(fault):
    """In this filling, and in several."""
    problem = make_problem(ONE_KEY["many rows"][0], 199)

    run, spoil = runner(problem, "eager"), FAULTS[fault]

    def spoilt():
        found = {name: values.detach() for name, values in run().items()}
        return found | spoil(problem, found)

    assert judge(problem, run()) == {}
    found = spoilt()
    exceeded = judge(problem, found)
    assert [*exceeded] == [*spoil(problem, found)]
    with pytest.raises(AssertionError):
        judge_fillings(problem, 199, spoilt, {n: found[n] for n in exceeded})


def test_rows_with_several_keys_sum_as_before():
    """Of three rows, the first sees one key; the formula for one key leaves the others alone."""
    plan = Plan(shape=Shape(1, 1, 1, 3, 2, 72, 72), masks=("causal",))
    problem = make_problem(plan, 5)
    apart, alike = (compute(problem, None, f, 1)["grad_q"] for f in ("again", "online"))
    unlike = apart != alike
    assert unlike.any(-1).flatten().tolist() == [True, False, False]


@pytest.mark.parametrize(("factor", "is_right"), [(1.0, True), (1.0001, False)])
def test_fillings_of_derivatives_with_one_key(factor, is_right):
    """Plain PyTorch's sums cancel exactly in every filling, so no kernel passed by them."""
    plan = Plan(
        shape=Shape(1, 3, 3, 20, 1, 72, 72), scores=("key",), learned=("by_key",), lse=True,
        derivative="flow",
    )  # fmt: skip
    problem = make_problem(plan, 830)

    def run():
        return {"by_key": compute_derivative(problem, None, "online", -3)["by_key"] * factor}

    if is_right:
        judge_fillings(problem, 830, run, run(), compute_derivative)
    else:
        with pytest.raises(AssertionError, match="by_key: error"):
            judge_fillings(problem, 830, run, run(), compute_derivative)
