"""Dropout in the generated kernels, in Triton's interpreter: the mask, results and gradients."""

import pytest
import torch

import flexhop
from flexhop.masks import causal_with_offset
from flexhop.offline.interpret import Memory, interpret
from tests.budgets import assert_within_budget
from tests.dropout_cases import differentiate, double, dropped_attention, placed_call

SEED = torch.tensor([4023233417, 2868451234])
P = 0.3
PORTABLE = flexhop.KernelOptions(backend="triton")


def kept_by_kernel(queries: int, keys: int, heads: tuple[int, int], **keywords: object):
    """Which weights the forward kernel keeps: all weights are equal and values one-hot."""
    query, key = torch.zeros(2, heads[0], queries, 64), torch.zeros(2, heads[1], keys, 64)
    value = torch.eye(keys).expand(2, heads[1], keys, keys).contiguous()
    generated = interpret(
        lambda q, k, v: flexhop.flex_attention(
            q, k, v, enable_gqa=True, dropout_p=P, dropout_seed=SEED, **keywords
        ),
        query, key, value, memory=Memory(poison=True, check_bounds=True),
    )  # fmt: skip
    return generated.result * keys * (1 - P)


@pytest.mark.parametrize(
    ("queries", "keys", "tile"),
    [
        (40, 50, flexhop.Tile(16, 16)),
        (50, 90, flexhop.Tile(32, 64)),
        (33, 60, flexhop.Tile(64, 32)),
    ],
)
def test_forward_keeps_what_the_mask_says(queries, keys, tile):
    options = flexhop.KernelOptions(forward=tile, short_queries="forward", backend="triton")
    found = kept_by_kernel(queries, keys, (4, 2), kernel_options=options)
    expected = flexhop.dropout_mask(SEED, P, (2, 4, queries, keys))
    torch.testing.assert_close(found, expected.float(), atol=1e-5, rtol=0)


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("queries", [1, 5])
def test_decode_keeps_what_the_mask_says(queries, splits):
    options = flexhop.KernelOptions(short_queries="decode", splits=splits)
    found = kept_by_kernel(queries, 200, (8, 2), kernel_options=options)
    expected = flexhop.dropout_mask(SEED, P, (2, 8, queries, 200))
    torch.testing.assert_close(found, expected.float(), atol=1e-5, rtol=0)


@pytest.mark.parametrize("block", [40, 64])
def test_blocks_that_do_not_hold_whole_groups(block):
    """Tiles of blocks of 40 begin in the middle of a group, where each weight draws its own."""
    mask = flexhop.create_block_mask(
        lambda b, h, q, k: q >= -1, None, None, 80, 120, "cpu", BLOCK_SIZE=block
    )
    found = kept_by_kernel(80, 120, (2, 2), block_mask=mask, kernel_options=PORTABLE)
    expected = flexhop.dropout_mask(SEED, P, (2, 2, 80, 120))
    torch.testing.assert_close(found, expected.float(), atol=1e-5, rtol=0)


def gradients(queries: int, keys: int, dtype: torch.dtype, options: flexhop.KernelOptions):
    generator = torch.Generator().manual_seed(0)
    sizes = ((2, 4, queries, 64), (2, 2, keys, 64), (2, 2, keys, 64))
    leaves = tuple(
        torch.randn(size, generator=generator).to(dtype).requires_grad_() for size in sizes
    )
    bias = torch.randn(4, queries + keys, generator=generator).requires_grad_()
    grad = torch.randn(sizes[0], generator=generator).to(dtype)
    mask = causal_with_offset(keys - queries)
    blocks = flexhop.create_block_mask(mask, None, None, queries, keys, "cpu", BLOCK_SIZE=64)

    def make_mod(table):
        return lambda score, b, h, q, k: score + table[h, q - k + keys]

    def call(query, key, value, table):
        return flexhop.flex_attention(
            query, key, value, make_mod(table), blocks, enable_gqa=True, kernel_options=options,
            dropout_p=P, dropout_seed=SEED, return_aux=flexhop.AuxRequest(lse=True),
        )  # fmt: skip

    def loss(result):
        out, aux = result
        return (out * grad).sum() + aux.lse.square().sum()

    generated = interpret(
        call, *leaves, bias, grad=loss, memory=Memory(poison=True, check_bounds=True)
    )
    out, aux = generated.result
    found = {"out": out, "lse": aux.lse}
    names = ("query", "key", "value", "bias")
    found |= {name: leaf.grad for name, leaf in zip(names, (*leaves, bias), strict=True)}

    kept = flexhop.dropout_mask(SEED, P, (2, 4, queries, keys))
    visible = mask(0, 0, torch.arange(queries)[:, None], torch.arange(keys))

    def plain(tensors):
        *operands, table = tensors
        result = dropped_attention(
            tuple(operands), kept, P, visible=visible, score_mod=make_mod(table)
        )
        values = differentiate(result, tuple(tensors), grad)
        return dict(zip(found, (values.out, values.lse, *values.grads), strict=True))

    copies = tuple(t.detach().requires_grad_() for t in (*leaves, bias))
    return found, plain(double((*leaves, bias))), plain(copies)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("queries", [100, 3])
def test_results_and_gradients(queries, dtype):
    found, gold, reference = gradients(queries, 130, dtype, PORTABLE)
    for name, actual in found.items():
        assert_within_budget(
            actual, gold[name], reference[name], name=name, captured=name == "bias"
        )


@pytest.mark.parametrize(
    ("queries", "tile"),
    [(48, flexhop.Tile(16, 32)), (40, flexhop.Tile(32, 16)), (3, None)],
)
def test_a_placed_seed_is_the_mask_of_the_whole(queries, tile):
    options = flexhop.KernelOptions(forward=tile, backend="triton")
    placed = placed_call(SEED, P, queries, 64, options)
    memory = Memory(poison=True, check_bounds=True)
    out = interpret(placed.call, *placed.operands, memory=memory).result
    torch.testing.assert_close(out / placed.share, placed.kept.float(), atol=1e-5, rtol=0)
