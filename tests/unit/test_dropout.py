"""Dropout by definition: random words, the mask, seeds, gradients, graphs, every front door."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

import flexhop
from flexhop import errors
from flexhop.flash import flash_attn_func, flash_attn_varlen_func
from flexhop.ops.dropout import philox
from tests.dropout_cases import differentiate, double, dropped_attention

pytestmark = pytest.mark.filterwarnings("ignore::flexhop.errors.EagerWarning")

P = 0.3
SEED = torch.tensor([4023233417, 2868451234])
BACKENDS = ["eager", "aot_eager", "inductor"]


def compiled(function, backend):
    """The function without torch.compile, or with it."""
    if backend == "eager":
        return function
    return torch.compile(function, fullgraph=True, backend=backend)


def operands(queries=40, keys=50, heads=(4, 2), dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    sizes = ((2, heads[0], queries, 16), (2, heads[1], keys, 16), (2, heads[1], keys, 8))
    return tuple(
        torch.randn(size, generator=generator).to(dtype).requires_grad_() for size in sizes
    )


def grad_like(out):
    return torch.randn(out.shape, generator=torch.Generator().manual_seed(9)).to(out.dtype)


# Known answers of Random123's kat_vectors: counter, key, words.
KNOWN = [
    ("0" * 32, "0" * 16, "6627e8d5e169c58dbc57ac4c9b00dbd8"),
    ("f" * 32, "f" * 16, "408f276d41c83b0ea20bc7c66d5451fd"),
    (
        "243f6a8885a308d313198a2e03707344", "a4093822299f31d0",
        "d16cfe0994fdcceb5001e42024126ea1",
    ),
]  # fmt: skip


def words(text):
    return tuple(torch.tensor(int(text[i : i + 8], 16)) for i in range(0, len(text), 8))


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
@pytest.mark.parametrize("backend", BACKENDS)
def test_philox_gives_the_known_answers(counter, key, expected, backend):
    found = compiled(philox, backend)(words(counter), words(key))
    assert found == words(expected)


def test_the_mask_has_the_rate_and_no_pattern():
    shape = (4, 8, 256, 256)
    kept = flexhop.dropout_mask(SEED, P, shape).double()
    deviation = math.sqrt(P * (1 - P))
    assert abs(kept.mean() - (1 - P)) < 4 * deviation / math.sqrt(kept.numel())
    # Rates of rows, columns, heads and batches scatter as those of independent draws do.
    for dims in ((0, 1, 2), (0, 1, 3), (0, 2, 3), (1, 2, 3)):
        rates = kept.mean(dims)
        count = kept.numel() / rates.numel()
        assert (rates - (1 - P)).abs().max() < 5 * deviation / math.sqrt(count)
    # Neighbours, and weights that share a call of Philox, are not correlated.
    centred = (kept - (1 - P)) / deviation
    for dim in range(4):
        for shift in (1, 2) if dim < 2 else (1, 2, 4, 8, 16, 32):
            product = (centred * centred.roll(shift, dim)).mean()
            assert abs(product) < 5 / math.sqrt(kept.numel()), (dim, shift)
    both = (centred * centred.roll((8, 8), (2, 3))).mean()
    assert abs(both) < 5 / math.sqrt(kept.numel())


@pytest.mark.parametrize("change", [(1, 0), (0, 1)])
def test_every_bit_of_the_seed_counts(change):
    other = torch.tensor([1 << 31, 1 << 31]) * torch.tensor(change) ^ SEED
    first, second = (flexhop.dropout_mask(seed, 0.5, (1, 2, 128, 128)) for seed in (SEED, other))
    same = (first == second).double().mean()
    assert abs(same - 0.5) < 5 * 0.5 / math.sqrt(first.numel())


def test_the_mask_of_a_part_is_part_of_the_mask():
    whole = flexhop.dropout_mask(SEED, P, (3, 4, 100, 90))
    assert torch.equal(whole[:2, :3, :37, :51], flexhop.dropout_mask(SEED, P, (2, 3, 37, 51)))


@pytest.mark.parametrize("p", [1e-3, 0.5, 0.999])
def test_rates(p):
    kept = flexhop.dropout_mask(SEED, p, (1, 8, 256, 512)).double()
    p = round(p * 65536) / 65536  # what 16 bits can say
    assert abs(kept.mean() - (1 - p)) < 5 * math.sqrt(p * (1 - p) / kept.numel())


@pytest.mark.parametrize("backend", BACKENDS)
def test_results_and_gradients_follow_from_the_mask(backend):
    leaves = double(operands())
    bias = torch.randn(4, 90, dtype=torch.float64).requires_grad_()
    mask = flexhop.create_block_mask(
        lambda b, h, q, k: q + 10 >= k, None, None, 40, 50, "cpu", BLOCK_SIZE=16
    )

    def call(query, key, value, bias):
        out, aux = flexhop.flex_attention(
            query, key, value, lambda s, b, h, q, k: s + bias[h, q - k + 49], mask,
            enable_gqa=True, return_aux=flexhop.AuxRequest(lse=True), dropout_p=P,
            dropout_seed=SEED,
        )  # fmt: skip
        return out, aux.lse

    kept = flexhop.dropout_mask(SEED, P, (2, 4, 40, 50))
    visible = torch.arange(40)[:, None] + 10 >= torch.arange(50)
    expected = dropped_attention(
        leaves, kept, P, visible=visible, score_mod=lambda s, b, h, q, k: s + bias[h, q - k + 49]
    )
    grad = grad_like(expected[0])
    found = differentiate(compiled(call, backend)(*leaves, bias), (*leaves, bias), grad)
    wanted = differentiate(expected, (*leaves, bias), grad)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-11)


@pytest.mark.parametrize("backend", BACKENDS)
def test_manual_seed_decides(backend):
    query, key, value = operands()
    call = compiled(
        lambda: flexhop.flex_attention(query, key, value, enable_gqa=True, dropout_p=P), backend
    )

    def run(seed):
        torch.manual_seed(seed)
        out = call()
        return out, *torch.autograd.grad(out.square().sum(), (query, key, value))

    first, again, other = run(1), run(1), run(2)
    for a, b, c in zip(first, again, other, strict=True):
        assert torch.equal(a, b)
        assert not torch.equal(a, c)
    assert not torch.equal(call(), call())  # each call draws anew


def test_the_seed_of_a_call_can_be_drawn_before():
    query, key, value = operands()
    torch.manual_seed(5)
    out = flexhop.flex_attention(query, key, value, enable_gqa=True, dropout_p=P)
    torch.manual_seed(5)
    seed = flexhop.dropout_seed("cpu")
    again = flexhop.flex_attention(
        query, key, value, enable_gqa=True, dropout_p=P, dropout_seed=seed
    )
    assert torch.equal(out, again)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_draws_the_same_mask_again(backend, reentrant):
    """The gradient belongs to the mask that made the output, whoever recomputes what."""
    if reentrant and backend != "eager":
        pytest.skip("Dynamo takes only use_reentrant=False")
    query, key, value = operands(heads=(2, 2), dtype=torch.float64)

    def layer(value):
        out = flexhop.flex_attention(query.detach(), key.detach(), value, dropout_p=P)
        return out + F.dropout(value[:, :, :40], 0.2) * 0.0

    def model(value):
        return checkpoint(layer, value, use_reentrant=reentrant)

    call = compiled(model, backend)
    torch.manual_seed(3)
    # out is linear in value: out.sum() is value's product with its gradient.
    out = call(value)
    out.sum().backward()
    grad = value.grad
    torch.testing.assert_close((grad * value).sum(), out.sum(), rtol=1e-10, atol=1e-10)


def test_a_traced_graph_draws_in_every_run():
    query, key, value = (t.detach() for t in operands())

    def call(query, key, value):
        return flexhop.flex_attention(query, key, value, enable_gqa=True, dropout_p=P)

    graph = make_fx(call)(query, key, value)
    assert not torch.equal(graph(query, key, value), graph(query, key, value))

    class Model(torch.nn.Module):
        def forward(self, query, key, value):
            return call(query, key, value)

    program = torch.export.export(Model(), (query, key, value)).module()
    torch.manual_seed(1)
    exported = program(query, key, value)
    torch.manual_seed(1)
    torch.testing.assert_close(exported, call(query, key, value))


def test_fake_tensors():
    with FakeTensorMode():
        query, key, value = (torch.zeros(2, 4, 40, 16) for _ in range(3))
        out = flexhop.flex_attention(query, key, value, dropout_p=P)
    assert out.shape == (2, 4, 40, 16)


def test_graphs_without_dropout_do_not_show_it():
    graphs = []

    def keep(graph, inputs):
        graphs.append(graph)
        return graph.forward

    query, key, value = (t.detach() for t in operands())
    call = torch.compile(flexhop.flex_attention, backend=keep, fullgraph=True)
    call(query, key, value, enable_gqa=True, dropout_p=0.0)
    names = [str(node.target) for node in graphs[0].graph.nodes if node.op == "call_function"]
    assert names[0] == "flexhop_attention"
    assert not any("rand" in name for name in names)


def test_no_dropout_draws_nothing():
    query, key, value = operands()
    torch.manual_seed(1)
    before = torch.get_rng_state()
    flexhop.flex_attention(query, key, value, enable_gqa=True, dropout_p=0.0)
    with pytest.raises(errors.OptionValueError):
        flexhop.flex_attention(query, key, value, enable_gqa=True, dropout_p=2.0)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_every_door_drops_by_the_same_mask(backend):
    """Packed and nested tokens are one batch, and their places in the packed tensors count."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(60, 2, 16, generator=generator) for _ in range(3))
    cuts = torch.tensor([0, 20, 20, 60], dtype=torch.int32)

    def call(query, key, value):
        packed = flexhop.varlen_attention(query, key, value, cuts, dropout_p=P, dropout_seed=SEED)
        nested = (
            torch.nested.nested_tensor_from_jagged(t, cuts.long()).transpose(1, 2)
            for t in (query, key, value)
        )
        out = flexhop.flex_attention(*nested, dropout_p=P, dropout_seed=SEED)
        return packed, out.transpose(1, 2).values()

    kept = flexhop.dropout_mask(SEED, P, (1, 2, 60, 60))
    owner = torch.bucketize(torch.arange(60), cuts[1:], right=True)
    batch = tuple(t.transpose(0, 1)[None] for t in (query, key, value))
    expected, _ = dropped_attention(batch, kept, P, visible=owner[:, None] == owner)
    for found in compiled(call, backend)(query, key, value):
        torch.testing.assert_close(found, expected[0].transpose(0, 1))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_flash_returns_weights_with_the_sign_of_the_mask(backend):
    query, key, value = (
        torch.randn(2, length, 2, 16, generator=torch.Generator().manual_seed(length))
        for length in (37, 50, 50)
    )
    call = compiled(flash_attn_func, backend)
    out, lse, weights = call(
        query, key, value, P, causal=True, softcap=10.0, return_attn_probs=True
    )
    kept = weights.clamp(min=0) / (1 - P)
    torch.testing.assert_close(out, torch.einsum("bhmn,bnhd->bmhd", kept, value))
    torch.testing.assert_close(weights.abs().sum(-1), torch.ones(2, 2, 37))
    rate = (weights < 0).sum() / (weights != 0).sum()
    assert abs(rate - P) < 0.05
    assert lse.shape == (2, 2, 37)


def test_flash_returns_weights_of_sequences():
    query, key, value = (torch.randn(length, 2, 16) for length in (37, 50, 50))
    cuts, key_cuts = (torch.tensor(c, dtype=torch.int32) for c in ([0, 5, 5, 37], [0, 7, 20, 50]))
    out, _, weights = flash_attn_varlen_func(
        query, key, value, cuts, key_cuts, 32, 30, P, causal=True, return_attn_probs=True
    )
    assert weights.shape == (3, 2, 32, 30)
    for s in range(3):
        q, k = (slice(int(c[s]), int(c[s + 1])) for c in (cuts, key_cuts))
        own = weights[s, :, : q.stop - q.start, : k.stop - k.start]
        expected = torch.einsum("hmn,nhd->mhd", own.clamp(min=0) / (1 - P), value[k])
        torch.testing.assert_close(out[q], expected)


def test_scaled_dot_product_attention_drops():
    query, key, value = operands(heads=(4, 4))
    torch.manual_seed(0)
    out = flexhop.scaled_dot_product_attention(query, key, value, dropout_p=P)
    torch.manual_seed(0)
    kept = flexhop.dropout_mask(flexhop.dropout_seed(), P, (2, 4, 40, 50))
    torch.testing.assert_close(out, dropped_attention((query, key, value), kept, P)[0])


def test_expectation_is_attention_without_dropout():
    query, key, value = (t.detach() for t in operands(heads=(2, 2)))
    torch.manual_seed(0)
    runs = [flexhop.flex_attention(query, key, value, dropout_p=P) for _ in range(200)]
    found = torch.stack(runs)
    error = found.mean(0) - flexhop.flex_attention(query, key, value)
    assert (error.abs() < 6 * found.std(0) / math.sqrt(len(runs))).all()


WRONG = {
    "one": ({"dropout_p": 1.0}, r"dropout_p value 1\.0"),
    "negative": ({"dropout_p": -0.1}, r"dropout_p value -0\.1"),
    "nan": ({"dropout_p": float("nan")}, "dropout_p value nan"),
    "text": ({"dropout_p": "0.1"}, "dropout_p value 'str'"),
    "seed dtype": (
        {"dropout_p": P, "dropout_seed": SEED.int()}, r"torch.int32 of shape \[2\] on cpu",
    ),
    "seed shape": ({"dropout_p": P, "dropout_seed": SEED[:1]}, r"must be int64 of shape \[2\]"),
    "seed type": ({"dropout_p": P, "dropout_seed": 7}, "dropout_seed value 'int'"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_what_is_refused(name, backend):
    keywords, text = WRONG[name]
    query, key, value = operands()
    with pytest.raises(errors.OptionValueError, match=text):
        compiled(flexhop.flex_attention, backend)(query, key, value, enable_gqa=True, **keywords)


def test_vmap():
    """Eagerly `randomness` means what it says; compiled, the fold would change the mask."""
    query = torch.ones(3, 2, 40, 16)

    def call(x):
        return flexhop.flex_attention(x[None], x[None], x[None], dropout_p=P)

    for randomness in ("same", "different"):
        out = torch.vmap(call, randomness=randomness)(query)
        assert torch.equal(out[0], out[1]) == (randomness == "same")
    mapped = torch.vmap(call, randomness="same")
    with pytest.raises(errors.VmapError, match="the dropout"):
        torch.compile(mapped, backend="aot_eager", fullgraph=True)(query)


def test_explain_says_why_the_hopper_kernel_does_not_serve():
    tensors = (torch.zeros(1, 2, 256, 128, dtype=torch.bfloat16) for _ in range(3))
    report = flexhop.explain(*tensors, dropout_p=P)
    assert "does not support dropout" in report.passes[0].reason
