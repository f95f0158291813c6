"""Derivatives of random problems: what their judge accepts, and what it does not."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any

import pytest
import torch

from flexhop.lowering.portable import emit
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
    assert all(values.abs().max() > 1e-3 for values in found.values())  # or nothing is judged
    wrong = {name: values * 1.001 for name, values in found.items()}
    assert [*judge(problem, wrong, compute_derivative)] == [*found]


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


@pytest.mark.parametrize(("formula", "order"), [("plain", -1), ("online", 0), ("online", -1)])
@pytest.mark.parametrize("derivative", DERIVATIVES)
def test_other_formulas_and_orders_are_the_same_function(derivative, formula, order):
    plan = dataclasses.replace(plan_of(derivative), dropout=0.3)
    problem = make_problem(plan, 12)
    exact = compute_derivative(problem, torch.float64)
    for name, values in compute_derivative(problem, torch.float64, formula, order).items():
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


def growing(derivative: Derivative, dtype: torch.dtype = torch.bfloat16) -> Plan:
    """Weights that grow along the keys: tangents of the first are far from the mean."""
    return Plan(
        shape=Shape(1, 2, 1, 9, 300, 16, 16), dtype=dtype, scores=("alibi",), learned=("slopes",),
        derivative=derivative,
    )  # fmt: skip


JUDGED = {"tangent": "out_dot", "second": "slopes", "flow": "slopes"}


@pytest.mark.parametrize("precision", ["bf16", "tf32"])
@pytest.mark.parametrize("derivative", DERIVATIVES)
def test_the_formula_of_kernels_is_centered(derivative, precision):
    """It was 1.3 to 1.9 times as far off as plain PyTorch, and so could kernels be."""
    problem = make_problem(growing(derivative), 3)
    if precision == "tf32":
        options = (("float32_precision", "tf32"),)
        problem = make_problem(
            dataclasses.replace(growing(derivative, torch.float32), options=options), 3
        )
        problem.is_for_gpu = True
    exact = compute_derivative(problem, torch.float64)
    name = "out_dot" if derivative == "tangent" else "grad_v"
    plain, online = (
        (compute_derivative(problem, None, formula)[name] - exact[name]).abs().mean()
        for formula in ("plain", "online")
    )
    assert online < 1.1 * plain


_CHANGES = itertools.count()


def change_kernels(monkeypatch: pytest.MonkeyPatch, before: str, after: str) -> None:
    """Kernels that are generated from now on have another text."""
    source, make = emit.portable.source, emit.inductor.make_template

    def replace(kernel: str, extras: tuple[str, ...]) -> str:
        text = source(kernel, extras)
        assert kernel != "jvp_forward" or before in text
        return text.replace(before, after)

    def make_anew(name: str, *rest: Any) -> Any:  # Inductor takes every name once
        return make(f"{name}_{next(_CHANGES)}", *rest)

    monkeypatch.setattr(emit.portable, "source", replace)
    monkeypatch.setattr(emit.inductor, "make_template", make_anew)
    monkeypatch.setattr(emit, "_template", functools.cache(emit._template.__wrapped__))


OTHER_CENTERS = {
    "none": "center",
    "first tile": "tl.where(sums[0] == 0.0, find_center(total, total_dot), center)",
}


@pytest.mark.parametrize("derivative", DERIVATIVES)
@pytest.mark.parametrize("center", [None, *OTHER_CENTERS])
def test_tangents_far_from_their_center_do_not_pass(derivative, center, monkeypatch):
    """Kernels subtracted nothing, or the mean of the first keys, before they rounded; so did the
    judge's own formula."""
    if center is not None:
        line = "new_center = find_center(total, total_dot)"
        change_kernels(monkeypatch, line, f"new_center = {OTHER_CENTERS[center]}")
    problem, name = make_problem(growing(derivative), 3), JUDGED[derivative]
    problem.is_for_gpu = True
    found = derivative_runner(problem, "interpreter")()
    exceeded = judge(problem, {name: found[name]}, compute_derivative)
    assert [*exceeded] == ([] if center is None else [name])
