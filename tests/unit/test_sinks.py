"""Sinks: one more logit per head, without a value."""

import pytest
import torch

import flexhop
from flexhop import errors
from flexhop.ops.sinks import add_sinks
from tests.varlen_cases import offsets

pytestmark = pytest.mark.filterwarnings("ignore::flexhop.errors.EagerWarning")


def some_keys(b, h, q_idx, kv_idx):
    return (q_idx >= kv_idx) & (q_idx != 3)  # query 3 sees nothing


def make(dtype=torch.float64):
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, h, 20, 8, dtype=dtype) for h in (4, 2, 2))
    sinks = torch.randn(4, dtype=dtype)
    return tuple(t.requires_grad_() for t in (query, key, value, sinks))


def attend(query, key, value, sinks):
    mask = flexhop.create_block_mask(some_keys, None, None, 20, 20, "cpu")
    return flexhop.flex_attention(
        query, key, value, block_mask=mask, enable_gqa=True, sinks=sinks,
        return_aux=flexhop.AuxRequest(lse=True),
    )  # fmt: skip


def definition(query, key, value, sinks):
    """A softmax over one more column, whose value is 0."""
    key, value = (t.repeat_interleave(2, 1) for t in (key, value))
    index = torch.arange(20)
    visible = some_keys(0, 0, index[:, None], index[None, :])
    scores = torch.where(visible, query @ key.mT / 8**0.5, -torch.inf)
    column = sinks[None, :, None, None].expand(2, 4, 20, 1)
    scores = torch.cat([scores, column], -1)
    return scores.softmax(-1)[..., :-1] @ value, scores.logsumexp(-1)


def results(call, leaves):
    out, lse = call(*leaves)
    lse = lse.lse if isinstance(lse, flexhop.AuxOutput) else lse
    loss = (out * torch.linspace(0, 1, 8)).sum() + (lse * torch.linspace(0, 1, 20)).sum()
    return out, lse, *torch.autograd.grad(loss, leaves)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_sinks_are_one_more_column(compiled):
    leaves = make()
    call = torch.compile(attend, fullgraph=True) if compiled else attend
    for found, right in zip(results(call, leaves), results(definition, leaves), strict=True):
        torch.testing.assert_close(found, right)


def test_a_query_that_sees_nothing_has_the_sink_as_lse():
    *tensors, sinks = make()
    out, aux = attend(*tensors, sinks)
    assert (out[:, :, 3] == 0).all()
    torch.testing.assert_close(aux.lse[:, :, 3], sinks.expand(2, 4))


def test_minus_infinity_is_no_sink():
    *tensors, sinks = make()
    never = torch.full_like(sinks, -torch.inf).requires_grad_()
    out, aux = attend(*tensors, never)
    plain, plain_aux = attend(*tensors, None)
    assert torch.equal(out, plain)
    assert torch.equal(aux.lse, plain_aux.lse)
    grads = torch.autograd.grad(out.square().sum(), [*tensors, never])
    expected = torch.autograd.grad(plain.square().sum(), tensors)
    for found, right in zip(grads, [*expected, torch.zeros(4).double()], strict=True):
        torch.testing.assert_close(found, right)


@pytest.mark.parametrize("distance", [-120.0, -60.0, 0.0, 5.0, 60.0, 120.0])
def test_second_derivatives_far_from_the_scores(distance):
    found = second_derivatives(distance, torch.float32)
    right = second_derivatives(distance, torch.float64)
    for ours, exact in zip(found, right, strict=True):
        # Scores of up to 120 have an error of 4e-6 in fp32, which is the relative one of weights.
        scale = exact.abs().max().item()
        torch.testing.assert_close(ours.double(), exact, rtol=0, atol=5e-5 * scale + 1e-30)


def second_derivatives(distance, dtype):
    """Of a call whose sinks lie so far from its scores, with respect to all that it reads."""
    torch.manual_seed(0)
    out, lse, sinks = torch.randn(1, 2, 6, 4), torch.randn(1, 2, 6), torch.randn(2)
    leaves = [t.to(dtype).requires_grad_() for t in (out, lse, sinks + distance)]
    scaled, total = add_sinks(*leaves)
    loss = (scaled * torch.arange(4.0)).square().sum() + total.sin().sum()
    first = torch.autograd.grad(loss, leaves, create_graph=True)
    return torch.autograd.grad(sum(g.square().sum() for g in first), leaves)


def test_packed_sequences_have_sinks():
    cut = offsets((5, 8))
    tensors = [torch.randn(13, 2, 8, dtype=torch.float64) for _ in range(3)]
    sinks = torch.randn(2, dtype=torch.float64)
    out = flexhop.varlen_attention(*tensors, cut, sinks=sinks)
    second = [t[5:].transpose(0, 1)[None] for t in tensors]
    expected = flexhop.flex_attention(*second, sinks=sinks)
    torch.testing.assert_close(out[5:], expected[0].transpose(0, 1))


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "fullgraph"])
@pytest.mark.parametrize(
    "sinks",
    [torch.zeros(2), torch.zeros(4, dtype=torch.int64), torch.zeros(1, 4), 0.5],
    ids=["heads", "dtype", "rank", "number"],
)
def test_wrong_sinks(sinks, compiled):
    query, key, value, _ = make(torch.float32)
    call = flexhop.flex_attention
    if compiled:
        call = torch.compile(call, fullgraph=True, backend="eager")
    with pytest.raises(errors.OptionValueError, match="sinks"):
        call(query, key, value, enable_gqa=True, sinks=sinks)


def test_nested_sequences_have_sinks():
    lengths = (5, 8)
    parts = [[torch.randn(2, n, 8, dtype=torch.float64) for n in lengths] for _ in range(3)]
    sinks = torch.randn(2, dtype=torch.float64)
    nested = [
        torch.nested.nested_tensor(
            [t.transpose(0, 1) for t in tensors], layout=torch.jagged
        ).transpose(1, 2)
        for tensors in parts
    ]
    query = nested[0]
    key, value = (
        torch.nested.nested_tensor_from_jagged(t.transpose(1, 2).values(), query.offsets())
        .transpose(1, 2)
        for t in nested[1:]
    )  # fmt: skip
    out = flexhop.flex_attention(query, key, value, sinks=sinks)
    for number, found in enumerate(out.unbind()):
        alone = [tensors[number][None] for tensors in parts]
        torch.testing.assert_close(found, flexhop.flex_attention(*alone, sinks=sinks)[0])


@pytest.mark.parametrize("moved", [(3,), (0, 3)], ids=["sinks", "query and sinks"])
def test_tangents_of_rows_that_lie_before_heads(moved):
    """With dynamic shapes, PyTorch cannot copy a tangent into the layout of its result."""
    operands = [t.detach() for t in make()]
    operands[0] = operands[0].transpose(1, 2).contiguous().transpose(1, 2)

    def push(*tangents):
        def move(*chosen):
            known = dict(zip(moved, chosen, strict=True))
            *tensors, sinks = (known.get(i, t) for i, t in enumerate(operands))
            return flexhop.flex_attention(*tensors, enable_gqa=True, sinks=sinks)

        return torch.func.jvp(move, tuple(operands[i] for i in moved), tangents)

    tangents = [torch.randn_like(operands[i]) for i in moved]
    torch._dynamo.reset()
    compiled = torch.compile(push, fullgraph=True, backend="aot_eager", dynamic=True)
    torch.testing.assert_close(compiled(*tangents), push(*tangents))
