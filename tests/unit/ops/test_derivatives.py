"""Derivatives of any order and in any mode, against dense attention in plain PyTorch, in fp64."""

import functools
import math

import pytest
import torch
from torch._dynamo.exc import Unsupported
from torch.autograd import forward_ad
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vmap
from torch.utils.checkpoint import checkpoint

from flexhop import AuxRequest, create_block_mask, flex_attention
from flexhop.errors import MaskCaptureGradError, UnsupportedFeatureError
from flexhop.mods import tanh_approx
from flexhop.ops import dispatch, eager
from tests.unit.ops.support import compiled, quiet

pytestmark = [
    quiet,
    # The reference meets PyTorch's own batching rules, some of which are slow and say so.
    pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning"),
    # Dynamo looks at .grad of dual tensors.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
    pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled:UserWarning"),
]
B, HQ, HKV, M, N, D, DV = 2, 4, 2, 7, 9, 3, 5


def keep(b, h, q_idx, kv_idx):
    """Causal; query 3 sees nothing, and heads differ."""
    return (q_idx >= kv_idx) & (q_idx != 3) & (kv_idx != h)


MASK = create_block_mask(keep, B, HQ, M, N, device="cpu", BLOCK_SIZE=16)


def score(s, b, h, q_idx, kv_idx, slope, bias):
    return (s * slope.exp()[h]).tanh() * 2 + bias[h, q_idx, kv_idx]


def flexible(query, key, value, slope, bias, sinks):
    """(out, lse), a query without keys having its sink for lse."""
    out, aux = flex_attention(
        query, key, value, lambda *x: score(*x, slope, bias), MASK, enable_gqa=True, sinks=sinks,
        return_aux=AuxRequest(lse=True),
    )  # fmt: skip
    return out, aux.lse


def dense(query, key, value, slope, bias, sinks):
    """The same by definition."""
    b, h, i, j = (
        torch.arange(n).reshape([n if d == at else 1 for d in range(4)])
        for at, n in enumerate((B, HQ, M, N))
    )
    key, value = (t.repeat_interleave(HQ // HKV, 1) for t in (key, value))
    raw = query @ key.transpose(-1, -2) / math.sqrt(D)
    scores = (raw * slope.exp()[:, None, None]).tanh() * 2 + bias
    weights = torch.where(keep(b, h, i, j), scores, -torch.inf).exp()
    total = weights.sum(-1) + sinks.exp()[:, None]
    return weights @ value / total[..., None], total.log()


def inputs():
    shapes = [(B, HQ, M, D), (B, HKV, N, D), (B, HKV, N, DV), (HQ,), (HQ, M, N), (HQ,)]
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(s, dtype=torch.float64, generator=generator) for s in shapes]


ALL = tuple(range(6))
ALONG = [torch.cos(3 * t) for t in inputs()]


def loss(attend, *x):
    out, lse = attend(*x)
    return out.sin().sum() + lse.square().sum()


def total(grads):
    return sum(g.square().sum() for g in grads)


def of_slope(attend, function, *x):
    return lambda slope: function(attend, *x[:3], slope, *x[4:])


def joined(attend, *x):
    """Both results as one: PyTorch 2.11 itself does not compile jacrev of several whole."""
    return torch.cat([result.flatten() for result in attend(*x)])


def pushed(attend, *x):
    """The derivative along all of ALONG."""
    return jvp(functools.partial(loss, attend), tuple(x), tuple(ALONG))


def mean_flow(attend, *x):
    """A loss on out and its tangent, of which the second is differentiated too."""
    results, changes = jvp(lambda *y: attend(*y), tuple(x), tuple(ALONG))
    return sum((a - b).square().sum() for a, b in zip(results, changes, strict=True))


def detached_flow(attend, *x):
    """The same with a detached target, along query alone: what is left is a first gradient."""
    results, changes = jvp(lambda y: attend(y, *x[1:]), x[:1], tuple(ALONG[:1]))
    return sum((a - b.detach()).square().sum() for a, b in zip(results, changes, strict=True))


def detached_product(attend, *x):
    """A loss on gradients, whose tangents are detached."""
    gradient = grad(functools.partial(loss, attend), (0, 3))
    found, changes = jvp(gradient, tuple(x), tuple(ALONG))
    return sum((a - b.detach()).square().sum() for a, b in zip(found, changes, strict=True))


DERIVATIVES = {
    "jvp": lambda f: lambda *x: jvp(lambda *y: f(*y), x, tuple(ALONG)),
    "grad of grad": lambda f: grad(
        lambda *x: total(grad(functools.partial(loss, f), ALL)(*x)), argnums=ALL
    ),
    "grad of jvp": lambda f: grad(functools.partial(mean_flow, f), argnums=ALL),
    "grad of detached jvp": lambda f: grad(functools.partial(detached_flow, f), argnums=ALL),
    "grad of jvp of grad, detached": lambda f: grad(
        functools.partial(detached_product, f), argnums=ALL
    ),
    "grad of one grad": lambda f: grad(
        lambda *x: grad(functools.partial(loss, f))(*x).square().sum(), argnums=ALL
    ),
    "jvp of grad": lambda f: lambda *x: jvp(
        grad(functools.partial(loss, f), ALL), x, tuple(ALONG)
    ),
    "jvp of jvp": lambda f: lambda *x: jvp(
        lambda *y: pushed(f, *y)[1], x, tuple(ALONG)
    ),
    "third order": lambda f: grad(
        lambda *x: jvp(grad(functools.partial(loss, f)), x, tuple(ALONG))[1].square().sum()
    ),
    "hessian": lambda f: lambda *x: hessian(of_slope(f, loss, *x))(x[3]),
    "jacrev": lambda f: lambda *x: jacrev(of_slope(f, joined, *x))(x[3]),
    "jacfwd": lambda f: lambda *x: jacfwd(of_slope(f, lambda g, *y: g(*y), *x))(x[3]),
    "per-sample gradients": lambda f: lambda *x: vmap(
        grad(functools.partial(loss, f), ALL), in_dims=(0, *[None] * 5)
    )(torch.stack([x[0], -x[0], x[0] * 2]), *x[1:]),
}  # fmt: skip
RUNS = {
    "uncompiled": lambda f: f,
    "eager": lambda f: torch.compile(f, backend="eager", fullgraph=True),
    "aot_eager": compiled,
}


@pytest.mark.filterwarnings("ignore::FutureWarning")  # 2.15 meets TorchScript on the way
@pytest.mark.parametrize(
    ("run", "name"),
    [(run, name) for run in ("uncompiled", "aot_eager") for name in DERIVATIVES]
    + [("eager", name) for name in ("jvp", "grad of grad", "per-sample gradients")],
)
def test_derivatives_of_any_order(run, name):
    expected = DERIVATIVES[name](dense)(*inputs())
    found = RUNS[run](DERIVATIVES[name](flexible))(*inputs())
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def test_chunks_of_queries_give_the_same(monkeypatch):
    monkeypatch.setattr(eager, "CHUNK_ELEMENTS", 1)
    monkeypatch.setattr(eager, "chunk_rows", lambda _: 2)
    derivative = DERIVATIVES["grad of jvp"]
    found = compiled(derivative(flexible))(*inputs())
    torch.testing.assert_close(found, derivative(dense)(*inputs()), rtol=1e-9, atol=1e-9)


def test_the_second_derivative_of_a_shared_key():
    """Keys of batch 1, which all queries share, under a vmap that has no keys of its own."""
    x = [t[:1] if i in (1, 2) else t for i, t in enumerate(inputs())]
    derivative = DERIVATIVES["per-sample gradients"]
    found = compiled(derivative(flexible))(*x)
    torch.testing.assert_close(found, derivative(dense)(*x), rtol=1e-9, atol=1e-9)


# forward_ad, without torch.func

# A compiled function that is given dual tensors.
REFUSES_DUALS = torch.__version__ >= "2.15"
REFUSAL = "wrap a dual tensor input"


def dual(attend, x, tangents):
    with forward_ad.dual_level():
        made = [forward_ad.make_dual(a, b) for a, b in zip(x, tangents, strict=True)]
        return [forward_ad.unpack_dual(t) for t in attend(*made)]


@pytest.mark.parametrize("needs_grad", [False, True])
@pytest.mark.parametrize("run", ["uncompiled", "eager"])
def test_forward_mode_of_autograd(run, needs_grad):
    """With tensors that need gradients, also the gradient of the tangents."""

    def both(attend):
        leaves = [t.requires_grad_(needs_grad) for t in inputs()]
        along = [t.clone().requires_grad_(needs_grad) for t in ALONG]
        pairs = dual(attend, leaves, along)
        found = [t for pair in pairs for t in pair]
        if needs_grad:
            found += torch.autograd.grad(sum(t.sin().sum() for t in found), [*leaves, *along])
        return found

    attend = RUNS[run](flexible) if run == "eager" else flexible
    if run == "eager" and REFUSES_DUALS:
        with pytest.raises(Unsupported, match=REFUSAL):
            both(attend)
        return
    torch.testing.assert_close(both(attend), both(dense), rtol=1e-9, atol=1e-9)


def test_forward_over_reverse_of_autograd():
    """The gradient of dual tensors, whose tangent is a Hessian times a vector."""

    def product(attend):
        x = [t.requires_grad_() for t in inputs()]
        with forward_ad.dual_level():
            made = [forward_ad.make_dual(a, b) for a, b in zip(x, ALONG, strict=True)]
            grads = torch.autograd.grad(loss(attend, *made), made, create_graph=True)
            return [forward_ad.unpack_dual(g).tangent for g in grads]

    compiled = torch.compile(flexible, backend="eager", fullgraph=True)
    if REFUSES_DUALS:
        with pytest.raises(Unsupported, match=REFUSAL):
            product(compiled)
        return
    torch.testing.assert_close(product(compiled), product(dense), rtol=1e-9, atol=1e-9)


def test_gradcheck_of_the_operator():
    """Numerically, in both modes and orders; one head of three queries."""
    x = [torch.randn(1, 1, n, 2, dtype=torch.float64, requires_grad=True) for n in (3, 4, 4)]
    table = torch.randn(3, dtype=torch.float64, requires_grad=True)

    @functools.partial(torch.compile, backend="eager", fullgraph=True)
    def attend(query, key, value, table):
        return flex_attention(query, key, value, lambda s, b, h, q, k: s * s * table[q])

    inputs = (*x, table)
    has_duals = not REFUSES_DUALS
    assert torch.autograd.gradcheck(attend, inputs, check_forward_ad=has_duals)
    assert torch.autograd.gradgradcheck(attend, inputs, check_fwd_over_rev=has_duals)


# What stands around


def test_dropout_drops_the_same_weights_in_every_derivative():
    x = inputs()[:3]
    seed = torch.tensor([3, 4])
    shape = (B, HQ, M, N)

    def attend(query, key, value):
        return flex_attention(query, key, value, enable_gqa=True, dropout_p=0.4, dropout_seed=seed)

    from flexhop import dropout_mask

    kept = dropout_mask(seed, 0.4, shape)

    def reference(query, key, value):
        key, value = (t.repeat_interleave(HQ // HKV, 1) for t in (key, value))
        weights = torch.softmax(query @ key.transpose(-1, -2) / math.sqrt(D), -1)
        return torch.where(kept, weights / 0.6, 0.0) @ value

    def second(f):
        return grad(lambda *y: jvp(lambda *z: f(*z).sin().sum(), y, tuple(ALONG[:3]))[1])

    for run in (lambda f: f, compiled):
        torch.testing.assert_close(run(second(attend))(*x), second(reference)(*x))


def test_checkpointed_attention_is_differentiated_twice():
    def again(query, key, value):
        def inner(q):
            return checkpoint(lambda q: flex_attention(q, key, value), q, use_reentrant=False)

        (first,) = torch.autograd.grad(inner(query).square().sum(), query, create_graph=True)
        return torch.autograd.grad(first.square().sum(), query)[0]

    query, key, value = (torch.randn(1, 2, 6, 4, dtype=torch.float64) for _ in range(3))
    plain = grad(
        lambda q: grad(lambda p: flex_attention(p, key, value).square().sum())(q).square().sum()
    )(query)
    torch.testing.assert_close(again(query.requires_grad_(), key, value), plain)


@pytest.mark.parametrize("run", [lambda f: f, compiled], ids=["eager", "compiled"])
def test_anomaly_detection_does_not_look_into_graphs_of_mods(run):
    x = [t.requires_grad_() for t in inputs()]
    expected = torch.autograd.grad(loss(flexible, *x), x)
    with torch.autograd.detect_anomaly(check_nan=True):
        found = torch.autograd.grad(run(functools.partial(loss, flexible))(*x), x)
    torch.testing.assert_close(found, expected)


def test_autocast_holds_for_the_derivatives():
    query, key, value = (torch.randn(1, 2, 6, 4) for _ in range(3))

    def both(q):
        with torch.autocast("cpu", torch.bfloat16):
            return jvp(lambda p: flex_attention(p, key, value), (q,), (q.cos(),))

    for found in (both(query), compiled(both)(query)):
        assert [t.dtype for t in found] == [torch.bfloat16, torch.bfloat16]


def test_half_precision_sums_in_single():
    """Gradients of the tangents are as exact as their dtype, though many queries add up."""
    shape = (1, 1, 2048, 8)
    x = [torch.randn(shape, dtype=torch.bfloat16) for _ in range(3)]
    along = [torch.randn(shape, dtype=torch.bfloat16) for _ in range(3)]

    def derivative(*y):
        return grad(
            lambda *z: jvp(flex_attention, z, tuple(t.to(z[0].dtype) for t in along))[1]
            .float().sum().to(torch.float64), argnums=(0, 1, 2),
        )(*y)  # fmt: skip

    exact = derivative(*(t.double() for t in x))
    for found, gold in zip(compiled(derivative)(*x), exact, strict=True):
        error = (found.double() - gold).abs().max() / gold.abs().max()
        assert error < 2**-8  # half a unit of bf16


@pytest.mark.parametrize("run", [lambda f: f, compiled], ids=["eager", "compiled"])
def test_a_mask_has_no_tangent(run):
    lengths = torch.tensor([3.0, 5.0])
    x = [torch.randn(2, 1, 16, 4) for _ in range(3)]

    def masked(lengths):
        def keep(b, h, q_idx, kv_idx):
            return kv_idx < lengths[b]

        mask = create_block_mask(keep, 2, None, 16, 16, device="cpu", BLOCK_SIZE=16)
        return flex_attention(*x, block_mask=mask)

    if run is compiled:
        with pytest.raises(MaskCaptureGradError):
            run(lambda t: jvp(masked, (t,), (t,)))(lengths)
    else:
        assert not jvp(masked, (lengths,), (lengths,))[1].any()


@pytest.mark.parametrize("is_mapped", [False, True])
@pytest.mark.parametrize("run", ["eager", "aot_eager"])
def test_an_operation_without_a_rule_for_forward_mode(run, is_mapped):
    """tanh_approx is an operator of ours with a gradient alone: PyTorch's tangent of it is 0."""
    x, along = tuple(inputs()[:3]), tuple(ALONG[:3])
    if is_mapped:
        x, along = (tuple(torch.stack([t, -t]) for t in made) for made in (x, along))

    def tangents(attend):
        return jvp(vmap(attend) if is_mapped else attend, x, along)

    def capped(tanh):
        return lambda *y: flex_attention(*y, lambda s, *_: 3 * tanh(s / 3), enable_gqa=True)

    found = RUNS[run](lambda: tangents(capped(tanh_approx)))()
    torch.testing.assert_close(found, tangents(capped(torch.tanh)))


@torch.library.custom_op("flexhop_tests::squared", mutates_args=())
def squared(x: torch.Tensor) -> torch.Tensor:
    return x * x


@squared.register_fake
def _(x):
    return torch.empty_like(x)


@squared.register_vmap
def _(info, in_dims, x):
    return squared(x), in_dims[0]


@pytest.mark.parametrize("is_mapped", [False, True])
def test_a_custom_operation_is_refused_in_forward_mode(is_mapped, monkeypatch):
    # An operator without compilation: after an error, Dynamo does not leave forward mode.
    monkeypatch.setattr(dispatch, "has_checkpoint_policy", lambda: True)
    query, key, value = (torch.stack([t, -t]) for t in inputs()[:3])

    def attend(query, key, value):
        return flex_attention(query, key, value, lambda s, *_: squared(s), enable_gqa=True)

    def tangent(query, key, value):
        attend_all = vmap(attend) if is_mapped else lambda *x: attend(*(t[0] for t in x))
        return jvp(lambda q: attend_all(q, key, value), (query,), (query,))[1]

    with pytest.raises(UnsupportedFeatureError, match="calls flexhop_tests::squared"):
        tangent(query, key, value)
