"""The front door: mistakes surface as our classes, eager and compiled; statistics on request."""

import numpy as np
import pytest
import torch

import flexhop
from flexhop import errors
from flexhop.masks import causal
from flexhop.offline.interpret import interpret
from flexhop.options import FlexKernelOptions

pytestmark = pytest.mark.filterwarnings(
    "ignore::flexhop.errors.EagerWarning", "ignore::flexhop.errors.ReturnLseDeprecationWarning"
)


def operands(length: int = 64):
    return tuple(torch.randn(1, 2, length, 16) for _ in range(3))


def mistaken_calls():
    mask = flexhop.create_block_mask(causal, None, None, 64, 64, BLOCK_SIZE=32, device="cpu")
    return {
        "sliced": (errors.SlicedMaskModError, {"block_mask": mask[:, :, 0]}),
        "text": (errors.BlockMaskTypeError, {"block_mask": "causal"}),
        "dense": (errors.BlockMaskTypeError, {"block_mask": torch.ones(64, 64)}),
        "twice": (
            errors.AuxConflictError,
            {"return_lse": True, "return_aux": flexhop.AuxRequest(lse=True)},
        ),
        "option": (errors.UnknownOptionError, {"kernel_options": {"BLOK_M": 64}}),
    }


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "fullgraph"])
@pytest.mark.parametrize("name", mistaken_calls())
def test_mistakes_raise_our_classes(name: str, compiled: bool):
    kind, keywords = mistaken_calls()[name]
    attend = flexhop.flex_attention
    if compiled:
        attend = torch.compile(attend, fullgraph=True, backend="eager")
    query, key, value = operands()
    with pytest.raises(kind):
        attend(query[:, :, :32] if name == "sliced" else query, key, value, **keywords)


def test_options_made_in_a_graph_raise_our_errors():
    """Dynamo alone would say that it observed an exception, without its text."""

    def attend(query, block_m):
        options = flexhop.KernelOptions(forward=flexhop.Tile(block_m, 64))
        return flexhop.flex_attention(query, query, query, kernel_options=options)

    query = operands()[0]
    run = torch.compile(attend, fullgraph=True, backend="eager")
    assert run(query, 32).shape == query.shape
    with pytest.raises(errors.OptionValueError, match="block_m value 48: it must be a power of"):
        run(query, 48)


def test_a_sliced_mask_with_a_new_mask_mod_works():
    mask = flexhop.create_block_mask(causal, None, None, 64, 64, BLOCK_SIZE=32, device="cpu")
    second = mask[:, :, 1]
    second.mask_mod = lambda b, h, q_idx, kv_idx: causal(b, h, q_idx + 32, kv_idx)
    query, key, value = operands()
    whole = flexhop.flex_attention(query, key, value, block_mask=mask)
    part = flexhop.flex_attention(query[:, :, 32:], key, value, block_mask=second)
    torch.testing.assert_close(part, whole[:, :, 32:])


def test_kernel_options_keys_are_those_of_pytorch():
    from torch.nn.attention.flex_attention import FlexKernelOptions as Theirs

    ours = set(FlexKernelOptions.__annotations__)
    assert set(Theirs.__annotations__) <= ours
    assert {"FLOAT32_PRECISION"} == ours - set(Theirs.__annotations__)


@pytest.mark.filterwarnings("ignore::flexhop.errors.EagerWarning")
def test_numpy_flags_are_flags():
    """A comparison of NumPy numbers is no bool of Python."""
    inputs, flag = [torch.randn(1, 2, 8, 8)] * 3, np.float64(2) > 1
    out, lse = flexhop.flex_attention(*inputs, enable_gqa=flag, return_lse=flag)
    expected = flexhop.flex_attention(*inputs, return_lse=True)
    torch.testing.assert_close((out, lse), tuple(expected))
    flexhop.create_block_mask(causal, None, None, 8, 8, "cpu", compute_q_blocks=flag)


def attend_without(batch: int, queries: int):
    """A call without batches or queries, and all that gets a gradient."""
    query = torch.randn(batch, 4, queries, 16, requires_grad=True)
    key, value = (torch.randn(batch, 2, 24, 16, requires_grad=True) for _ in range(2))
    slopes = torch.randn(4, requires_grad=True)
    mask = flexhop.create_block_mask(causal, None, None, queries, 24, BLOCK_SIZE=16, device="cpu")

    def attend(query, key, value):
        return flexhop.flex_attention(
            query, key, value, lambda score, b, h, q, k: score + slopes[h] * (k - q), mask,
            enable_gqa=True, return_aux=flexhop.AuxRequest(lse=True, max_scores=True),
        )  # fmt: skip

    return attend, (query, key, value), slopes


@pytest.mark.parametrize("backend", ["", "aot_eager", "inductor", "a GPU's"])
@pytest.mark.parametrize(("batch", "queries"), [(2, 0), (0, 24)])
def test_calls_without_queries(batch: int, queries: int, backend: str):
    """What PyTorch's own eager call takes. No kernel is launched, because its grid is empty."""
    attend, leaves, slopes = attend_without(batch, queries)

    def loss(result):
        return result[0].sum() + result[1].lse.sum()

    if backend == "a GPU's":
        generated = interpret(attend, *leaves, grad=loss)
        assert not generated.templates
        out, aux = generated.result
    else:
        run = torch.compile(attend, fullgraph=True, backend=backend) if backend else attend
        out, aux = run(*leaves)
        loss((out, aux)).backward()
    assert out.shape == (batch, 4, queries, 16)
    assert aux.lse.shape == aux.max_scores.shape == (batch, 4, queries)
    # Eager calls evaluate no mod: nothing depends on slopes.
    for leaf in (*leaves, slopes) if backend else leaves:
        assert torch.equal(leaf.grad, torch.zeros_like(leaf))


def test_a_dynamic_length_may_become_0():
    attend = torch.compile(flexhop.flex_attention, fullgraph=True, backend="aot_eager")
    _, key, value = operands(24)
    for length in (7, 9, 0, 3):
        query = torch.randn(1, 2, length, 16)
        expected = torch.nn.functional.scaled_dot_product_attention(query, key, value)
        torch.testing.assert_close(attend(query, key, value), expected)


def test_flags_of_other_entry_points_are_bools():
    query, *_ = operands(8)
    tokens, offsets = query[0].transpose(0, 1), torch.tensor([0, 8])
    calls = {
        "is_causal": lambda: flexhop.scaled_dot_product_attention(*[query] * 3, is_causal="no"),
        "bottom_right": lambda: flexhop.varlen_attention(
            *[tokens] * 3, offsets, bottom_right=torch.ones(1)
        ),
    }
    for name, call in calls.items():
        with pytest.raises(errors.OptionValueError, match=f"{name} value .* True or False"):
            call()
