"""The mask of partial blocks as bits: what reaches the Hopper kernel, in Triton's interpreter.

The kernel itself has no interpreter; it is replaced by a look at its arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import flexhop
from flexhop.lowering.hopper import bits, versions
from flexhop.offline import Kernel
from flexhop.offline.codegen import Graph, trace
from flexhop.offline.interpret import Memory, load

pytestmark = pytest.mark.skipif(versions.obstacle() != "", reason=versions.obstacle())
BATCH, HEADS = 8, 16


def stored_bits(mask: Any, length: int, dynamic: bool) -> torch.Tensor | None:
    """Words that are stored before the Hopper kernel runs, [B', rows, stored blocks, 128, 4]."""
    found: list[torch.Tensor] = []
    rows = mask.kv_num_blocks.size(2)

    def look(kernel: Kernel, arguments: dict[str, Any]) -> None:
        if kernel.constants["STORED_BLOCKS"]:
            words = arguments["arg_MASK_BITS"].clone()
            found.append(words.view(-1, rows, bits.STORED, 128, 4))

    def run(graph: Graph) -> Callable[..., Any]:
        return load(graph.code, Memory(poison=True, check_bounds=True), gluon=look)

    asked = flexhop.KernelOptions(backend="hopper")
    call = trace(
        lambda q, k, v: flexhop.flex_attention(q, k, v, block_mask=mask, kernel_options=asked),
        run, (9, 0), dynamic=dynamic,
    )  # fmt: skip
    with torch.no_grad():
        call(*(torch.zeros(BATCH, HEADS, length, 64, dtype=torch.bfloat16) for _ in range(3)))
    return found[0] if found else None


def unpacked(words: torch.Tensor) -> torch.Tensor:
    """Words [128, 4] as the mask that they stand for, [128, 128]."""
    column = torch.arange(128)
    word, bit = column % 8 // 2, column // 8 * 2 + column % 2
    return (words[:, word] >> bit & 1).bool()


def documents(ids: torch.Tensor) -> Callable[..., torch.Tensor]:
    return lambda b, h, q, k: (ids[q] == ids[k]) & (q >= k)


def documents_by_batch(ids: torch.Tensor) -> Callable[..., torch.Tensor]:
    return lambda b, h, q, k: ids[b, q] == ids[b, k]


def of_keys(seen: torch.Tensor) -> Callable[..., torch.Tensor]:
    """A mask that looks at keys alone, so that a row stands for all."""
    return lambda b, h, q, k: seen[k]


def cut_at_random(*size: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    """Ids of documents of some hundred tokens."""
    starts = torch.rand(size, generator=torch.Generator().manual_seed(1)) < 0.006
    return starts.cumsum(-1, dtype=dtype)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(
    ("make", "table", "length"),
    [
        (documents, cut_at_random(512), 512),
        (documents, cut_at_random(600, dtype=torch.int64), 600),
        (documents_by_batch, cut_at_random(BATCH, 401), 401),
        (of_keys, torch.arange(512) % 300 < 200, 512),
    ],
    ids=["documents", "odd", "by_batch", "keys"],
)
def test_bits_are_what_mask_mod_says(make, table, length, dynamic):
    mod, by_batch = make(table), table.dim() == 2
    mask = flexhop.create_block_mask(mod, BATCH if by_batch else None, None, length, length, "cpu")
    words = stored_bits(mask, length, dynamic)
    assert words is not None
    assert words.size(0) == (BATCH if by_batch else 1)
    place, blocks = torch.arange(128), 0
    for b, row in ((b, row) for b in range(words.size(0)) for row in range(words.size(1))):
        for n in range(int(mask.kv_num_blocks[b, 0, row])):
            block = mask.kv_indices[b, 0, row, n]
            q = (row * 128 + place).clamp(max=length - 1)[:, None]
            k = (block * 128 + place).clamp(max=length - 1)[None, :]
            wanted = mod(b, 0, q, k).expand(128, 128)
            assert unpacked(words[b, row, n]).equal(wanted)
            blocks += 1
    assert blocks >= words.size(0)


def by_head(ids: torch.Tensor) -> Callable[..., torch.Tensor]:
    return lambda b, h, q, k: (ids[q] == ids[k]) & (q >= k + h)


@pytest.mark.parametrize("make", [by_head, lambda ids: lambda b, h, q, k: q >= k])
def test_masks_of_heads_and_those_that_read_nothing_stay_functions(make):
    mask = flexhop.create_block_mask(
        make(cut_at_random(512)), None, HEADS if make is by_head else None, 512, 512, "cpu"
    )
    assert stored_bits(mask, 512, dynamic=False) is None


def test_bits_of_a_mask_that_differs_by_batch_under_lists_that_do_not():
    ids = cut_at_random(BATCH, 512)
    every = flexhop.create_block_mask(lambda b, h, q, k: q >= -1, None, None, 512, 512, "cpu")
    mask = flexhop.BlockMask.from_kv_blocks(
        every.full_kv_num_blocks, every.full_kv_indices, mask_mod=documents_by_batch(ids)
    )
    found = stored_bits(mask, 512, dynamic=False)
    assert found is not None
    for b in range(BATCH):
        seen = torch.cat([unpacked(found[b, 2, n]) for n in range(4)], 1)
        assert seen.equal(ids[b, 256:384, None] == ids[b])
