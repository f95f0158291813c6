"""Kernels that read a cache, in Triton's interpreter: pages, low precision, both, and sinks."""

import pytest
import torch

from flexhop.offline.interpret import Memory, interpret
from tests.cache_cases import CASES, assert_cache_case, cache_call, make_cache_inputs, operands


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
