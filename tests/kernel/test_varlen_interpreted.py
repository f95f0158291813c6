"""The kernels of packed sequences, in Triton's interpreter, against a loop over sequences."""

import pytest
import torch

from flexhop.offline.interpret import Memory, interpret
from tests.budgets import assert_within_budget
from tests.varlen_cases import (
    CASES,
    call_arguments,
    gradients,
    loop,
    make_operands,
    packed_call,
    used_keys,
)

pytestmark = pytest.mark.filterwarnings("ignore::flexhop.errors.EagerWarning")


@pytest.mark.parametrize("name", ["cross_causal", "mods", "left_window", "used", "decode"])
def test_packed_sequences(name):
    case = CASES[name]
    operands = make_operands(case)
    generated = interpret(
        packed_call(case, used_keys(case)), *call_arguments(case, operands),
        grad=lambda result: (result[0] * operands.grad).sum(),
        memory=Memory(poison=True, check_bounds=True),
    )  # fmt: skip
    out, aux = generated.result
    found = {"out": out, "lse": aux.lse}
    found |= {name: leaf.grad for name, leaf in operands.leaves.items() if leaf.grad is not None}
    gold, reference = (expected(case, operands.copy(d)) for d in (torch.float64, torch.float32))
    assert found.keys() == gold.keys()
    for key, actual in found.items():
        assert_within_budget(
            actual, gold[key], reference[key], name=f"{name}: {key}", captured=key == "slopes"
        )


def expected(case, operands) -> dict[str, torch.Tensor]:
    out, lse = loop(case, operands)
    return {"out": out, "lse": lse, **gradients(case, operands, out)}
