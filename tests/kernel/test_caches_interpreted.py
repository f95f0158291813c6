"""Kernels that read a cache, in Triton's interpreter: pages, low precision, both, and sinks."""

import pytest
import torch

from flexhop.offline.interpret import Memory, interpret
from tests.cache_cases import (
    CASES,
    E4M3,
    E5M2,
    INT8,
    assert_cache_case,
    assert_every_byte,
    cache_call,
    make_cache_inputs,
    operands,
)


def interpreted(case, seed: int = 0):
    inputs = make_cache_inputs(case, seed=seed)
    generated = interpret(
        cache_call(inputs, backend="triton"), *operands(inputs),
        memory=Memory(poison=True, check_bounds=True), capability=case.capability,
    )  # fmt: skip
    return inputs, generated


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_case(case):
    inputs, generated = interpreted(case)
    assert_cache_case(case, inputs, generated.result)
    if case.page:
        # The place of a page does not change a bit of the result.
        _, elsewhere = interpreted(case, seed=1)
        assert torch.equal(generated.result[0], elsewhere.result[0])
        assert torch.equal(generated.result[1].lse, elsewhere.result[1].lse)


@pytest.mark.parametrize("stored", [INT8, E4M3, E5M2])
def test_every_byte(stored):
    """None is misread, in the assembly that converts pairs either."""

    def run(function, *arguments):
        return interpret(
            function, *arguments, memory=Memory(poison=True, check_bounds=True)
        ).result

    assert_every_byte(stored, run)


@pytest.mark.parametrize("name", ["page_16", "e4m3_rows_sinks"])
def test_symbolic_sizes(name):
    (case,) = (case for case in CASES if case.name == name)
    inputs = make_cache_inputs(case)
    generated = interpret(
        cache_call(inputs, backend="triton"), *operands(inputs), dynamic=True,
        memory=Memory(poison=True, check_bounds=True),
    )  # fmt: skip
    assert_cache_case(case, inputs, generated.result)
