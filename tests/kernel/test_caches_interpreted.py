"""Kernels that read a cache, in Triton's interpreter: pages, low precision, both, and sinks."""

import pytest
import torch

import flexhop
from flexhop.offline.interpret import Memory, interpret
from tests.budgets import assert_within_budget
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
from tests.caches import place


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


@pytest.mark.filterwarnings("ignore::flexhop.errors.EagerWarning")
@pytest.mark.parametrize(
    ("queries", "dtype", "is_apart"),
    [(1, torch.bool, True), (2, torch.int8, False), (1, torch.int32, False)],
)
def test_a_mask_of_keys(queries, dtype, is_apart):
    """One of bytes is evaluated apart from the scores; a sequence is empty, one sees nothing."""
    torch.manual_seed(0)
    query = torch.randn(4, 6, queries, 32, dtype=torch.float16)
    key, value = (torch.randn(4, 2, 304, 32, dtype=torch.float16) for _ in range(2))
    paged, keep = place(key, value, [177, 0, 45, 304], 16), (torch.rand(4, 304) < 0.3).to(dtype)
    keep[2] = 0
    query[0, 0] = torch.nan

    def mask_mod(b, h, q_idx, kv_idx):
        return (keep[b, kv_idx] != 0) & (q_idx + 170 >= kv_idx)

    mask = flexhop.create_block_mask(mask_mod, 4, None, queries, 304, "cpu", BLOCK_SIZE=(128, 48))

    def call(query, key, value):
        out, aux = flexhop.flex_attention(
            query, key, value, block_mask=mask, page_table=paged.table, enable_gqa=True,
            return_aux=flexhop.AuxRequest(max_scores=True),
        )  # fmt: skip
        return out, aux.max_scores

    caches = paged.key_cache, paged.value_cache
    found = interpret(call, query, *caches, memory=Memory(poison=True, check_bounds=True))
    assert found.kernel_with("attend_share").constants["ISOLATE_MASK_MOD"] is is_apart
    out, largest = found.result
    exact, exact_largest = call(query.double(), *(cache.double() for cache in caches))
    assert (out[1:3] == 0).all()
    assert out[0, 0].isnan().all() and not out[0, 1:].isnan().any()
    assert torch.equal(largest.isnan(), exact_largest.isnan())
    results = (out, exact, call(query, *caches)[0])
    assert_within_budget(*(result[:, 1:] for result in results), name="out")
