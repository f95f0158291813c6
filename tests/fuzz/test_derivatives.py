"""Derivatives of random problems: what their judge accepts, and what it does not."""

from __future__ import annotations

import pytest
import torch

from flexhop.offline import generate_code
from flexhop.offline.cubin import compile_kernel
from tests.case_inputs import Shape
from tests.fuzz.checks import check_results, derivative_runner, judge
from tests.fuzz.derivatives import compute_derivative, inputs_of, make_derivative
from tests.fuzz.draw import draw
from tests.fuzz.plan import Derivative, Plan
from tests.fuzz.problem import make_problem

pytestmark = pytest.mark.filterwarnings("ignore::flexhop.errors.EagerWarning")
DERIVATIVES: tuple[Derivative, ...] = ("tangent", "second", "flow")


def plan_of(derivative: Derivative) -> Plan:
    """A learned slope, a score that is kept from gradients, and rows without keys."""
    return Plan(
        shape=Shape(2, 4, 2, 7, 9, 8, 16), masks=("remainder",),
        scores=("head", "half_detached"), learned=("head_factor",), lse=True, sinks=True,
        derivative=derivative,
    )  # fmt: skip


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("derivative", DERIVATIVES)
def test_right_results_pass(derivative, backend):
    assert check_results(plan_of(derivative), 12, backend=backend) == ""


@pytest.mark.parametrize("derivative", DERIVATIVES)
def test_wrong_results_do_not(derivative):
    problem = make_problem(plan_of(derivative), 12)
    found = derivative_runner(problem, "eager")()
    assert judge(problem, found, compute_derivative) == {}
    for name, values in found.items():
        assert values.abs().max() > 1e-3  # or nothing would be judged
        wrong = found | {name: values * 1.001}
        assert [*judge(problem, wrong, compute_derivative)] == [name]


@pytest.mark.parametrize("derivative", DERIVATIVES)
def test_tf32_products_have_derivatives(derivative):
    """The judge's own, of operands that lost their last bits."""
    options = (("float32_precision", "tf32"),)
    plan = Plan(shape=Shape(1, 1, 1, 7, 9, 8, 8), options=options, derivative=derivative)
    problem = make_problem(plan, 3)
    problem.is_for_gpu = True
    exact = compute_derivative(problem, torch.float64)
    for name, values in compute_derivative(problem, None).items():
        if name != "lse_dot":  # which nobody asked for
            error = (values - exact[name]).abs().mean() / exact[name].abs().mean()
            assert 1e-5 < error < 5e-3


def test_every_kind_is_drawn_and_changes_nothing_else():
    plans = [draw(seed) for seed in range(400)]
    assert {plan.derivative for plan in plans} == {"", *DERIVATIVES}
    assert all(plan.is_differentiated for plan in plans if plan.derivative)


def test_tangents_that_no_product_enters():
    """Triton could not compile the branch that read their table."""
    plan = Plan(
        "packed", Shape(2, 1, 1, 32, 28, 256, 256), dtype=torch.bfloat16,
        masks=("integers", "head_choice", "by_head"), scores=("minimum", "without_nan", "shared"),
        learned=("both",), train="v", queries=(13, 32), keys=(28, 2),
        options=(("backend", "triton"),), derivative="tangent",
    )  # fmt: skip
    problem = make_problem(plan, 0)
    generated = generate_code(make_derivative(problem), *inputs_of(problem), capability=(9, 0))
    assert [compile_kernel(kernel, 90).spills for kernel in generated.templates] == [0]


@pytest.mark.parametrize("derivative", DERIVATIVES)
def test_other_orders_are_the_same_function(derivative):
    problem = make_problem(plan_of(derivative), 12)
    exact = compute_derivative(problem, torch.float64)
    for name, values in compute_derivative(problem, torch.float64, order=-1).items():
        torch.testing.assert_close(values, exact[name], rtol=1e-12, atol=1e-12)


def test_differences_that_are_zero_are_rounded():
    """With one key, one pass of plain PyTorch finds 0; kernels subtract two rounded sums."""
    plan = Plan(
        shape=Shape(2, 3, 1, 1, 1, 40, 8), scores=("logaddexp",), train="qv", scale=1.0,
        dropout=0.1, derivative="second",
    )  # fmt: skip
    problem = make_problem(plan, 690)
    assert not compute_derivative(problem, None)["grad_q"].any()
    rounded = compute_derivative(problem, None, order=-1)["grad_q"].abs().max()
    terms = 40 * torch.finfo(torch.float32).eps  # as many, each about 1
    assert 0 < rounded < 10 * terms


def test_means_of_gradients_are_sums_over_out():
    """Kernels take rowsum(out * grad_out) from them, which plain PyTorch does not."""
    plan = Plan(shape=Shape(1, 1, 1, 3, 1, 80, 80), dtype=torch.float32, derivative="second")
    problem = make_problem(plan, 608)
    unlike, like = (
        sum(
            compute_derivative(problem, None, formula, -n)["grad_k"].abs().mean()
            for n in range(1, 9)
        )
        for formula in ("plain", "online")
    )
    assert like > 1.5 * unlike
    exact, same = (
        compute_derivative(problem, torch.float64, formula, order=-1)
        for formula in ("plain", "online")
    )
    for name, values in same.items():
        torch.testing.assert_close(values, exact[name], rtol=1e-11, atol=1e-11)
