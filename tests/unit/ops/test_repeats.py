"""Eager calls that repeat an earlier one: the same results, and nothing that changed is missed."""

import functools
import gc

import pytest
import torch
from torch.func import grad, vmap
from torch.utils.checkpoint import checkpoint

from flexhop import KernelOptions, create_block_mask, eager_kernels, flex_attention
from flexhop.errors import HeadCountError, MaskCaptureGradError, SlicedMaskModError
from flexhop.masks import causal
from flexhop.mods import alibi
from flexhop.ops import dispatch
from flexhop.ops.uncompiled import repeats
from tests.unit.ops.support import quiet
from tests.unit.ops.test_eager_kernels import compilations as compilations

pytestmark = [quiet, pytest.mark.usefixtures("compilations")]


@pytest.fixture(autouse=True)
def lifted(monkeypatch):
    """The calls that did not repeat one; a list that grows."""
    made = []
    run_lifted = dispatch.run_lifted

    def noting(*args, **keywords):
        made.append(args)
        return run_lifted(*args, **keywords)

    monkeypatch.setattr(dispatch, "run_lifted", noting)
    repeats.forget()
    return made


def operands(length=24, *, dtype=torch.float32, grad=False):
    """query, key, value, of a width that other tests do not compile."""
    return [torch.randn(2, 2, length, 12, dtype=dtype, requires_grad=grad) for _ in range(3)]


def both(call):
    """What a call returns with kernels, and by the definition."""
    with eager_kernels():
        found = call()
    return found, call()


def agree(call):
    torch.testing.assert_close(*both(call))


def mask_of(mask_mod, length=37, **options):
    return create_block_mask(mask_mod, None, None, length, length, "cpu", BLOCK_SIZE=16, **options)


@pytest.mark.parametrize("has_mask", [False, True])
@pytest.mark.parametrize("has_slopes", [False, True])
@pytest.mark.parametrize("has_grad", [False, True])
def test_repeated_calls_are_right(has_mask, has_slopes, has_grad, lifted):
    mask = mask_of(causal) if has_mask else None
    for _ in range(3):
        x = operands(length=37, dtype=torch.float64, grad=has_grad)
        slopes = torch.randn(2, dtype=torch.float64, requires_grad=has_grad)

        def call(x=x, slopes=slopes):
            out = flex_attention(*x, alibi(slopes) if has_slopes else None, mask)
            if not has_grad:
                return out
            wanted = [*x, slopes] if has_slopes else x
            first = torch.autograd.grad(out.sin().sum(), wanted, create_graph=True)
            second = torch.autograd.grad(sum(g.square().sum() for g in first), wanted)
            return out, first, second

        agree(call)
    assert len(lifted) == 1


def test_captured_numbers_and_what_is_computed_before_a_read(lifted):
    def call(x, table, factor):
        def score(s, b, h, q, k):
            return s * factor * table.exp()[h]

        out = flex_attention(*x, score)
        return out, torch.autograd.grad(out.square().sum(), [*x, table])

    for factor in (2, 2, 3, 3, 2):
        x = operands(dtype=torch.float64, grad=True)
        table = torch.randn(2, dtype=torch.float64, requires_grad=True)
        agree(functools.partial(call, x, table, factor))
    assert len(lifted) == 2


def test_who_watches_sees_a_call(lifted):
    x = operands(grad=True)
    call = functools.partial(flex_attention, *x)
    agree(call)
    with torch.autocast("cpu", torch.bfloat16):
        assert both(call)[0].dtype == torch.bfloat16
    with torch.no_grad():
        assert not both(call)[0].requires_grad
    plain = [t.detach() for t in x]
    agree(lambda: vmap(lambda q: flex_attention(q, *plain[1:]))(plain[0][None]))
    agree(lambda: grad(lambda q: flex_attention(q, *plain[1:]).square().sum())(plain[0]))
    agree(lambda: checkpoint(call, use_reentrant=False))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(plain[0], plain[0].cos())

        def moved():
            return torch.autograd.forward_ad.unpack_dual(flex_attention(dual, *plain[1:])).tangent

        agree(moved)
    before = len(lifted)
    agree(call)
    assert len(lifted) == before


def test_what_differs_is_no_repetition():
    x = operands(length=37)
    seen = []
    for options in (
        {}, {"scale": 0.5}, {"scale": 2}, {"enable_gqa": True}, {"block_mask": mask_of(causal)},
        {"kernel_options": KernelOptions(eager_kernels=True)}, {"score_mod": alibi(torch.ones(2))},
    ):  # fmt: skip
        for _ in range(2):
            agree(lambda options=options: flex_attention(*x, **options))
        seen.append(len(repeats._repeats))
    assert seen == list(range(1, 8))
    agree(lambda: flex_attention(*x, return_lse=False, dropout_p=0.0))
    agree(lambda: flex_attention(x[0].mT.contiguous().mT, *x[1:]))
    wider = [torch.cat([t, t], 1) for t in x]
    agree(lambda: flex_attention(*wider))
    agree(lambda: flex_attention(wider[0], *x[1:], enable_gqa=True))
    with eager_kernels(), pytest.raises(HeadCountError):
        flex_attention(wider[0], *x[1:])


def test_masks_that_change():
    x, mask = operands(length=37, grad=True), mask_of(causal)
    call = functools.partial(flex_attention, *x, block_mask=mask)
    agree(call)
    mask.mask_mod = lambda b, h, q, k: q >= k + 1
    agree(call)
    other = mask_of(lambda b, h, q, k: q <= k)
    for name in ("kv_num_blocks", "kv_indices", "q_num_blocks", "q_indices", "mask_mod"):
        setattr(mask, name, getattr(other, name))
        setattr(mask, f"full_{name}", getattr(other, f"full_{name}", None))
    agree(call)
    lengths = torch.ones(1, requires_grad=True)
    mask.mask_mod = lambda b, h, q, k: k < lengths[0]
    with eager_kernels(), pytest.raises(MaskCaptureGradError):
        call()
    with eager_kernels(), pytest.raises(SlicedMaskModError):
        flex_attention(*[t[:, :, :16] for t in x], block_mask=mask_of(causal)[:, :, 0])


def test_masks_are_not_kept():
    x, before = operands(length=37), set(repeats._masks)
    for _ in range(3):
        agree(lambda: flex_attention(*x, block_mask=mask_of(causal)))
    gc.collect()
    assert before >= set(repeats._masks)
    assert len(repeats._repeats) == 1


def test_values_that_the_backward_pass_needs_must_not_change():
    x, table = operands(grad=True), torch.randn(2)
    for _ in range(2):
        with eager_kernels():
            out = flex_attention(*x, lambda s, b, h, q, k: s * table[h])
        table.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()
