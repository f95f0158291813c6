"""The generated kernels compute what the specification says: every case, in Triton's interpreter.

Memory is poisoned, and an access outside of a tensor is an error.
"""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch

import flexhop
from flexhop.offline.interpret import Memory, interpret
from flexhop.options import KernelOptions
from tests.budgets import TF32, Budget
from tests.case_inputs import SMALL_TILES, Case, Inputs, Shape, make_call, make_inputs, make_loss
from tests.cases import CASES
from tests.judging import Outcome, assert_case


def interpreted(case: Case, inputs: Inputs, **generation) -> Outcome:
    """Forward and backward through the portable kernels; Gluon has no interpreter."""
    options = dataclasses.replace(case.options or KernelOptions(), backend="triton")
    call = make_call(case, inputs, kernel_options=options)
    generated = interpret(
        call, inputs.query, inputs.key, inputs.value,
        grad=make_loss(case, inputs), memory=Memory(poison=True, check_bounds=True), **generation,
    )  # fmt: skip
    return Outcome.of(case, generated.result, inputs)


def budget_of(case: Case) -> Budget | None:
    """TF32 where a case asks for it."""
    asked = case.options is not None and case.options.float32_precision == "tf32"
    return TF32 if asked else None


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_case(case: Case):
    inputs = make_inputs(case)
    assert_case(case, inputs, interpreted(case, inputs), budget=budget_of(case))


# Random problems: masks composed by and/or, lengths, groups, block sizes, tiles, captures.

MASKS = {
    "causal": lambda c: lambda b, h, q, k: q >= k,
    "window": lambda c: lambda b, h, q, k: (q - k).abs() <= c.reach,
    "documents": lambda c: lambda b, h, q, k: c.ids[b, q % c.kv] == c.ids[b, k],
    "heads": lambda c: lambda b, h, q, k: (h % 2 == 0) | (k % 3 == 0),
    "prefix": lambda c: lambda b, h, q, k: k < c.prefix[b],
    "late": lambda c: lambda b, h, q, k: q > c.start,
}
SCORES = {
    "none": None,
    "bias": lambda c: lambda s, b, h, q, k: s + c.bias[h, k],
    "distance": lambda c: lambda s, b, h, q, k: s + c.bias[h, torch.clamp(k - q, 0, 5)] - 0.1 * q,
    "cap": lambda c: lambda s, b, h, q, k: torch.tanh(s) * (1 + c.bias[h, k]),
}


def random_case(seed: int) -> Case:
    """One problem drawn from a seed."""
    draw = random.Random(seed)
    names = draw.sample(sorted(MASKS), draw.randint(1, 3))
    combine = draw.choice([flexhop.and_masks, flexhop.or_masks])
    group, kv_heads = draw.choice([1, 2, 3]), draw.choice([1, 2])
    score = draw.choice(sorted(SCORES))
    batch = draw.choice([1, 2])
    shape = Shape(
        batch, group * kv_heads, kv_heads, draw.randint(1, 70), draw.randint(6, 70),
        draw.choice([8, 16, 20]), draw.choice([16, 24]), draw.choice([None, 1]),
    )  # fmt: skip
    return Case(
        f"random_{seed}",
        score=SCORES[score],
        mask=lambda c: combine(*(MASKS[name](c) for name in names)),
        captures=lambda s, r: {
            "reach": draw.randint(0, 9), "start": draw.randint(-1, 30), "kv": s.kv_len,
            "ids": r.documents(3, s.batch, s.kv_len), "prefix": r.integers(s.kv_len, s.batch),
            "bias": r.normal(s.heads, s.kv_len),
        },
        learned=("bias",) if score != "none" else (),
        shape=shape,
        block_size=draw.choice([16, 20, 32, (16, 48), (64, 32), 128]),
        per_batch=True,
        per_head=True,
        scale=draw.choice([None, 0.5, -0.2]),
        layout=draw.choice(["contiguous", "bshd", "column", "padded"]),
        options=SMALL_TILES if draw.random() < 0.3 else None,
        lse=draw.random() < 0.5,
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(16))
def test_random_case(seed: int):
    case = random_case(seed)
    if isinstance(case.block_size, int) and case.options is not None and case.block_size % 16:
        case = dataclasses.replace(case, options=None)  # a user's tile must divide the blocks
    inputs = make_inputs(case, seed=seed)
    assert_case(case, inputs, interpreted(case, inputs))


@pytest.mark.parametrize(
    ("queries", "keys", "options"),
    [(40, 50, {}), (1, 50, {"splits": 1}), (1, 300, {"splits": 3})],
    ids=["forward", "decode", "shares"],
)
def test_the_largest_score_of_a_row_with_a_nan(queries, keys, options):
    """It is a NaN, and an infinity stays one."""
    torch.manual_seed(0)
    query, *pair = (torch.randn(1, 2, n, 32) for n in (queries, keys, keys))

    def mod(score, b, h, q_idx, kv_idx):
        is_odd = (q_idx == 0) & (kv_idx == 3)
        return torch.where(is_odd, torch.where(h == 0, float("nan"), float("inf")), score)

    def call(query, key, value):
        return flexhop.flex_attention(
            query, key, value, score_mod=mod,
            return_aux=flexhop.AuxRequest(max_scores=True),
            kernel_options=KernelOptions(backend="triton", **options),
        )[1].max_scores  # fmt: skip

    expected = (query @ pair[0].mT / 32**0.5).amax(-1)
    expected[0, :, 0] = torch.tensor([float("nan"), float("inf")])
    found = interpret(call, query, *pair).result
    torch.testing.assert_close(found, expected, equal_nan=True)
