"""Calls in contexts and with operands that PyTorch's own attention takes: they mean the same."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import forward_ad

import flexhop
from flexhop import errors

BF16, FP16 = torch.bfloat16, torch.float16
pytestmark = pytest.mark.filterwarnings("ignore::flexhop.errors.EagerWarning")


def operands(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(2, 4, 37, 16, dtype=dtype) for _ in range(3)]


def tilted(score, b, h, q_idx, kv_idx):
    return torch.tanh(score * 1.3) + (q_idx - kv_idx) * 0.01


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_autocast_converts_operands_and_nothing_else(dtype):
    """The definition inside computes as it does outside, in fp32."""
    inputs = [t.requires_grad_() for t in operands()]
    with torch.autocast("cpu", dtype):
        out = flexhop.flex_attention(*inputs, tilted)
    gradients = torch.autograd.grad(out.float().square().sum(), inputs)
    plain = [t.detach().to(dtype).requires_grad_() for t in inputs]
    expected = flexhop.flex_attention(*plain, tilted)
    wanted = torch.autograd.grad(expected.float().square().sum(), plain)
    assert out.dtype == dtype
    assert torch.equal(out, expected)
    assert all(torch.equal(g.to(dtype), w) for g, w in zip(gradients, wanted, strict=True))


@pytest.mark.parametrize("way", ["eager", "aot_eager", "lifted"])
def test_autocast_leaves_fp64_alone(way):
    """As it does PyTorch's attention; integers are no operands there either."""
    inputs = [t.double().requires_grad_() for t in operands()]
    expected = flexhop.flex_attention(*inputs, tilted)
    wanted = torch.autograd.grad(expected.square().sum(), inputs)
    call = flexhop.flex_attention
    if way == "aot_eager":
        call = torch.compile(call, backend=way, fullgraph=True)
    with torch.autocast("cpu", BF16), flexhop.eager_kernels(way == "lifted"):
        out = call(*inputs, tilted)
        found = torch.autograd.grad(out.square().sum(), inputs)
        with pytest.raises(errors.UnsupportedDtypeError, match="query is torch"):
            call(*(t.int() for t in inputs), tilted)
        with pytest.raises(errors.DtypeError, match=r"float64, torch\.bfloat16 and"):
            call(inputs[0], inputs[1].detach().float(), inputs[2], tilted)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(found, wanted)


def test_autocast_of_a_call_that_reads_a_cache():
    query, key, value = operands()
    stored, scale = (key * 40).to(torch.int8), torch.rand(4) / 40
    options = {"k_mod": flexhop.mods.dequantize(scale), "score_mod": tilted}
    with torch.autocast("cpu", BF16):
        out = flexhop.flex_attention(query, stored, value, **options)
    assert torch.equal(
        out, flexhop.flex_attention(query.to(BF16), stored, value.to(BF16), **options)
    )
    wide = query.double(), stored, value.double()
    with torch.autocast("cpu", BF16):
        out = flexhop.flex_attention(*wide, **options)
    assert torch.equal(out, flexhop.flex_attention(*wide, **options))


def test_meta_tensors_have_shapes():
    mask = flexhop.create_block_mask(lambda b, h, q, k: q >= k, None, None, 37, 37, "meta")
    out, aux = flexhop.flex_attention(
        *(t.to("meta") for t in operands(BF16)), tilted, mask,
        return_aux=flexhop.AuxRequest(lse=True),
    )  # fmt: skip
    assert (out.device.type, out.dtype, out.shape) == ("meta", BF16, (2, 4, 37, 16))
    assert aux.lse is not None
    assert aux.lse.shape == (2, 4, 37)


@pytest.mark.parametrize("stored", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_numbers_of_eight_bits_need_no_mod(dtype, stored):
    """As in PyTorch: a scale may stand in score_mod."""
    query, key, value = operands(dtype)
    low = key.to(stored), value.to(stored)
    expected = flexhop.flex_attention(query, *(t.to(dtype) for t in low), tilted)
    assert torch.equal(flexhop.flex_attention(query, *low, tilted), expected)
    half = flexhop.flex_attention(query, low[0], value, tilted)
    assert torch.equal(half, flexhop.flex_attention(query, low[0].to(dtype), value, tilted))
    compiled = torch.compile(flexhop.flex_attention, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(query, *low, tilted), expected)


@pytest.mark.parametrize("style", ["block", "decorator"])
def test_no_grad_inside_a_mod_stops_gradients(style):
    """A trace into operators drops the switches that Dynamo records."""
    table = torch.randn(4, requires_grad=True)

    @torch.no_grad()
    def fixed(score, bias):
        return score.sin() * bias

    def switched(score, b, h, q_idx, kv_idx):
        if style == "decorator":
            return score * fixed(score, table[h]) + table[h]
        with torch.no_grad():
            factor = score.sin() * table[h]
            with torch.enable_grad():
                learned = table[h] * 1.0
        return score * factor + learned

    def detached(score, b, h, q_idx, kv_idx):
        return score * (score.detach().sin() * table[h].detach()) + table[h]

    found = []
    for mod, backend in ((detached, "eager"), (switched, "eager"), (switched, "aot_eager")):
        inputs = [t.double().requires_grad_() for t in operands()]
        call = torch.compile(flexhop.flex_attention, backend=backend, fullgraph=True)
        loss = (call if backend != "eager" else flexhop.flex_attention)(*inputs, mod).sin().sum()
        found.append(torch.autograd.grad(loss, (*inputs, table)))
    torch.testing.assert_close(found[1], found[0])
    torch.testing.assert_close(found[2], found[0])


class Rounded(torch.autograd.Function):
    """Its own gradient: that of the identity."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x.round()

    @staticmethod
    def setup_context(ctx, inputs, output):
        del ctx, inputs, output

    @staticmethod
    def backward(ctx, grad):
        return grad


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_function_with_its_own_backward_is_not_differentiated_as_its_forward(backend):
    """Gradients of compiled calls were silently 0."""
    inputs = [t.requires_grad_() for t in operands()]
    call = torch.compile(flexhop.flex_attention, backend=backend, fullgraph=True)

    def own(score, b, h, q_idx, kv_idx):
        return Rounded.apply(score * 2) + q_idx * 0.01

    def written(score, b, h, q_idx, kv_idx):
        score = score * 2
        return score + (score.round() - score).detach() + q_idx * 0.01

    expected = flexhop.flex_attention(*inputs, own)
    with torch.no_grad():
        torch.testing.assert_close(call(*inputs, own), expected)
    for_value = [t.detach() for t in inputs[:2]] + inputs[2:]  # scores need no gradient
    wanted = torch.autograd.grad(expected.sum(), inputs[2], retain_graph=True)
    torch.testing.assert_close(torch.autograd.grad(call(*for_value, own).sum(), inputs[2]), wanted)
    wanted = torch.autograd.grad(expected.square().sum(), inputs)
    for score_mod in (own, written):
        found = torch.autograd.grad(call(*inputs, score_mod).square().sum(), inputs)
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("way", ["grad", "jvp", "pushed"])
@pytest.mark.parametrize("kernels", ["eager", "compiled"])
def test_transforms_refuse_a_function_with_its_own_backward(kernels, way):
    """Derivatives were those of its forward, without a word."""
    inputs = operands()

    def own(score, b, h, q_idx, kv_idx):
        return score + Rounded.apply(score)

    def attend(*values):
        return flexhop.flex_attention(*values, own).square().sum()

    def lost(*values):
        if way == "grad":
            return torch.func.grad(attend)(*values)
        if way == "jvp":
            return torch.func.jvp(
                lambda key: attend(values[0], key, values[2]), *[values[1:2]] * 2
            )
        if way == "pushed":
            with forward_ad.dual_level():
                return attend(forward_ad.make_dual(values[0], values[0]), *values[1:])
        return attend(*values)

    call = torch.compile(lost, backend="aot_eager", fullgraph=True)
    with flexhop.eager_kernels(kernels == "eager"):
        run = lost if kernels == "eager" else call
        with pytest.raises(
            errors.UnsupportedFeatureError, match=r"Function at .*test_context\.py"
        ):
            run(*inputs)


@pytest.mark.parametrize("made", [False, True])
def test_forward_mode_goes_through_no_grad_inside_a_mod(made):
    """As PyTorch's does; also if the mod reads what needs a gradient.

    made: what stands inside is computed before the call.
    """
    table = torch.randn(4, dtype=torch.float64, requires_grad=True)
    query, key, value = (t.double() for t in operands())

    def push(query, table):
        def mod(score, b, h, q_idx, kv_idx):
            with torch.no_grad():
                factor = table.cumsum(0)[kv_idx % 4] if made else score.sin()
            return score * factor + table[h]

        return flexhop.flex_attention(query, key, value, mod)

    def pushed(*inputs):
        return torch.func.jvp(push, inputs, tuple(t.cos() for t in inputs))[1]

    def gradient(*inputs):
        loss = lambda *x: push(*x).sin().sum()  # noqa: E731
        return torch.func.grad(loss, (0, 1))(*inputs)

    for run in (pushed, gradient):
        found = torch.compile(run, backend="aot_eager", fullgraph=True)(query, table)
        torch.testing.assert_close(found, run(query, table))
