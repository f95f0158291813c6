"""Jagged nested tensors: equal to a loop over sequences, eager and compiled; mistakes."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
import torch.nn.functional as F

import flexhop
from flexhop import errors

pytestmark = [
    pytest.mark.filterwarnings("ignore::flexhop.errors.EagerWarning"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning"),
    # Dynamo asks nested inputs that are views for their .grad.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
]
RUN = pytest.mark.parametrize("compiled", [False, True], ids=["eager", "fullgraph"])
QUERIES, KEYS = (40, 0, 7, 150), (33, 5, 0, 140)


def offsets(lengths):
    return torch.tensor([0, *lengths]).cumsum(0)


def leaf(*size, dtype=torch.float64):
    return torch.randn(size, dtype=dtype, requires_grad=True)


def jagged(tokens, cut, lengths=None):
    return torch.nested.nested_tensor_from_jagged(tokens, cut, lengths).transpose(1, 2)


def tokens_of(nested):
    return nested.transpose(1, 2).values()


def slices(cut, lengths=None):
    starts = cut.tolist()
    counts = cut.diff().tolist() if lengths is None else lengths.tolist()
    return [slice(first, first + count) for first, count in zip(starts, counts, strict=False)]


def loop(leaves, places_q, places_k, score=None, keep=None):
    """One dense call per sequence, in the places of query's tokens; 0 elsewhere."""
    query, key, value = leaves
    out = torch.zeros(query.size(0), query.size(1), value.size(2), dtype=query.dtype)
    for number, (rows, columns) in enumerate(zip(places_q, places_k, strict=True)):
        parts = [t[place] for t, place in ((query, rows), (key, columns), (value, columns))]
        if parts[0].size(0) and parts[1].size(0):
            dense = one_sequence(parts, number, score, keep)
            place = torch.arange(rows.start, rows.stop)
            out = out.index_add(0, place, dense)
    return out


def one_sequence(parts, number, score, keep):
    block_mask = None
    if keep is not None:
        block_mask = flexhop.create_block_mask(
            lambda b, h, q, k: keep(b + number, h, q, k), None, None, parts[0].size(0),
            parts[1].size(0), device="cpu",
        )  # fmt: skip
    out = flexhop.flex_attention(
        *(t.transpose(0, 1)[None] for t in parts),
        None if score is None else lambda s, b, h, q, k: score(s, b + number, h, q, k),
        block_mask, enable_gqa=True,
    )  # fmt: skip
    return out[0].transpose(0, 1)


def run(function, compiled):
    return torch.compile(function, fullgraph=True, backend="aot_eager") if compiled else function


def assert_same(found, expected, leaves):
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    grad = torch.randn_like(expected)
    pairs = zip(
        torch.autograd.grad(found, leaves, grad), torch.autograd.grad(expected, leaves, grad),
        strict=True,
    )  # fmt: skip
    for one, other in pairs:
        torch.testing.assert_close(one, other, rtol=0, atol=1e-11)


def keep_some(b, h, q, k):
    return (q >= k) | ((q + k + b) % 3 == 0)


@RUN
@pytest.mark.parametrize("masked", [False, True], ids=["all", "block_mask"])
def test_equals_a_loop_over_sequences(compiled, masked):
    leaves = leaf(197, 4, 16), leaf(178, 2, 16), leaf(178, 2, 8)
    slopes = leaf(4, 4)
    table = leaf(160)  # has no entry behind the longest sequence
    cut_q, cut_k = offsets(QUERIES), offsets(KEYS)
    query, key, value = (jagged(t, c) for t, c in zip(leaves, (cut_q, cut_k, cut_k), strict=True))
    mask = None
    if masked:
        mask = flexhop.create_nested_block_mask(keep_some, 4, None, query, key, BLOCK_SIZE=16)

    def score(s, b, h, q, k):
        return s + slopes[b, h] * 0.05 * (q - k) + table[q] * table[k]

    def call(query, key, value):
        return flexhop.flex_attention(query, key, value, score, mask, enable_gqa=True)

    out = run(call, compiled)(query, key, value)
    assert out.shape == (4, 4, query.size(2), 8)
    expected = loop(leaves, slices(cut_q), slices(cut_k), score, keep_some if masked else None)
    assert_same(tokens_of(out), expected, (*leaves, slopes, table))


@RUN
def test_holes(compiled):
    leaves = leaf(60, 2, 16), leaf(50, 2, 16), leaf(50, 2, 16)
    cut_q, cut_k = torch.tensor([3, 20, 41, 58]), torch.tensor([2, 12, 30, 47])
    used_q, used_k = torch.tensor([17, 0, 9]), torch.tensor([4, 18, 0])
    table = leaf(17)  # as long as the longest sequence, without its hole

    def score(s, b, h, q, k):
        return s + table[q]

    def call(*leaves):
        query = jagged(leaves[0], cut_q, used_q)
        key, value = (jagged(t, cut_k, used_k) for t in leaves[1:])
        out = flexhop.flex_attention(query, key, value, score)
        # AOTAutograd cannot return a nested tensor with holes that requires gradients.
        return tokens_of(out), out.offsets(), out.lengths()

    tokens, *cut = run(call, compiled)(*leaves)
    assert torch.equal(cut[0], cut_q) and torch.equal(cut[1], used_q)
    expected = loop(leaves, slices(cut_q, used_q), slices(cut_k, used_k), score)
    assert_same(tokens, expected, (*leaves, table))


def test_narrowed_key_cache():
    cache = torch.randn(3, 20, 2, 8, dtype=torch.float64)
    lengths = torch.tensor([4, 20, 1])
    key = torch.nested.narrow(cache, 1, 0, lengths, layout=torch.jagged).transpose(1, 2)
    query = jagged(torch.randn(3, 2, 8, dtype=torch.float64), torch.arange(4))
    out = tokens_of(flexhop.flex_attention(query, key, key))
    for number, length in enumerate(lengths.tolist()):
        row = tokens_of(query)[number][None, :, None]
        seen = cache[number, :length].transpose(0, 1)[None]
        expected = flexhop.flex_attention(row, seen, seen)
        torch.testing.assert_close(out[number], expected[0, :, 0])


@RUN
def test_projections_of_one_jagged_input(compiled):
    torch.manual_seed(0)
    project = torch.nn.Linear(16, 48).double()
    tokens, cut = leaf(47, 16), offsets((40, 7))

    def attend(attention, tokens, cut, copy=False):
        x = torch.nested.nested_tensor_from_jagged(tokens, cut)
        q, k, v = (t.unflatten(-1, (2, 8)) for t in project(x).chunk(3, -1))
        if copy:  # PyTorch's needs it
            q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        return attention(q, k, v).transpose(1, 2).flatten(-2) + x

    leaves = (tokens, *project.parameters())
    own = run(functools.partial(attend, flexhop.scaled_dot_product_attention), compiled)
    expected = attend(F.scaled_dot_product_attention, tokens, cut, copy=True)
    assert_same(own(tokens, cut).values(), expected.values(), leaves)


@pytest.mark.parametrize("wanted", list(itertools.product((False, True), repeat=3)))
def test_any_of_them_may_require_gradients(wanted):
    leaves = [leaf(17, 2, 8).detach().requires_grad_(needed) for needed in wanted]
    cut = offsets((10, 7))
    nested = [jagged(t, cut) for t in leaves]
    out = flexhop.scaled_dot_product_attention(*nested)
    expected = F.scaled_dot_product_attention(*nested)
    assert out.requires_grad == expected.requires_grad == any(wanted)
    learned = [t for t in leaves if t.requires_grad]
    if learned:
        assert_same(tokens_of(out), tokens_of(expected), learned)


def test_gradients_of_nested_leaves():
    leaves = [
        jagged(torch.randn(17, 2, 8), offsets((10, 7))).detach().requires_grad_() for _ in range(3)
    ]
    # Sequences are those of one another only if the offsets are.
    key = leaves[1]
    flexhop.scaled_dot_product_attention(leaves[0], key, leaves[2]).values().sum().backward()
    for nested in leaves:
        assert nested.grad is not None and nested.grad.shape == nested.shape


def test_compiled_by_inductor():
    leaves = [leaf(47, 2, 16) for _ in range(3)]
    cut = offsets((40, 7))

    def attend(attention, *leaves):
        return tokens_of(attention(*(jagged(t, cut) for t in leaves)))

    own = torch.compile(functools.partial(attend, flexhop.flex_attention), fullgraph=True)
    assert_same(own(*leaves), attend(F.scaled_dot_product_attention, *leaves), leaves)


@RUN
def test_statistics_are_nested(compiled):
    nested = jagged(leaf(17, 2, 8), offsets((10, 7)))

    def call(nested):
        request = flexhop.AuxRequest(lse=True, max_scores=True)
        return flexhop.flex_attention(nested, nested, nested, return_aux=request)

    _, aux = run(call, compiled)(nested)
    assert aux.lse.shape == aux.max_scores.shape == nested.shape[:3]
    first = nested.unbind()[0]
    scores = first @ first.mT / 8**0.5
    torch.testing.assert_close(aux.lse.unbind()[0], scores.logsumexp(-1))
    torch.testing.assert_close(aux.max_scores.unbind()[0], scores.amax(-1))


@pytest.mark.parametrize("causal", [False, True])
def test_causal_is_aligned_at_the_first_token(causal):
    leaves = leaf(12, 2, 8), leaf(20, 2, 8), leaf(20, 2, 8)
    cuts = offsets((5, 7)), offsets((16, 4)), offsets((16, 4))
    nested = [jagged(t, cut) for t, cut in zip(leaves, cuts, strict=True)]
    nested[2] = jagged(leaves[2], nested[1].offsets())
    out = flexhop.scaled_dot_product_attention(*nested, is_causal=causal)
    for number, result in enumerate(out.unbind()):
        parts = [t.unbind()[number] for t in nested]
        expected = F.scaled_dot_product_attention(*parts, is_causal=causal)
        torch.testing.assert_close(result, expected)


@RUN
def test_layout_of_the_output(compiled):
    nested = jagged(leaf(17, 2, 8), offsets((10, 7)))
    out = run(flexhop.scaled_dot_product_attention, compiled)(nested, nested, nested)
    expected = F.scaled_dot_product_attention(nested, nested, nested)
    assert out.layout == expected.layout and out.stride() == expected.stride()
    assert out.shape == nested.shape  # the same ragged dimension
    assert out.transpose(1, 2).is_contiguous()
    assert (out + nested).shape == nested.shape


@RUN
def test_autocast(compiled):
    nested = jagged(leaf(17, 2, 8, dtype=torch.float32), offsets((10, 7)))
    call = run(flexhop.scaled_dot_product_attention, compiled)
    with torch.autocast("cpu", torch.bfloat16):
        out = call(nested, nested, nested)
    exact = nested.detach().double()
    expected = F.scaled_dot_product_attention(exact, exact, exact)
    assert out.dtype == torch.bfloat16
    error = (out.values() - expected.values()).abs().max()
    assert error <= 4 * torch.finfo(torch.bfloat16).eps * exact.values().abs().max()


def test_new_lengths_need_no_new_graph():
    torch._dynamo.reset()
    graphs = []

    def count(module, _):
        graphs.append(module)
        return module.forward

    def call(tokens, cut):
        nested = jagged(tokens, cut)
        return tokens_of(flexhop.scaled_dot_product_attention(nested, nested, nested))

    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend=count)
    for lengths in ((140, 7, 190), (3, 200, 64), (300, 100, 28), (9, 500, 71, 30)):
        tokens, cut = torch.randn(sum(lengths), 2, 16), offsets(lengths)
        torch.testing.assert_close(compiled(tokens, cut), call(tokens, cut))
    assert len(graphs) == 1


def test_block_mask_visits_only_what_is_needed():
    nested = jagged(torch.randn(192, 2, 8), offsets((64, 128)))
    mask = flexhop.create_nested_block_mask(
        lambda b, h, q, k: q >= k, 2, None, nested, BLOCK_SIZE=64
    )
    expected = torch.tensor([[1, 0, 0], [0, 1, 0], [0, 1, 1]], dtype=torch.int32)
    assert torch.equal(mask.to_dense()[0, 0], expected)


def bad_operands():
    cut = offsets((10, 7))
    tokens = torch.randn(17, 2, 8)
    good = jagged(tokens, cut)
    three = torch.randn(3, 2, 8)
    strided = torch.nested.nested_tensor([torch.randn(2, 10, 8), torch.randn(2, 7, 8)])
    return {
        "dense": ((good, torch.randn(2, 2, 10, 8), good), "key is dense"),
        "dense query": ((torch.randn(2, 2, 10, 8), good, good), "query is dense"),
        "strided": ((strided, strided, strided), "query has layout torch.strided"),
        "heads": ((good.transpose(1, 2),) * 3, "query is ragged in dimension 1"),
        "rank": ((jagged(tokens[..., 0], cut),) * 3, "query has 3 dimensions"),
        "count": ((good, jagged(three, torch.arange(4)), good), "key has 3 sequences"),
        "places": ((good, good, jagged(tokens, offsets((9, 8)))), "value has different sequences"),
    }


@RUN
@pytest.mark.parametrize("attention", ["flex_attention", "scaled_dot_product_attention"])
@pytest.mark.parametrize(
    "name", ["dense", "dense query", "strided", "heads", "rank", "count", "places"]
)
def test_operands_that_do_not_fit(name, compiled, attention):
    if name in ("places", "strided") and compiled:
        pytest.skip("compiled code does not look at offsets, and Dynamo refuses strided ones")
    operands, text = bad_operands()[name]
    with pytest.raises(errors.NestedOperandError, match=text):
        run(getattr(flexhop, attention), compiled)(*operands)


@RUN
def test_masks_of_dense_tensors_are_refused(compiled):
    nested = jagged(torch.randn(17, 2, 8), offsets((10, 7)))
    mask = flexhop.create_block_mask(flexhop.noop_mask, None, None, 17, 17, device="cpu")
    with pytest.raises(
        errors.NestedOperandError, match="block_mask was created for dense tensors"
    ):
        run(flexhop.flex_attention, compiled)(nested, nested, nested, block_mask=mask)


def test_masks_of_other_sequences_are_refused():
    nested, other = (jagged(torch.randn(17, 2, 8), offsets(n)) for n in ((10, 7), (9, 8)))
    mask = flexhop.create_nested_block_mask(flexhop.noop_mask, None, None, other)
    with pytest.raises(errors.NestedOperandError, match="created for different sequences"):
        flexhop.flex_attention(nested, nested, nested, block_mask=mask)


def test_masks_that_cannot_be_made():
    create = functools.partial(flexhop.create_nested_block_mask, flexhop.noop_mask)
    nested = jagged(torch.randn(17, 2, 8), offsets((10, 7)))
    with pytest.raises(errors.NestedOperandError, match="q_nt is not a nested tensor"):
        create(None, None, torch.randn(2, 2, 8, 8))
    with pytest.raises(errors.NestedOperandError, match="B is 3, but must be None, 1 or 2"):
        create(3, None, nested)
    with pytest.raises(errors.NestedOperandError, match="kv_nt has 1 sequences, but q_nt has 2"):
        create(None, None, nested, jagged(torch.randn(17, 2, 8), offsets((17,))))


def test_what_is_chosen_is_reported_on_request():
    nested = jagged(torch.randn(300, 2, 64, dtype=torch.bfloat16), offsets((100, 200)))
    mask = flexhop.create_nested_block_mask(lambda b, h, q, k: q >= k, None, None, nested)
    report = flexhop.explain(nested, nested, nested, block_mask=mask)
    assert report.mask is not None and report.mask.shape == (1, 1, 300, 300)
    with pytest.raises(errors.NestedOperandError, match="key is dense"):
        flexhop.explain(nested, torch.randn(1, 2, 300, 64), nested)
