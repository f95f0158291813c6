"""Packed sequences: equal to a loop over sequences, eager and compiled; mistakes."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import flexhop
from flexhop import errors
from flexhop.block_mask.lists import find_ranges
from flexhop.distributed import PackedSequences
from flexhop.varlen import Packing, Window, pack_mask
from tests.varlen_cases import (
    CASES,
    call_arguments,
    gradients,
    loop,
    make_operands,
    offsets,
    packed_call,
    used_keys,
)

pytestmark = pytest.mark.filterwarnings("ignore::flexhop.errors.EagerWarning")


def assert_equals_the_loop(case, operands, call) -> None:
    out, aux = call(*call_arguments(case, operands))
    expected, expected_lse = loop(case, operands)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(aux.lse, expected_lse, rtol=0, atol=1e-12)
    found, right = (gradients(case, operands, t) for t in (out, expected))
    for name, gradient in right.items():
        torch.testing.assert_close(found[name], gradient, rtol=0, atol=1e-10, msg=name)


@pytest.mark.parametrize("name", CASES)
def test_eager_equals_a_loop_over_sequences(name):
    case = CASES[name]
    operands = make_operands(case, torch.float64)
    assert_equals_the_loop(case, operands, packed_call(case, used_keys(case)))


@pytest.mark.parametrize("name", ["cross_causal", "mods"])
def test_compiled_equals_a_loop_over_sequences(name):
    case = CASES[name]
    operands = make_operands(case, torch.float64)
    call = torch.compile(packed_call(case, used_keys(case)), fullgraph=True)
    assert_equals_the_loop(case, operands, call)


def test_new_lengths_need_no_new_graph():
    torch._dynamo.reset()
    graphs = []

    def count(module, _):
        graphs.append(module)
        return module.forward

    call = torch.compile(packed_call(CASES["causal"]), fullgraph=True, dynamic=True, backend=count)
    for lengths in ((140, 7, 190), (3, 200, 64), (300, 100, 28), (9, 500, 71, 30)):
        total = sum(lengths)
        tokens = [torch.randn(total, 2, 16) for _ in range(3)]
        cut = offsets(lengths)
        out, _ = call(*tokens, torch.zeros(4, 2), cut)
        expected = flexhop.varlen_attention(*tokens, cut, is_causal=True)
        torch.testing.assert_close(out, expected)
    assert len(graphs) == 1


def test_a_million_tokens_need_few_numbers_and_visit_few_blocks():
    """Lists of blocks, one column for each block of keys, would be 2 GiB."""
    lengths = [1000] * 2000
    cut = offsets(tuple(lengths))
    total = sum(lengths)
    _, mask = pack_mask(total, total, Packing(cut, cut, None, Window(None, 0)), None)
    memory = {t.untyped_storage() for t in mask if isinstance(t, torch.Tensor)}
    distinct = {storage.data_ptr(): storage.nbytes() for storage in memory}
    assert sum(distinct.values()) == 4 * 4 * total  # two for each query, two for each key
    for ends in ((mask.first_key, mask.end_key), (mask.first_query, mask.end_query)):
        seen = ends[0][0, 0], ends[1][0, 0, :, 0]
        start, stop, _, _ = find_ranges(seen, total // 128, mask.BLOCK_SIZE)
        assert 1 <= int((stop - start).min()) and int((stop - start).max()) <= 9


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=1, max_size=5),
    reach=st.tuples(*[st.one_of(st.none(), st.integers(-2, 4))] * 2),
    bottom_right=st.booleans(),
    used=st.one_of(st.none(), st.integers(0, 3)),
    behind=st.tuples(st.integers(0, 2), st.integers(1, 2)),
)
def test_keys_know_which_queries_see_them(lengths, reach, bottom_right, used, behind):
    """The same from both sides; tokens behind the last sequence see nothing and are not seen."""
    cuts = [offsets(tuple(pair[side] for pair in lengths)) for side in (0, 1)]
    queries, keys = (int(cut[-1]) + more + 1 for cut, more in zip(cuts, behind, strict=True))
    used_k = None if used is None else torch.full((len(lengths),), used)
    packing = Packing(*cuts, used_k, Window(*reach, bottom_right))
    _, mask = pack_mask(queries, keys, packing, None)
    row, column = torch.arange(queries), torch.arange(keys)
    first, end = mask.first_key[0, 0, :, None], mask.end_key[0, 0]
    from_queries = (column >= first) & (column < end)
    first, end = mask.first_query[0, 0, :, None], mask.end_query[0, 0]
    assert torch.equal(from_queries, ((row >= first) & (row < end)).mT)
    ends = (mask.end_key[..., 0], mask.end_query[..., 0])
    for table in (mask.first_key, mask.first_query, *ends):
        assert (table.diff() >= 0).all()


def bad_calls():
    good = offsets((10, 22))
    return {
        "dtype": ({"cu_seqlens_q": good.float()}, "float32"),
        "rank": ({"cu_seqlens_q": good[None]}, "2 dimensions"),
        "device": ({"cu_seqlens_q": good.to("meta")}, "meta"),
        "list": ({"cu_seqlens_q": good, "cu_seqlens_k": [0, 10, 32]}, "cu_seqlens_k is a list"),
        "empty": ({"cu_seqlens_q": good[:1]}, "no sequence"),
        "count": ({"cu_seqlens_q": good, "cu_seqlens_k": offsets((10, 10, 12))}, "4 entries"),
        "used": ({"cu_seqlens_q": good, "seqused_k": good}, "3 entries"),
    }


def bad_values():
    return {
        "start": (torch.tensor([1, 10, 32]), "starts at 1"),
        "order": (torch.tensor([0, 20, 10, 32]), "decreases from 20 to 10 at entry 2"),
        "total": (torch.tensor([0, 20, 33]), "there are 32 tokens"),
    }


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "fullgraph"])
@pytest.mark.parametrize("name", bad_calls())
def test_wrong_offsets(name, compiled):
    arguments, text = bad_calls()[name]
    call = flexhop.varlen_attention
    if compiled:
        call = torch.compile(call, fullgraph=True, backend="eager")
    with pytest.raises(errors.SequenceOffsetsError, match=text):
        call(*(torch.randn(32, 2, 8) for _ in range(3)), **arguments)


@pytest.mark.parametrize("name", bad_values())
def test_wrong_values_are_found_without_compile(name):
    values, text = bad_values()[name]
    with pytest.raises(errors.SequenceOffsetsError, match=text):
        flexhop.varlen_attention(*(torch.randn(32, 2, 8) for _ in range(3)), values)


def test_padded_tensors_are_refused():
    with pytest.raises(errors.RankError, match="query must have 3 dimensions, but has 4"):
        flexhop.varlen_attention(*(torch.randn(1, 2, 32, 8) for _ in range(3)), offsets((32,)))


@pytest.mark.parametrize("window", [3, (-1, 0), (1, 2, 3), (0.5, None)])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "fullgraph"])
def test_wrong_windows(window, compiled):
    """-1 would hide the query's own key; flash-attn and PyTorch's varlen_attn mean no bound."""
    call = flexhop.varlen_attention
    if compiled:
        call = torch.compile(call, fullgraph=True, backend="eager")
    with pytest.raises(errors.OptionValueError, match="or None for no bound"):
        call(*(torch.randn(32, 2, 8) for _ in range(3)), offsets((32,)), window_size=window)
    with pytest.raises(errors.OptionValueError, match="window_size"):
        PackedSequences(offsets((32,)), 32, window_size=window)
