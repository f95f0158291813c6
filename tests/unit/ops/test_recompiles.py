"""How often Dynamo compiles."""

import functools

import pytest
import torch

from flexhop import BlockMask, KernelOptions, flex_attention, noop_mask
from tests.unit.ops.support import (
    BATCH,
    HEADS,
    LENGTH,
    Counted,
    assert_same,
    causal_mask,
    operands,
    quiet,
)

pytestmark = quiet


def counts(run, calls):
    found = []
    for call in calls:
        run(*call)
        found.append(run.graphs)
    return found


def with_bias(query, key, value, table):
    return flex_attention(query, key, value, lambda s, b, h, q, k: s + table[h])


def scaled(query, key, value, number):
    return flex_attention(query, key, value, lambda s, b, h, q, k: s * number)


def branched(query, key, value, flag):
    return flex_attention(query, key, value, lambda s, b, h, q, k: s * 3 if flag else s + k)


def test_closures_made_inside():
    calls = [(*operands(), torch.randn(HEADS)) for _ in range(3)]
    assert counts(Counted(with_bias), calls) == [1, 1, 1]


def _bias_closure():
    table = torch.randn(HEADS)
    return lambda s, b, h, q, k: s + table[h]


def _bias_partial():
    return functools.partial(_bias, torch.randn(HEADS))


def _bias(table, score, b, h, q_idx, kv_idx):
    return score + table[h]


@pytest.mark.parametrize("make", [_bias_closure, _bias_partial])
def test_mods_made_outside(make):
    assert counts(Counted(flex_attention), [(*operands(), make()) for _ in range(3)]) == [1, 1, 1]


def _random_mask():
    order = torch.randint(0, 3, (LENGTH,))
    return causal_mask(mask_mod=lambda b, h, q, k: order[q] >= order[k])


def test_block_masks_made_outside():
    calls = [(*operands(), None, _random_mask()) for _ in range(3)]
    assert counts(Counted(flex_attention), calls) == [1, 1, 1]


def test_an_int_becomes_symbolic():
    calls = [(*operands(), number) for number in (2, 3, 4, 7)]
    assert counts(Counted(scaled), calls) == [1, 2, 2, 2]
    for number in (2, 3):
        assert_same(scaled, [*operands(grad=True), number], run=Counted(scaled, dynamic=True))


@pytest.mark.parametrize("number", [1.5, 2.5])
def test_a_float_is_right(number):
    assert_same(scaled, [*operands(grad=True), number])


def test_a_bool_compiles_anew():
    run = Counted(branched)
    for flag in (True, False):
        assert_same(branched, [*operands(), flag], run=run)
    assert run.graphs == 2


def test_other_options_compile_anew():
    first, second = {"BLOCK_M": 32}, {"BLOCK_M": 64}
    options = [first, second, dict(first), KernelOptions(prescale_qk=True), {"PRESCALE_QK": True}]
    run, found = Counted(flex_attention), []
    for option in options:
        run(*operands(), kernel_options=option)
        found.append(run.graphs)
    assert found[:4] == [1, 2, 2, 3]


@pytest.mark.parametrize(("dynamic", "wanted"), [(None, [1, 2, 2, 2]), (True, [1, 1, 1, 1])])
def test_changing_lengths_forward_and_backward(dynamic, wanted):
    def function(query, key, value):
        return flex_attention(query, key, value, lambda s, b, h, q, k: s + q - k)

    run, found = Counted(function, dynamic), []
    for length in (24, 40, 33, 24):
        assert_same(function, operands(length=length, grad=True), run=run)
        found.append(run.graphs)
    assert found == wanted


@pytest.mark.parametrize("dynamic", [None, True])
def test_changing_batch_and_length_with_masks_and_partials(dynamic):
    def function(query, key, value, mask, score_mod):
        return flex_attention(query, key, value, score_mod, mask)

    run, found = Counted(function, dynamic), []
    for batch, length in ((5, 64), (3, 48), (4, 80), (6, 96)):
        inputs = operands(batch, length, grad=True)
        assert_same(function, [*inputs, causal_mask(length), _bias_partial()], run=run)
        found.append(run.graphs)
    assert found == ([1, 1, 1, 1] if dynamic else [1, 2, 2, 2])


def test_equal_sizes_at_the_first_call_cost_one_graph_at_most():
    """Duck sizing takes batch and number of blocks for one symbol if they are equal at first."""

    def function(query, key, value, mask):
        return flex_attention(query, key, value, None, mask)

    calls = [
        (*operands(batch, length), causal_mask(length))
        for batch, length in ((4, 64), (3, 96), (5, 160), (6, 80))
    ]
    assert counts(Counted(function, dynamic=True), calls) == [1, 2, 2, 2]


def test_sizes_in_a_mod_are_symbols():
    def function(query, key, value):
        batch, length = query.size(0), query.size(2)
        return flex_attention(
            query, key, value, lambda s, b, h, q, k: s + batch * (q - k) / length
        )

    run = Counted(function, dynamic=True)
    for batch in (4, 16, 5):
        assert_same(function, operands(batch, grad=True), run=run)
    assert run.graphs == 1


def test_an_offset_in_a_mask_is_a_symbol():
    full = causal_mask(mask_mod=noop_mask)

    def function(query, key, value, offset):
        mask = BlockMask.from_kv_blocks(
            full.full_kv_num_blocks,
            full.full_kv_indices,
            BLOCK_SIZE=16,
            mask_mod=lambda b, h, q, k: q + offset >= k,
            seq_lengths=(LENGTH, LENGTH),
        )
        return flex_attention(query, key, value, None, mask)

    run = Counted(function, dynamic=True)
    for offset in (2, 5, 7):
        assert_same(function, [*operands(), offset], run=run)
    assert run.graphs == 1


def test_growing_keys_of_one_query():
    run, found = Counted(flex_attention), []
    for length in range(48, 53):
        query = torch.randn(BATCH, HEADS, 1, 8)
        key, value = torch.randn(2, BATCH, HEADS, length, 8)
        torch.testing.assert_close(run(query, key, value), flex_attention(query, key, value))
        found.append(run.graphs)
    assert found == [1, 2, 2, 2, 2]


@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def test_lengths_that_data_determine():
    """Without a torch._check by the user. A length of 0 is found when the graph runs."""

    def attend(x, kept):
        chosen = x[:, :, kept.nonzero().squeeze(1)]
        return flex_attention(chosen, chosen, chosen)

    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    x = torch.randn(1, 2, 30, 8)
    for count in (1, 2, 19):
        kept = torch.arange(30) < count
        torch.testing.assert_close(compiled(x, kept), attend(x, kept))
    with pytest.raises(RuntimeError, match=r">= 1|at least one token"):
        compiled(x, torch.zeros(30, dtype=torch.bool))
