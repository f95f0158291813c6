"""Integers that name no place, in Triton's interpreter: it refuses accesses outside of tensors."""

import pytest

from flexhop.offline.interpret import Memory, interpret
from tests.hostile_calls import KINDS

pytestmark = pytest.mark.filterwarnings("ignore::flexhop.errors.EagerWarning")


@pytest.mark.parametrize("kind", KINDS)
def test_no_access_outside(kind):
    hostile = KINDS[kind]({"backend": "triton"}, width=16)
    for tensor in hostile.floats.values():
        tensor.requires_grad_(hostile.is_trained)
    interpret(
        hostile.call, *hostile.operands, grad=hostile.is_trained,
        memory=Memory(poison=True, check_bounds=True),
    )  # fmt: skip
