"""Batches and heads that a mask does not tell apart share its lists, and its kernels."""

import copy
import functools
import re
from typing import Any

import pytest
import torch
from torch import Tensor

import flexhop
from flexhop.block_mask import BlockMask, create_block_mask, create_mask
from flexhop.block_mask.fields import TENSOR_FIELDS
from flexhop.errors import BlockMaskFieldError, FlexhopError
from flexhop.offline import generate_code
from tests.needs import needs_hopper

IDS = torch.arange(300) // 70
SHARED: dict[str, tuple[Any, tuple[bool, bool]]] = {
    "all": (lambda b, h, q, k: IDS[q] == IDS[k], (True, True)),
    "batches": (lambda b, h, q, k: (q >= k) & (k >= 100 * h), (True, False)),
    "heads": (lambda b, h, q, k: (q >= k) | (k < 100 * b), (False, True)),
    "none": (lambda b, h, q, k: (q >= k) & (k >= 100 * h - b), (False, False)),
}


@pytest.mark.parametrize("name", SHARED)
def test_batches_and_heads_that_a_mask_ignores_share_its_lists(name: str):
    mask_mod, shared = SHARED[name]
    mask = create_block_mask(mask_mod, 2, 4, 300, 300, device="cpu")
    fields = mask._tensors()
    expected = dense_lists(mask_mod, 2, 4, 300)
    assert mask.shape == (2, 4, 300, 300)
    assert torch.equal(mask.to_dense(), expected)
    for held in (mask, mask.to("cpu", copy=True), copy.deepcopy(mask)):
        lists = held._tensors()
        assert all(tuple(n == 0 for n in t.stride()[:2]) == shared for t in lists)
        assert held.is_contiguous() and held.contiguous() is held
        assert all(map(torch.equal, lists, fields))
    written = mask.clone()  # each batch and head has its own
    written.kv_num_blocks[0, 0] = 0
    assert written.kv_num_blocks[1, 1].tolist() == mask.kv_num_blocks[1, 1].tolist()


@pytest.mark.parametrize("name", ["heads", "expanded"])
@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_a_compiled_function_makes_the_same_lists(name: str, backend: str):
    """Its graph knows less of a captured tensor than an eager call."""

    def made(kept: Tensor) -> BlockMask:
        mods = {"expanded": lambda b, h, q, k: kept[b, h, q, k], "heads": SHARED["heads"][0]}
        return create_block_mask(mods[name], 2, 4, 300, 300, device="cpu")

    kept = (torch.rand(2, 1, 300, 300) > 0.9).expand(-1, 4, -1, -1)
    mask = torch.compile(made, fullgraph=True, backend=backend)(kept)
    assert mask.shape == (2, 4, 300, 300)
    assert mask.kv_indices.stride(1) == 0
    for name_of in TENSOR_FIELDS:
        one, other = getattr(mask, name_of), getattr(made(kept), name_of)
        assert (one is None and other is None) or torch.equal(one, other)


def test_a_captured_tensor_may_repeat_itself():
    """As a dense mask that was expanded to all heads: no head has blocks of its own."""
    kept = (torch.rand(2, 1, 300, 300) > 0.9).expand(-1, 4, -1, -1)
    masks = [
        create_block_mask(lambda b, h, q, k: table[b, h, q, k], 2, 4, 300, 300, device="cpu")  # noqa: B023
        for table in (kept, kept.contiguous())
    ]
    assert [mask.kv_indices.stride(1) for mask in masks] == [0, masks[1].kv_indices[0, 0].numel()]
    assert torch.equal(masks[0].kv_indices, masks[1].kv_indices)
    query = torch.randn(2, 4, 300, 16)
    attend = torch.compile(lambda x, mask: flexhop.flex_attention(x, x, x, block_mask=mask))
    results = [attend(query, mask) for mask in masks]
    torch.testing.assert_close(results[0], results[1])


def dense_lists(mask_mod: Any, batch: int, heads: int, length: int) -> Tensor:
    """Which blocks of 128 x 128 hold a visible pair, [B, H, R, C] int32, from every pair."""
    dense = create_mask(mask_mod, batch, heads, length, length, device="cpu")
    padded = torch.nn.functional.pad(dense, (0, -length % 128) * 2)
    return padded.unflatten(-1, (-1, 128)).unflatten(-3, (-1, 128)).amax((-1, -3)).int()


@pytest.mark.parametrize("sizes", [(0, 4), (2, 0)])
def test_no_batches_or_heads(sizes: tuple[int, int]):
    mask = create_block_mask(lambda b, h, q, k: q >= k, *sizes, 300, 300, device="cpu")
    assert mask.shape == (*sizes, 300, 300)


@needs_hopper
def test_kernels_of_a_mask_made_inside_are_the_same():
    inputs = [torch.zeros(2, 8, 4096, 64, dtype=torch.bfloat16) for _ in range(3)]

    def attend(*x: Tensor, sizes: tuple[int | None, int | None]) -> Tensor:
        mask_mod = lambda b, h, q, k: (q // 3 >= k // 5) | (k % 7 == 0)  # noqa: E731
        mask = create_block_mask(mask_mod, *sizes, 4096, 4096, device=x[0].device)
        return flexhop.flex_attention(*x, block_mask=mask)

    codes = [
        generate_code(functools.partial(attend, sizes=sizes), *inputs)
        for sizes in ((None, None), (2, 8))
    ]
    few, many = ([constants_of(kernel.source) for kernel in code.templates] for code in codes)
    assert few == many


def test_masks_that_share_lists_are_copied_into_each_other():
    def made(first: int, **how: bool) -> BlockMask:
        edge = torch.tensor(first)
        return create_block_mask(lambda b, h, q, k: k >= edge, 2, 4, 300, 300, device="cpu", **how)

    target, source = made(0), made(200)
    target.copy_(source)
    assert torch.equal(target.kv_indices, source.kv_indices)
    assert torch.equal(target.full_kv_num_blocks, source.full_kv_num_blocks)
    target.copy_(made(0, separate_full_blocks=False))
    assert not target.full_kv_num_blocks.any() and not target.full_q_num_blocks.any()
    lists = (source.kv_num_blocks.contiguous(), source.kv_indices.contiguous())
    apart = BlockMask.from_kv_blocks(
        *lists, source.full_kv_num_blocks.contiguous(), source.full_kv_indices.contiguous(),
        mask_mod=source.mask_mod, seq_lengths=(300, 300),
    )  # fmt: skip
    apart.copy_(source)  # the target has room for each
    with pytest.raises(BlockMaskFieldError, match="share the target's lists"):
        target.copy_(apart)


@pytest.mark.parametrize(("sizes", "error"), [((3, 4), "batch 3"), ((2, 3), "3 heads")])
def test_shared_lists_are_refused_for_other_sizes(sizes: tuple[int, int], error: str):
    mask = create_block_mask(lambda b, h, q, k: q >= k, *sizes, 64, 64, device="cpu")
    query = torch.randn(2, 4, 64, 16)
    with pytest.raises(FlexhopError, match=error):
        flexhop.flex_attention(query, query, query, block_mask=mask)


@needs_hopper
@pytest.mark.parametrize("name", ["all", "heads"])
def test_kernels_are_those_of_a_mask_without_batches_and_heads(name: str):
    """Bits belong to masks that heads share, however their blocks were asked for."""
    ids = torch.arange(4096) // 300
    mods = {
        "all": lambda b, h, q, k: ids[q] == ids[k],
        "heads": lambda b, h, q, k: (q // 3 >= k // 5) | (k % 7 == b),
    }
    inputs = [
        torch.zeros(2, 8, 4096, 64, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)
    ]
    sizes = [(None, None), (2, 8)] if name == "all" else [(2, None), (2, 8)]
    masks = [create_block_mask(mods[name], *size, 4096, 4096, device="cpu") for size in sizes]
    codes = [
        generate_code(lambda *x: flexhop.flex_attention(*x, block_mask=mask), *inputs, grad=True)  # noqa: B023
        for mask in masks
    ]
    few, many = ([constants_of(kernel.source) for kernel in code.templates] for code in codes)
    assert few == many
    assert any("BITS_WORDS" in line for lines in few for line in lines)
    assert any(
        line.startswith("STORED_BLOCKS") and "(0)" not in line for lines in few for line in lines
    )


def constants_of(source: str) -> list[str]:
    """Lines of a kernel's text, of which names and strides may differ."""
    return re.findall(r"^[A-Z_0-9]+ = \w+\.constexpr\(.*\)$", source, re.MULTILINE)
