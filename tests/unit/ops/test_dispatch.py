"""What Dynamo may meet in mods, masks and options; compiled results against eager attention."""

import functools

import pytest
import torch
from torch._subclasses.fake_tensor import DynamicOutputShapeException
from torch.nn.attention import flex_attention as intree

import flexhop
from flexhop import AuxRequest, KernelOptions, Tile, flex_attention
from tests.unit.ops.support import (
    BATCH,
    HEADS,
    LENGTH,
    Counted,
    assert_same,
    causal,
    causal_mask,
    compiled,
    operands,
    quiet,
)

pytestmark = quiet


def attend_with(score_mod):
    return lambda query, key, value: flex_attention(query, key, value, score_mod)


class Biased(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.slope = torch.nn.Parameter(torch.randn(HEADS))
        self.register_buffer("offset", torch.randn(LENGTH))

    def score(self, score, b, h, q_idx, kv_idx):
        return score + self.slope[h] + self.offset[kv_idx]

    def forward(self, query, key, value):
        return flex_attention(query, key, value, self.score)


class Slope(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.slope = torch.nn.Parameter(torch.randn(HEADS))

    def forward(self, score, b, h, q_idx, kv_idx):
        return score + self.slope[h]


class Callable:
    def __init__(self):
        self.table = torch.randn(HEADS)

    def __call__(self, score, b, h, q_idx, kv_idx):
        return score + self.table[h]


# mods


def test_nested_functions():
    table = torch.randn(HEADS)

    def inner(x, h):
        return x + table[h]

    def outer(x, h):
        return inner(x, h) * 2

    assert_same(attend_with(lambda s, b, h, q, k: outer(s, h)), operands(grad=True))


def test_method_of_a_module_with_parameter_and_buffer():
    module, inputs = Biased(), operands(grad=True)
    assert_same(module, inputs, [*inputs, module.slope])


def test_module_as_mod():
    mod, inputs = Slope(), operands(grad=True)
    assert_same(attend_with(mod), inputs, [*inputs, mod.slope])


def test_partial():
    def scaled(factor, table, score, b, h, q_idx, kv_idx):
        return score * factor + table[h]

    mod = functools.partial(scaled, 2.0, torch.randn(HEADS))
    assert_same(attend_with(mod), operands(grad=True))


def test_callable_object_in_the_closure_and_as_argument():
    mod, inputs = Callable(), operands()
    assert_same(attend_with(mod), inputs)
    torch.testing.assert_close(
        compiled(flex_attention)(*inputs, mod), flex_attention(*inputs, mod)
    )


def test_non_contiguous_view_made_inside():
    table, inputs = torch.randn(LENGTH, HEADS, 2, requires_grad=True), operands(grad=True)

    def function(query, key, value):
        view = table.transpose(0, 1)[:, :, 1]
        return flex_attention(query, key, value, lambda s, b, h, q, k: s + view[h, k])

    assert_same(function, inputs, [*inputs, table])


def test_non_contiguous_capture():
    table = torch.randn(LENGTH, HEADS).t()
    assert_same(attend_with(lambda s, b, h, q, k: s + table[h, k]), operands())


def test_scalar_captures():
    factor, inputs = torch.tensor(1.5, requires_grad=True), operands(grad=True)
    mod = attend_with(lambda s, b, h, q, k: s * factor + factor[()])
    assert_same(mod, inputs, [*inputs, factor])


def test_one_tensor_captured_and_read_several_times():
    table, inputs = torch.randn(LENGTH, requires_grad=True), operands(grad=True)
    alias = table
    mod = attend_with(lambda s, b, h, q, k: s + table[q] * alias[k] + table[k])
    assert_same(mod, inputs, [*inputs, table])


def test_the_query_as_capture():
    def function(query, key, value):
        return flex_attention(query, key, value, lambda s, b, h, q, k: s + query[b, h, q, 0])

    assert_same(function, operands(grad=True))


def test_one_tensor_in_both_mods():
    table = torch.randn(LENGTH)
    mask = causal_mask(mask_mod=lambda b, h, q, k: table[k] > -1)
    assert_same(
        lambda *x: flex_attention(*x, lambda s, b, h, q, k: s + table[q], mask),
        operands(grad=True),
    )


def test_negative_indices_count_from_the_end():
    table, inputs = torch.randn(2 * LENGTH, requires_grad=True), operands(grad=True)
    mod = attend_with(lambda s, b, h, q, k: s + table[q - k] + table[-1])
    assert_same(mod, inputs, [*inputs, table])
    distance = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)
    query, key, value = inputs
    scores = query @ key.mT / query.size(-1) ** 0.5 + table[distance] + table[-1]
    torch.testing.assert_close(mod(*inputs), scores.softmax(-1) @ value)


def test_chain_of_indexing():
    table, inputs = torch.randn(BATCH, HEADS, LENGTH, requires_grad=True), operands(grad=True)
    mod = attend_with(lambda s, b, h, q, k: s + table[b][h][q] + table[0][h, k])
    assert_same(mod, inputs, [*inputs, table])


# masks


@pytest.mark.parametrize("make", [causal_mask, lambda: _intree_mask()], ids=["ours", "torch"])
def test_block_mask_as_argument(make):
    run, inputs = compiled(flex_attention), operands()
    expected = flex_attention(*inputs, block_mask=causal_mask())
    torch.testing.assert_close(run(*inputs, block_mask=make()), expected)


@pytest.mark.parametrize("make", [causal_mask, lambda: _intree_mask()], ids=["ours", "torch"])
def test_block_mask_in_the_closure(make):
    mask = make()
    assert_same(lambda *x: flex_attention(*x, block_mask=mask), operands(grad=True))


@pytest.mark.parametrize("make", [causal_mask, lambda: _intree_mask()], ids=["ours", "torch"])
def test_block_mask_made_inside(make):
    assert_same(lambda *x: flex_attention(*x, block_mask=make()), operands(grad=True))


def _intree_mask():
    return intree.create_block_mask(
        causal, None, None, LENGTH, LENGTH, device="cpu", BLOCK_SIZE=16
    )


# options and results


@pytest.mark.parametrize(
    "options",
    [
        KernelOptions(float32_precision="ieee"),
        {"BLOCK_M": 32},
        KernelOptions(forward=Tile(32, 32)),
    ],
    ids=["object", "dict", "tile"],
)
def test_options_in_the_closure(options):
    assert_same(lambda *x: flex_attention(*x, kernel_options=options), operands(grad=True))


def test_options_made_inside():
    def function(*inputs):
        return flex_attention(*inputs, kernel_options=KernelOptions(forward=Tile(32, 32)))

    assert_same(function, operands(grad=True))


def test_statistics():
    inputs = operands()
    for request in (AuxRequest(lse=True), AuxRequest(True, True), AuxRequest()):
        function = functools.partial(flex_attention, return_aux=request)
        expected, found = function(*inputs), compiled(function)(*inputs)
        for wanted, got in zip((expected[0], *expected[1]), (found[0], *found[1]), strict=True):
            assert (wanted is None) == (got is None)
            if wanted is not None:
                torch.testing.assert_close(got, wanted)


@pytest.mark.filterwarnings("ignore::flexhop.errors.ReturnLseDeprecationWarning")
def test_return_lse():
    function, inputs = functools.partial(flex_attention, return_lse=True), operands()
    torch.testing.assert_close(compiled(function)(*inputs), function(*inputs))


def test_gqa_and_shared_keys():
    query = torch.randn(3, 4, LENGTH, 8, requires_grad=True)
    key, value = torch.randn(2, 1, 2, LENGTH, 8).unbind()
    key.requires_grad_()
    assert_same(
        lambda *x: flex_attention(*x, lambda s, b, h, q, k: s + h + b, enable_gqa=True),
        [query, key, value],
    )


def test_a_loaded_lowering_changes_nothing():
    flexhop.install(lowering=True)
    flexhop.install(lowering=True)
    run = Counted(flex_attention)
    run(*operands())
    assert run.graphs == 1


@pytest.mark.parametrize("key_mod", [None, lambda x, b, h, kv_idx: x * 2], ids=["plain", "cached"])
def test_a_backend_that_gives_up(key_mod):
    """Dynamo runs the frame then, and compiles the frames that it calls."""

    def give_up(module, inputs):
        raise DynamicOutputShapeException(torch.ops.aten._unique.default)

    def attend(query, key, value):
        return flex_attention(query, key, value, lambda s, b, h, q, k: s * 2, k_mod=key_mod)

    given = [tensor.detach() for tensor in operands()]
    torch._dynamo.reset()
    found = torch.compile(attend, backend=give_up)(*given)
    torch.testing.assert_close(found, attend(*given))
