"""Mask blocks of 16 to 64 tokens: the Hopper forward kernel, and the gradients behind it.

pytest tests/gpu/test_small_blocks.py -q -n 8
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch._inductor.utils import run_and_get_code

import flexhop
from flexhop.options import KernelOptions
from tests.budgets import assert_within_budget, dense_attention, dense_backward

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="needs a Hopper GPU",
    ),
]


class Call(NamedTuple):
    """A call of two batches: the size of a block, and facts that change the tile.

    planes: batches and heads that have lists of their own. group: query heads per key head.
    """

    size: tuple[int, int]
    length: int = 1000
    width: int = 128
    group: int = 1
    planes: tuple[int, int] = (1, 1)
    has_mods: bool = True
    dtype: torch.dtype = torch.bfloat16


CALLS = [
    Call((64, 64)),
    Call((64, 64), length=1024, has_mods=False, width=64),
    Call((64, 64), group=2, planes=(2, 1)),
    Call((64, 64), group=4, planes=(2, 8), width=80),
    Call((64, 64), width=256, dtype=torch.float16),
    Call((32, 32), planes=(2, 2)),
    Call((32, 32), group=4, has_mods=False),
    Call((32, 32), group=2, width=256),
    Call((32, 32), length=1024, group=4, planes=(1, 8), width=64),
    Call((16, 16), length=513, planes=(2, 1)),
    Call((16, 16), group=8, width=96),
    Call((16, 16), group=2, width=192, has_mods=False),
    Call((128, 64)),
    Call((128, 16), group=2, has_mods=False),
    Call((64, 16), planes=(1, 2)),
    Call((16, 128), group=4),
    Call((192, 32)),
]


class Lists(NamedTuple):
    """A mask with lists in no order, and what it keeps [B', H', M, N]."""

    mask: flexhop.BlockMask
    visible: Tensor


def see_most(b: Any, h: Any, q: Any, k: Any) -> Any:
    return (q * 5 + k * 3) % 7 != 0


def random_lists(call: Call) -> Lists:
    """A third of the blocks, half of them listed as full; the second row of blocks sees none."""
    q_size, kv_size = call.size
    rows, columns = -(-call.length // q_size), -(-call.length // kv_size)
    generator = torch.Generator().manual_seed(q_size + kv_size)
    sizes = (*call.planes, rows, columns)
    kept = torch.rand(sizes, generator=generator) < 0.3
    kept[:, :, 1] = False
    whole = torch.rand(sizes, generator=generator) < 0.5
    whole[:, :, call.length // q_size :] = False
    whole[..., call.length // kv_size :] = False
    order = torch.rand(sizes, generator=generator)

    def listed(blocks: Tensor) -> list[Tensor]:
        places = torch.argsort(order + ~blocks, dim=-1)
        return [t.int().contiguous().cuda() for t in (blocks.sum(-1), places)]

    lengths = (call.length, call.length)
    if call.has_mods:
        lists = [*listed(kept & ~whole), *listed(kept & whole)]
        mod = see_most
    else:
        lists, mod = listed(kept), None
    mask = flexhop.BlockMask.from_kv_blocks(
        *lists, BLOCK_SIZE=call.size, mask_mod=mod, seq_lengths=lengths
    )
    position = torch.arange(call.length)
    by_score = (..., position[:, None] // q_size, position // kv_size)
    visible = kept[by_score]
    if call.has_mods:
        visible &= whole[by_score] | see_most(0, 0, position[:, None], position)
    return Lists(mask, visible.cuda())


def operands(call: Call) -> list[Tensor]:
    """Query, key, value and the gradient of the output; eight heads if they share keys."""
    heads = 8 if call.group > 1 else 2
    heads = max(heads, call.planes[1])
    generator = torch.Generator("cuda").manual_seed(call.length)
    made = [
        torch.randn(2, n, call.length, call.width, generator=generator, device="cuda")
        for n in (heads, heads // call.group, heads // call.group, heads)
    ]
    return [t.to(call.dtype) for t in made]


@pytest.mark.parametrize("call", CALLS, ids=str)
def test_results_and_gradients(call: Call):
    lists, tensors = random_lists(call), operands(call)
    heads, factor = tensors[0].size(1), torch.linspace(0.5, 1.5, 8, device="cuda")
    scale = call.width**-0.5

    def multiply_by_head(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s * factor[h] + 0.001 * (k - q)

    mod = multiply_by_head if call.has_mods else None
    options = KernelOptions(backend="auto", short_queries="forward")

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Any:
        wanted = flexhop.AuxRequest(lse=True, max_scores=True)
        return flexhop.flex_attention(
            query, key, value, mod, lists.mask, enable_gqa=True, kernel_options=options,
            return_aux=wanted,
        )  # fmt: skip

    leaves = [t.clone().requires_grad_() for t in tensors[:3]]
    compiled = torch.compile(attend, fullgraph=True)
    (out, aux), codes = run_and_get_code(compiled, *leaves)
    assert any("def consume" in code for code in codes), "not the Hopper kernel"
    again, _ = compiled(*leaves)
    assert torch.equal(out, again)
    found = torch.autograd.grad(out, leaves, tensors[3])

    visible = lists.visible.expand(2, heads, -1, -1)
    runs = []
    for dtype in (torch.float64, call.dtype):
        copies = [t.to(dtype).requires_grad_() for t in tensors[:3]]
        dense = dense_attention(*copies, mod, visible, scale)
        dense_backward(dense, tensors[3].to(dtype), None)
        runs.append((dense, [copy.grad for copy in copies]))
    (gold, gold_grads), (reference, reference_grads) = runs
    for name, result in {"out": out, "lse": aux.lse, "largest": aux.max_scores}.items():
        assert_within_budget(result, getattr(gold, name), getattr(reference, name), name=name)
    for name, *three in zip("qkv", found, gold_grads, reference_grads, strict=True):
        assert_within_budget(*three, name=name)
