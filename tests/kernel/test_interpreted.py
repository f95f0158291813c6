"""The generated kernels compute what the specification says: every case, in Triton's interpreter.

Memory is poisoned, and an access outside of a tensor is an error.
"""

from __future__ import annotations

import pytest

from flexhop.offline.interpret import Memory, interpret
from tests.budgets import TF32, Budget
from tests.case_inputs import Case, Inputs, make_call, make_inputs, make_loss
from tests.cases import CASES
from tests.judging import Outcome, assert_case


def interpreted(case: Case, inputs: Inputs, **generation) -> Outcome:
    """Forward and backward through the kernels."""
    generated = interpret(
        make_call(case, inputs), inputs.query, inputs.key, inputs.value,
        grad=make_loss(case, inputs), memory=Memory(poison=True, check_bounds=True), **generation,
    )  # fmt: skip
    return Outcome.of(case, generated.result, inputs)


def budget_of(case: Case) -> Budget | None:
    """TF32 where a case asks for it; the interpreter multiplies exactly, the GPU does not."""
    asked = case.options is not None and case.options.float32_precision == "tf32"
    return TF32 if asked else None


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_case(case: Case):
    inputs = make_inputs(case)
    assert_case(case, inputs, interpreted(case, inputs), budget=budget_of(case))
