"""Everything that may stand around the operator: autograd, functorch, checkpointing, autocast."""

import functools

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from torch.utils.flop_counter import FlopCounterMode

from flexhop import AuxRequest, create_block_mask, flex_attention
from flexhop.mods import noop_mask, noop_score
from flexhop.ops.forward import attention
from tests.unit.ops.support import (
    BATCH,
    HEADS,
    LENGTH,
    WIDTH,
    assert_same,
    causal_mask,
    compiled,
    operands,
    quiet,
)

pytestmark = quiet
BIAS = torch.randn(HEADS, LENGTH, LENGTH)
MASK = causal_mask()


def biased(query, key, value, bias=None):
    bias = BIAS if bias is None else bias
    return flex_attention(query, key, value, lambda s, b, h, q, k: s + bias[h, q, k], MASK)


def with_gradients(query, key, value):
    leaves = [t.detach().requires_grad_() for t in (query, key, value)]
    return torch.autograd.grad(biased(*leaves).sum(), leaves)


def direct(query, key, value):
    """The operator itself, without the front door."""
    return attention(query, key, value, noop_score, noop_mask, (), 0.5, {})[0]


def nodes(graph):
    return [n.name for n in graph.graph.nodes if n.op == "call_function" and "flexhop" in n.name]


# autograd


@pytest.mark.parametrize("which", range(4), ids=["query", "key", "value", "capture"])
def test_a_single_input_that_requires_a_gradient(which):
    inputs = [*operands(), BIAS.clone()]
    inputs[which].requires_grad_()
    assert_same(biased, inputs)


def test_gradient_through_lse_alone():
    def function(*inputs):
        return flex_attention(*inputs, return_aux=AuxRequest(lse=True))[1].lse

    assert_same(function, operands(grad=True))


@pytest.mark.parametrize("run", [lambda f: f, compiled], ids=["eager", "compiled"])
def test_max_scores_have_no_gradient(run):
    function = run(functools.partial(flex_attention, return_aux=AuxRequest(max_scores=True)))
    out, aux = function(*operands(grad=True))
    assert out.requires_grad
    assert not aux.max_scores.requires_grad


def test_an_unused_capture_gets_no_gradient():
    table, inputs = torch.randn(HEADS, requires_grad=True), operands(grad=True)

    def score_mod(score, b, h, q_idx, kv_idx):
        _ = table[h]
        return score * 2

    out = compiled(flex_attention)(*inputs, score_mod)
    assert torch.autograd.grad(out.sum(), table, allow_unused=True) == (None,)


def test_a_capture_keeps_its_dtype():
    table, inputs = torch.randn(HEADS, dtype=torch.bfloat16, requires_grad=True), operands()
    grads = [
        torch.autograd.grad(
            run(*inputs, lambda s, b, h, q, k: s + table[h]).square().sum(), table
        )[0]
        for run in (flex_attention, compiled(flex_attention))
    ]
    assert grads[1].dtype == torch.bfloat16
    torch.testing.assert_close(grads[1], grads[0], rtol=2e-2, atol=2e-2)


def test_second_derivative_of_the_operator():
    inputs = operands(grad=True)
    (grad,) = torch.autograd.grad(direct(*inputs).square().sum(), inputs[0], create_graph=True)
    grads = torch.autograd.grad(grad.square().sum(), inputs)
    assert all(bool(g.abs().sum() > 0) for g in grads)  # test_derivatives.py looks at the values


def test_second_derivative_of_compiled_attention_is_refused():
    inputs = operands(grad=True)
    out = compiled(biased)(*inputs)
    (grad,) = torch.autograd.grad(out.square().sum(), inputs[0], create_graph=True)
    with pytest.raises(RuntimeError, match="double backward"):  # AOTAutograd's own
        grad.sum().backward()


def test_second_derivative_in_eager():
    inputs = [t[:1, :, :4, :3].double().detach().requires_grad_() for t in operands()]
    assert torch.autograd.gradgradcheck(
        lambda *x: flex_attention(*x, lambda s, b, h, q, k: s.tanh()), inputs
    )


def test_backward_twice():
    inputs = operands(grad=True)
    out = compiled(biased)(*inputs)
    first = torch.autograd.grad(out.sum(), inputs, retain_graph=True)
    torch.testing.assert_close(torch.autograd.grad(out.sum(), inputs), first)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(mode):
    with mode():
        inputs = operands(grad=True)
        out = compiled(biased)(*inputs)
        assert not out.requires_grad
        torch.testing.assert_close(out, biased(*inputs))


@pytest.mark.parametrize("run", [lambda f: f, compiled], ids=["eager", "compiled"])
@pytest.mark.parametrize(
    "score_mod",
    [
        lambda s, b, h, q, k: s * s,
        lambda s, b, h, q, k: torch.sin(s) * 2 + q,
        lambda s, b, h, q, k: torch.where(q > k, s, -s.abs()),
    ],
    ids=["squared", "sine", "where"],
)
def test_gradcheck(run, score_mod):
    inputs = [torch.randn(2, 2, 11, 4, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    mask = causal_mask(11)
    function = run(lambda *x: flex_attention(*x, score_mod, mask))
    assert torch.autograd.gradcheck(function, inputs, fast_mode=True)


def test_tensor_hooks():
    inputs = operands(grad=True)
    out = compiled(biased)(*inputs)
    out.register_hook(lambda grad: grad * 2)
    twice = torch.autograd.grad(out.sum(), inputs)
    expected = torch.autograd.grad(biased(*inputs).sum() * 2, inputs)
    torch.testing.assert_close(twice, expected)


def test_compiled_autograd():
    from torch._dynamo import compiled_autograd

    inputs = operands(grad=True)
    out = compiled(biased)(*inputs)
    with compiled_autograd._enable(torch.compile(backend="aot_eager", fullgraph=True)):
        out.sum().backward()
    expected = torch.autograd.grad(biased(*inputs).sum(), inputs)
    torch.testing.assert_close([t.grad for t in inputs], list(expected))


# tracing


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_make_fx_writes_one_node_for_each_direction(mode):
    inputs = operands(grad=True)
    graph = make_fx(with_gradients, tracing_mode=mode, _allow_non_fake_inputs=True)(*inputs)
    assert nodes(graph) == ["flexhop_attention", "flexhop_attention_backward"]
    torch.testing.assert_close(graph(*inputs), with_gradients(*inputs))


def test_make_fx_names_the_mods():
    graph = make_fx(lambda *x: biased(*x))(*operands())
    names = [n.target for n in graph.graph.find_nodes(op="get_attr")]
    assert {"flexhop_score0", "flexhop_mask0"} <= set(names)


def test_flops_of_the_operator():
    with FlopCounterMode(display=False) as flops:
        direct(*operands())
    products = 2 * BATCH * HEADS * LENGTH * LENGTH * WIDTH
    assert flops.get_total_flops() == 2 * products
    inputs = operands(grad=True)
    with FlopCounterMode(display=False) as flops:
        direct(*inputs).sum().backward()
    assert flops.get_total_flops() == 7 * products


# checkpointing


def checkpointed(*inputs):
    return checkpoint(biased, *inputs, use_reentrant=False)


@pytest.mark.parametrize(
    "run",
    [
        checkpointed,
        compiled(checkpointed),
        functools.partial(checkpoint, compiled(biased), use_reentrant=False),
    ],
    ids=["eager", "compiled", "of compiled"],
)
def test_checkpoint(run):
    assert_same(biased, [*operands(grad=True), BIAS.clone().requires_grad_()], run=run)


SAVED = {
    "products": [torch.ops.aten.mm.default],
    "attention": [attention],
    "both": [torch.ops.aten.mm.default, attention],
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("run", [lambda f: f, compiled], ids=["eager", "compiled"])
@pytest.mark.parametrize("saved", SAVED.values(), ids=SAVED)
def test_selective_checkpoint(saved, run):
    weight, inputs = torch.randn(WIDTH, WIDTH, requires_grad=True), operands(grad=True)

    def policy(context, operator, *args, **keywords):
        keep = operator in saved
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    def layer(query, key, value):
        return biased(query @ weight, key, value)

    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    function = run(lambda *x: checkpoint(layer, *x, use_reentrant=False, context_fn=contexts))
    assert_same(layer, inputs, [*inputs, weight], run=function)


@pytest.mark.parametrize("attend", [direct, biased])
def test_selective_checkpoint_sees_the_operator(attend):
    seen = []

    def policy(context, operator, *args, **keywords):
        seen.append(operator)
        return CheckpointPolicy.MUST_SAVE

    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    inputs = operands(grad=True)
    out = checkpoint(attend, *inputs, use_reentrant=False, context_fn=contexts)
    grads = torch.autograd.grad(out.sum(), inputs)
    assert attention in seen
    torch.testing.assert_close(grads, torch.autograd.grad(attend(*inputs).sum(), inputs))


# autocast


@pytest.mark.parametrize("run", [lambda f: f, compiled], ids=["eager", "compiled"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_is_that_of_sdpa(dtype, run):
    inputs = operands(grad=True)
    function = run(flex_attention)
    with torch.autocast("cpu", dtype):
        out = function(*inputs)
        expected = torch.nn.functional.scaled_dot_product_attention(*inputs)
    assert out.dtype == expected.dtype == dtype
    torch.testing.assert_close(out, expected, rtol=3e-2, atol=3e-2)
    assert all(g.dtype == torch.float32 for g in torch.autograd.grad(out.float().sum(), inputs))


@pytest.mark.parametrize("run", [lambda f: f, compiled], ids=["eager", "compiled"])
def test_autocast_makes_mixed_dtypes_one(run):
    query, key, value = operands()
    function = run(flex_attention)
    with torch.autocast("cpu", torch.bfloat16):
        assert function(query.bfloat16(), key, value).dtype == torch.bfloat16


# torch.func


def gradients(*inputs):
    def loss(*x):
        return biased(*x).square().sum()

    return torch.func.grad(loss, argnums=tuple(range(len(inputs))))(*inputs)


def test_func_grad_inside_compile_and_eager():
    inputs = [*operands(), BIAS.clone()]
    leaves = [t.clone().requires_grad_() for t in inputs]
    expected = torch.autograd.grad(biased(*leaves).square().sum(), leaves)
    for function in (gradients, compiled(gradients)):
        torch.testing.assert_close(function(*inputs), expected, rtol=1e-4, atol=1e-4)


def test_func_vjp_inside_compile():
    def pull_back(*inputs):
        out, vjp = torch.func.vjp(biased, *inputs)
        return vjp(torch.ones_like(out))

    inputs = operands()
    torch.testing.assert_close(compiled(pull_back)(*inputs), pull_back(*inputs))


def stacked(count=3):
    return [torch.randn(count, BATCH, HEADS, LENGTH, WIDTH) for _ in range(3)]


@pytest.mark.parametrize("in_dims", [(0, 0, 0), (0, None, None), (None, 0, 0)])
@pytest.mark.parametrize("run", [lambda f: f, compiled], ids=["eager", "compiled"])
def test_vmap(in_dims, run):
    table = torch.randn(BATCH, HEADS)
    mask = causal_mask()

    def one(query, key, value):
        return flex_attention(query, key, value, lambda s, b, h, q, k: s + table[b, h] + b, mask)

    inputs = [t if d == 0 else t[0] for t, d in zip(stacked(), in_dims, strict=True)]
    each = [
        [t[n] if d == 0 else t for t, d in zip(inputs, in_dims, strict=True)] for n in range(3)
    ]
    found = run(lambda *x: torch.func.vmap(one, in_dims=in_dims)(*x))(*inputs)
    torch.testing.assert_close(found, torch.stack([one(*x) for x in each]))


def test_vmap_over_a_capture_and_its_gradient():
    tables = torch.randn(3, BATCH, HEADS, requires_grad=True)

    def one(query, key, value, table):
        return flex_attention(query, key, value, lambda s, b, h, q, k: s + table[b, h])

    inputs = [*(t.requires_grad_() for t in stacked()), tables]
    assert_same(lambda *x: torch.func.vmap(one)(*x), inputs)


def test_vmap_with_gradients_under_dynamic_shapes():
    """The folded mods divide by the number of batches, which is a symbol."""
    inputs = [torch.randn(5, 3, HEADS, LENGTH, WIDTH, requires_grad=True) for _ in range(3)]
    bias = BIAS.clone().requires_grad_()

    def mapped(*inputs):
        return torch.func.vmap(lambda *x: biased(*x, bias))(*inputs)

    assert_same(mapped, inputs, [*inputs, bias], run=compiled(mapped, dynamic=True))


@pytest.mark.parametrize("number", [7, 2.5])
def test_vmap_of_mods_that_capture_numbers_under_dynamic_shapes(number):
    """A symbol beside indices, the score, and reads of a mapped table."""

    def mapped(number, *inputs):
        def keep(b, h, q_idx, kv_idx):
            return q_idx + number >= kv_idx

        def one(query, key, value, table):
            def bias(score, b, h, q_idx, kv_idx):
                return number * score + (table[b, h] - number) + (q_idx - kv_idx) / number

            return flex_attention(query, key, value, bias, mask)

        mask = create_block_mask(keep, None, None, LENGTH, LENGTH, "cpu", BLOCK_SIZE=16)
        return torch.func.vmap(one)(*inputs)

    leaves = [t.requires_grad_() for t in stacked()]
    inputs = [number, *leaves, torch.randn(3, BATCH, HEADS)]
    assert_same(mapped, inputs, run=compiled(mapped, dynamic=True))


def test_a_mask_made_inside_reads_a_table_by_two_indices():
    """Dynamo traces the reads of create_block_mask, and knows few functions of torch.vmap."""
    table = torch.rand(HEADS, LENGTH) > 0.3

    def made_inside(*inputs):
        def keep(b, h, q_idx, kv_idx):
            return table[h, q_idx - kv_idx]

        mask = create_block_mask(keep, None, HEADS, LENGTH, LENGTH, "cpu", BLOCK_SIZE=16)
        return flex_attention(*inputs, block_mask=mask)

    assert_same(made_inside, operands())
