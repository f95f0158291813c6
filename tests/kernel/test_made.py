"""Tensors that a mod makes without its arguments: captured by kernels, learned through, exact."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.backends.debugging import aot_eager

from flexhop import create_block_mask, flex_attention
from flexhop.compat.mods.indexing import IndexMode
from flexhop.errors import ModLoweringError
from flexhop.offline.interpret import interpret

LENGTH, HEADS = 40, 2
TOLERANCE = {"rtol": 2e-5, "atol": 2e-5}


def _operands(dtype=torch.float32):
    torch.manual_seed(3)
    return [torch.randn(1, HEADS, LENGTH, 16, dtype=dtype, requires_grad=True) for _ in range(3)]


def _mods(rate):
    """A score_mod with every kind of made tensor, a mask_mod, and what they learn.

    All of `few` is used at once: its numbers are learned one by one.
    """
    weight = torch.randn(HEADS, 6, generator=torch.Generator().manual_seed(1)).requires_grad_()
    few = torch.randn(4, generator=torch.Generator().manual_seed(4)).requires_grad_()
    tables = [torch.randn(LENGTH, generator=torch.Generator().manual_seed(n)) for n in (2, 3)]

    def score_mod(s, b, h, q, k):
        slopes = 2.0 ** (-8.0 * torch.arange(1, HEADS + 1, device=q.device) / HEADS)
        s = s - slopes[h] * (q - k).abs() + torch.stack(tables)[h, k]
        s = s + (weight - weight.amax(-1, keepdim=True))[h, (q - k).clamp(-2, 3) + 2]
        s = s + s.new_tensor([0.25, -0.5, rate])[(q + k) % 3]
        with torch.no_grad():
            frozen = weight.cumsum(-1)
        s = s * (1 + 0.1 * frozen[h, k % 6])
        one = torch.nn.functional.one_hot(k.long() % 4, 4)
        s = s + ((q - k).unsqueeze(-1) * few * 0.1 + one * few).sum(-1)
        return torch.where(k > q + 30, torch.tensor(-2.0, device=q.device), s)

    def mask_mod(b, h, q, k):
        chosen = torch.tensor([0, 5, 9, 33], device=q.device)
        ends = torch.cumsum(torch.tensor([13, 9, 18], device=q.device), 0)
        is_near = torch.tril(torch.ones(8, 8, dtype=torch.bool, device=q.device))[q % 8, k % 8]
        same = torch.bucketize(q, ends, right=True) == torch.bucketize(k, ends, right=True)
        return torch.isin(k, chosen) | (same & is_near)

    return score_mod, mask_mod, weight, few


def _expected(rate):
    """In plain PyTorch, for positions that broadcast."""
    q, k, v = _operands()
    score_mod, mask_mod, *learned = _mods(rate)
    sizes = (1, HEADS, LENGTH, LENGTH)
    index = [torch.arange(n).view(-1, *[1] * (3 - axis)) for axis, n in enumerate(sizes)]
    scores = score_mod(q @ k.mT * 0.25, *index)
    out = scores.masked_fill(~mask_mod(*index), -torch.inf).softmax(-1) @ v
    return _with_gradients(out, [q, k, v, *learned])


def _with_gradients(out, leaves):
    return [out, *torch.autograd.grad((out * out.detach().cos()).sum(), leaves)]


def _check(found, expected):
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, **TOLERANCE)


def _call(mods, dynamic_mask=False):
    score_mod, mask_mod, *_ = mods
    mask = create_block_mask(mask_mod, 1, HEADS, LENGTH, LENGTH, device="cpu", BLOCK_SIZE=16)

    def call(q, k, v):
        inside = mask
        if dynamic_mask:
            inside = create_block_mask(
                mask_mod, 1, HEADS, q.shape[2], k.shape[2], device=q.device, BLOCK_SIZE=16
            )
        return flex_attention(q, k, v, score_mod, inside)

    return call


@pytest.mark.filterwarnings("ignore::flexhop.errors.EagerWarning")
@pytest.mark.parametrize("how", ["eager", "dynamic"])
def test_made_tensors_are_captured(how):
    """Values and gradients, wherever the mods are traced; a changed number is not baked in."""
    compiled = torch.compile(
        lambda call, q, k, v: call(q, k, v), backend="aot_eager", fullgraph=True,
        dynamic=True,
    )  # fmt: skip
    for rate in (0.75, -1.5):
        mods, operands = _mods(rate), _operands()
        call = _call(mods, dynamic_mask=how == "dynamic")
        out = call(*operands) if how == "eager" else compiled(call, *operands)
        _check(_with_gradients(out, [*operands, *mods[2:]]), _expected(rate))


def test_kernels_read_made_tensors(monkeypatch):
    """The portable kernels take them: values and gradients, interpreted."""
    monkeypatch.setenv("FLEXHOP_STRICT", "1")
    mods, operands = _mods(0.75), _operands()
    out = interpret(
        _call(mods), *operands, grad=lambda out: (out * out.detach().cos()).sum()
    ).result
    found = [out, *(leaf.grad for leaf in (*operands, *mods[2:]))]
    _check(found, _expected(0.75))


def test_random_tensors_are_still_refused():
    """What is drawn must not move before the call, where it would be drawn once."""

    def noisy(s, b, h, q, k):
        return s + torch.rand(4)[k % 4]

    with pytest.raises(ModLoweringError, match="drawing random numbers"):
        torch.compile(flex_attention, backend="aot_eager", fullgraph=True)(*_operands(), noisy)


def test_defaults_of_a_mod_made_anew():
    """2.11: Dynamo would not notice another number, of the mod or of a function that it calls."""
    compiled = torch.compile(
        lambda q, k, v, mod, mask: flex_attention(q, k, v, mod, mask),
        backend="aot_eager", fullgraph=True,
    )  # fmt: skip
    operands = [operand.detach() for operand in _operands()]
    for rate, width in ((1.0, 5), (3.0, 9), (-2.0, 13)):

        def scaled(x, rate=rate):
            return x * rate

        def near(b, h, q, k, width=width):
            return (q - k).abs() < width

        mask = create_block_mask(near, None, None, LENGTH, LENGTH, device="cpu", BLOCK_SIZE=16)
        found = compiled(*operands, lambda s, b, h, q, k: scaled(s), mask)
        q, k, v = operands
        place = torch.arange(LENGTH)
        is_seen = (place[:, None] - place).abs() < width
        scores = (q @ k.mT * 0.25 * rate).masked_fill(~is_seen, -torch.inf)
        torch.testing.assert_close(found, scores.softmax(-1) @ v, **TOLERANCE)


@pytest.mark.parametrize("count", [0, 1, 16, 17, 33])
@pytest.mark.parametrize("dtype", [torch.int64, torch.float32])
def test_places_among_numbers(count, dtype):
    """What isin, bucketize and searchsorted become for one number equals PyTorch's."""
    draws = torch.Generator().manual_seed(count)
    numbers = (torch.randint(-40, 40, (count,), generator=draws).to(dtype) / 2).to(dtype)
    ordered = numbers.sort().values
    asked = torch.cat([torch.arange(-45, 45).to(dtype), numbers])
    if dtype.is_floating_point:
        asked = torch.cat([asked, torch.tensor([torch.nan, torch.inf, -torch.inf])])
    functions = (
        lambda x: torch.isin(x, numbers),
        lambda x: torch.isin(x, test_elements=numbers, invert=True),
        lambda x: torch.bucketize(x, ordered),
        lambda x: torch.bucketize(x, boundaries=ordered, right=True, out_int32=True),
        lambda x: torch.searchsorted(ordered, x),
        lambda x: torch.searchsorted(ordered, x, side="right"),
    )
    for function in functions:
        with IndexMode():
            found = torch.vmap(function)(asked)
        torch.testing.assert_close(found, function(asked), rtol=0, atol=0)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.filterwarnings("ignore::flexhop.errors.EagerWarning")
def test_many_numbers_are_sorted_before_the_call(dynamic):
    """No kernel sorts. Numbers may repeat, and have any dtype and shape."""
    draws = torch.Generator().manual_seed(0)
    whole = torch.randint(0, LENGTH, (40,), generator=draws)
    small = torch.randint(0, LENGTH, (4, 5), generator=draws).to(torch.uint8)
    halves = torch.cat([torch.arange(30) * 1.5, torch.tensor([torch.nan])])

    def mask_mod(b, h, q, k):
        return torch.isin(k, whole) | torch.isin(q, small, invert=True) | (q == k)

    def score_mod(s, b, h, q, k):
        return torch.where(torch.isin(q + k, halves, assume_unique=True), s, -s)

    graphs = []

    def record(graph, inputs):
        graphs.append(graph)
        return aot_eager(graph, inputs)

    mask = create_block_mask(mask_mod, None, None, LENGTH, LENGTH, device="cpu", BLOCK_SIZE=16)
    inputs = [t.detach() for t in _operands()]
    compiled = torch.compile(flex_attention, backend=record, fullgraph=True, dynamic=dynamic)
    found, expected = (call(*inputs, score_mod, mask) for call in (compiled, flex_attention))
    torch.testing.assert_close(found, expected, **TOLERANCE)
    (graph,) = graphs
    mods = [module.code for name, module in graph.named_modules() if name]
    assert (graph.code.count("torch.sort("), [code.count("torch.sort(") for code in mods]) == (
        3, [0, 0],
    )  # fmt: skip
