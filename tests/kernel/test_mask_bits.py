"""The mask of partial blocks as bits: what reaches the Hopper kernel, in Triton's interpreter.

The kernel itself has no interpreter; it is replaced by a look at its arguments.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

import flexhop
from flexhop.offline import Kernel
from flexhop.offline.codegen import Graph, trace
from flexhop.offline.interpret import Memory, load
from tests.needs import needs_hopper

pytestmark = needs_hopper
BATCH, HEADS = 8, 16


class Stored(NamedTuple):
    """Bits that one kernel reads: [B', rows of blocks, stored blocks, rows, columns] bool."""

    seen: torch.Tensor
    holds_all: bool


def stored_bits(
    mask: Any, length: int, *, width: int = 64, dynamic: bool = False, grad: bool = False
) -> list[Stored]:
    """Bits that are stored before each Hopper kernel: of the forward pass, or of both passes."""
    found: list[Stored] = []

    def look(kernel: Kernel, arguments: dict[str, Any]) -> None:
        constants = kernel.constants
        if constants["STORED_BLOCKS"]:
            unit, rows = constants["BITS_UNIT"], constants["BITS_ROWS"]
            size = (-(-length // rows), constants["STORED_BLOCKS"], -1, rows, 4)
            batches = BATCH if constants["BITS_BY_BATCH"] else 1
            words = arguments["arg_MASK_BITS"].view(batches, *size)
            found.append(Stored(unpacked(words, unit), constants["HOLDS_ALL_BITS"]))

    def run(graph: Graph) -> Callable[..., Any]:
        return load(graph.codes[0], Memory(poison=True, check_bounds=True), gluon=look)

    asked = flexhop.KernelOptions(backend="hopper")
    call = trace(
        lambda q, k, v: flexhop.flex_attention(q, k, v, block_mask=mask, kernel_options=asked),
        run, (9, 0), dynamic=dynamic,
    )  # fmt: skip
    size = (BATCH, HEADS, length, width)
    operands = [torch.zeros(size, dtype=torch.bfloat16, requires_grad=grad) for _ in range(3)]
    with torch.set_grad_enabled(grad):
        out = call(*operands)
        if grad:
            out.sum().backward()
    return found


def unpacked(words: torch.Tensor, unit: int) -> torch.Tensor:
    """Words [..., units, rows, 4] as the mask that they stand for, [..., rows, columns]."""
    column = torch.arange(unit)
    word, bit = column % 8 // 2, column // 8 * 2 + column % 2
    seen = (words[..., word] >> bit & 1).bool()  # [..., units, rows, unit]
    return seen.transpose(-2, -3).flatten(-2)


def check_blocks(found: Stored, lists: tuple[torch.Tensor, ...], mod: Any, length: int) -> int:
    """Hold every stored block against mask_mod; how many there are. lists: counts and indices."""
    counts, indices = lists
    rows, columns = found.seen.shape[-2:]
    blocks = 0
    for b, row in itertools.product(range(found.seen.size(0)), range(found.seen.size(1))):
        for n in range(int(counts[b % counts.size(0), 0, row])):
            r = (row * rows + torch.arange(rows)).clamp(max=length - 1)[:, None]
            block = indices[b % counts.size(0), 0, row, n]
            c = (block * columns + torch.arange(columns)).clamp(max=length - 1)[None, :]
            assert found.seen[b, row, n].equal(mod(b, r, c).expand(rows, columns))
            blocks += 1
    return blocks


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


def neighbours(b, h, q, k):
    """A neighbourhood of 5 x 5 in rows of 24."""
    return ((q // 24 - k // 24).abs() <= 2) & ((q % 24 - k % 24).abs() <= 2)


@pytest.mark.parametrize(
    ("mod", "length", "block_size", "width", "dynamic"),
    [
        (documents(cut_at_random(512)), 512, 128, 64, True),
        (documents(cut_at_random(600, dtype=torch.int64)), 600, (128, 256), 128, False),
        (documents_by_batch(cut_at_random(BATCH, 401)), 401, 128, 64, True),
        (of_keys(torch.arange(512) % 300 < 200), 512, 128, 64, False),
        (neighbours, 901, (256, 128), 64, False),
        (neighbours, 448, (128, 192), 256, False),
    ],
    ids=["documents", "odd", "by_batch", "keys", "neighbours", "halves of words"],
)
def test_bits_are_what_mask_mod_says(mod, length, block_size, width, dynamic):
    batch = BATCH if mod.__qualname__.startswith("documents_by_batch") else None
    mask = flexhop.create_block_mask(mod, batch, None, length, length, "cpu", block_size)
    found = stored_bits(mask, length, width=width, dynamic=dynamic, grad=True)
    # Threads of backward kernels hold keys, and are asked once for each.
    assert len(found) == (1 if mod.__qualname__.startswith("of_keys") else 2)
    assert all(stored.holds_all != dynamic for stored in found)
    assert found[0].seen.size(0) == (batch or 1)
    lists = (mask.kv_num_blocks, mask.kv_indices), (mask.q_num_blocks, mask.q_indices)
    mods = (lambda b, r, c: mod(b, 0, r, c)), (lambda b, r, c: mod(b, 0, c, r))
    sides = zip(found, lists[: len(found)], mods[: len(found)], strict=True)
    for stored, of_side, by_side in sides:
        assert check_blocks(stored, of_side, by_side, length) >= (batch or 1)


def by_head(ids: torch.Tensor) -> Callable[..., torch.Tensor]:
    return lambda b, h, q, k: (ids[q] == ids[k]) & (q >= k + h)


@pytest.mark.parametrize("make", [by_head, lambda ids: lambda b, h, q, k: q >= k])
def test_masks_of_heads_and_single_comparisons_stay_functions(make):
    mask = flexhop.create_block_mask(
        make(cut_at_random(512)), None, HEADS if make is by_head else None, 512, 512, "cpu"
    )
    assert stored_bits(mask, 512) == []


def test_bits_of_a_mask_that_differs_by_batch_under_lists_that_do_not():
    ids = cut_at_random(BATCH, 512)
    every = flexhop.create_block_mask(lambda b, h, q, k: q >= -1, None, None, 512, 512, "cpu")
    mask = flexhop.BlockMask.from_kv_blocks(
        every.full_kv_num_blocks, every.full_kv_indices, mask_mod=documents_by_batch(ids)
    )
    (found,) = stored_bits(mask, 512)
    for b in range(BATCH):
        seen = torch.cat(list(found.seen[b, 2]), 1)
        assert seen.equal(ids[b, 256:384, None] == ids[b])
