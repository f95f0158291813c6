"""A torch.autograd.Function with its own backward inside a score_mod, compiled."""

import pytest
import torch

import flexhop
from flexhop import errors
from flexhop.offline import generate_code
from tests.own_backwards import Tanh

pytestmark = pytest.mark.filterwarnings("ignore::flexhop.errors.EagerWarning")


class Clipped(torch.autograd.Function):
    """A product whose gradient is not linear in that of its result."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x, y):
        return x * y

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, grad):
        x, y = ctx.saved_tensors
        return (grad * y).clamp(-1e-3, 1e-3), grad * x


class Both(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x.sin(), x.cos()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, first, second):
        (x,) = ctx.saved_tensors
        return first * x.cos() - second * x.sin()


def softcap(learned):
    return lambda s, b, h, q_idx, kv_idx: 20 * Tanh.apply(s / 20)


def clipped(learned):
    return lambda s, b, h, q_idx, kv_idx: Clipped.apply(3 * s, learned[h, 0])


def per_key(learned):
    return lambda s, b, h, q_idx, kv_idx: s + Tanh.apply(learned[h, kv_idx])


def before_the_call(learned):
    return lambda s, b, h, q_idx, kv_idx: s + Tanh.apply(learned)[h, 0] * (q_idx - kv_idx) * 0.01


def beside_a_table(learned):
    def score_mod(s, b, h, q_idx, kv_idx):
        distance = q_idx - kv_idx
        wave = torch.sin(distance * 0.3) * torch.cos(distance * 0.1) * torch.tanh(distance * 0.01)
        return Tanh.apply(2 * s) + wave * torch.exp(torch.sin(distance * 0.2))

    return score_mod


LEARNED = (clipped, per_key, before_the_call)
MODS = (softcap, *LEARNED, beside_a_table)


def operands(dtype=torch.float32):
    torch.manual_seed(1)
    sizes = ((1, 4, 72, 16), (1, 2, 72, 16), (1, 2, 72, 16))
    return [torch.randn(*size, dtype=dtype).requires_grad_() for size in sizes]


@pytest.mark.parametrize(
    ("backend", "make"),
    [*(("aot_eager", make) for make in MODS), ("inductor", clipped)],
)
def test_compiled_gradients_are_those_of_its_backward(backend, make):
    inputs, learned = operands(), torch.randn(4, 72).requires_grad_()
    score_mod = make(learned)

    def attend(query, key, value):
        return flexhop.flex_attention(query, key, value, score_mod, enable_gqa=True)

    leaves = [*inputs, learned] if make in LEARNED else inputs
    wanted = torch.autograd.grad(attend(*inputs).square().sum(), leaves)
    compiled = torch.compile(attend, backend=backend, fullgraph=True)
    found = torch.autograd.grad(compiled(*inputs).square().sum(), leaves)
    for mine, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5 * float(theirs.abs().max()))


@pytest.mark.parametrize("make", [softcap, per_key])
def test_kernels_of_a_gpu_are_generated(make):
    learned = torch.zeros(4, 72).requires_grad_(make in LEARNED)
    score_mod = make(learned)
    code = generate_code(
        lambda q, k, v: flexhop.flex_attention(q, k, v, score_mod, enable_gqa=True),
        *operands(torch.bfloat16), grad=True,
    )  # fmt: skip
    assert 2 <= len(code.templates) <= 3  # the backward pass has one kernel or two
    if make is softcap:  # 1.5 is in its backward alone
        forward, *backward = ["1.5" in kernel.source for kernel in code.templates]
        assert not forward and any(backward)


@pytest.mark.parametrize("way", ["twice", "forward mode", "several results"])
def test_other_derivatives_are_refused(way):
    inputs = operands()
    score_mod = softcap(None)
    if way == "several results":
        score_mod = lambda s, b, h, q_idx, kv_idx: sum(Both.apply(s))  # noqa: E731

    def attend(query, key, value):
        return flexhop.flex_attention(query, key, value, score_mod, enable_gqa=True).square().sum()

    def run(query, key, value):
        if way == "forward mode":
            tangent = torch.ones_like(query)
            return torch.func.jvp(lambda x: attend(x, key, value), (query,), (tangent,))
        if way == "several results":
            return attend(query, key, value)
        (first,) = torch.autograd.grad(attend(query, key, value), query, create_graph=True)
        return first.square().sum()

    with flexhop.eager_kernels(way == "twice"):
        call = run if way == "twice" else torch.compile(run, backend="aot_eager", fullgraph=True)
        with pytest.raises(errors.UnsupportedFeatureError, match=r"at .*test_own_backward\.py"):
            torch.autograd.grad(call(*inputs), inputs[1])
