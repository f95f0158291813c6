"""Mods of tests/fuzz/later.py, alone, in interpreted kernels: each was wrong or refused."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tests.case_inputs import Shape
from tests.fuzz.checks import check_results
from tests.fuzz.plan import Plan
from tests.fuzz.scores import SCORES
from tests.needs import needs_hopper

SHAPE = Shape(2, 4, 2, 37, 41, 16, 16)


def plan_of(name, **changes):
    """A call with one score_mod, whose captured tensors are learned."""
    learned = SCORES[name].learned
    return dataclasses.replace(
        Plan(shape=SHAPE, scores=(name,), learned=learned, lse=True), **changes
    )


@pytest.mark.parametrize(
    "name",
    [
        "double_table", "double_keys", "double_score", "times", "times_twice", "largest_of",
        "halved_by",
    ],
)  # fmt: skip
def test_gradients(name):
    assert not check_results(plan_of(name), 5, backend="interpreter")


@pytest.mark.parametrize("name", ["converted", "flipped", "double_factor"])
@pytest.mark.parametrize("derivative", ["tangent", "second"])
def test_other_derivatives(name, derivative):
    assert not check_results(plan_of(name, derivative=derivative), 5, backend="interpreter")


def test_second_derivatives_of_a_row_that_is_a_view_of_a_sum():
    """Its tangent is a view of a 0, which PyTorch makes on another device."""
    plan = plan_of(
        "prelu", scores=("captured_numbers", "prelu"), dynamic=True, derivative="second"
    )
    assert not check_results(plan, 5, backend="interpreter")


@needs_hopper
@pytest.mark.parametrize("name", ["double_table", "double_slopes"])
def test_hopper_kernels(name):
    plan = plan_of(
        name, shape=Shape(1, 2, 2, 130, 140, 64, 64), dtype=torch.bfloat16,
        options=(("backend", "hopper"),),
    )  # fmt: skip
    assert not check_results(plan, 5, backend="interpreter")


def test_the_largest_of_few_numbers_of_a_mask():
    plan = plan_of("double_table", masks=("moments", "far_cells", "above_median"), how="or")
    assert not check_results(plan, 5, backend="interpreter")
