"""The order in which tiles of keys add to the gradient of query, in Triton's interpreter.

The Hopper kernel that waits for its turn has no interpreter; it is replaced by a look at its
arguments, and the walk of its tiles through the lists is done again in Python.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

import flexhop
from flexhop.block_mask import BlockMask
from flexhop.masks import causal
from flexhop.offline import Kernel
from flexhop.offline.codegen import Graph, trace
from flexhop.offline.interpret import Memory, load
from tests.needs import needs_hopper

pytestmark = needs_hopper
BATCH, HEADS = 2, 2
ASKED = flexhop.KernelOptions(backend="hopper", deterministic=True)


class Seen(NamedTuple):
    """What reaches the kernel: its constants, and the numbers of turns [B', H', tiles, blocks]."""

    constants: dict[str, Any]
    order: torch.Tensor


def run_backward(call: Callable[..., Any], tensors: list[torch.Tensor]) -> Seen:
    """Run a forward and a backward pass of zeros without the Hopper kernels themselves."""
    found: list[Seen] = []

    def look(kernel: Kernel, arguments: dict[str, Any]) -> None:
        if "arg_ORDER" in arguments:
            found.append(Seen(kernel.constants, arguments["arg_ORDER"].clone()))

    def run(graph: Graph) -> Callable[..., Any]:
        return load(graph.codes[0], Memory(poison=True, check_bounds=True), gluon=look)

    leaves = [tensor.requires_grad_() for tensor in tensors]
    trace(call, run, (9, 0), dynamic=False)(*leaves).sum().backward()
    (seen,) = found
    return seen


def visits_of(mask: BlockMask, b: int, h: int, kv_block: int) -> list[int]:
    """Blocks of queries that the lists name for a block of keys, as often as they do."""
    named: list[int] = []
    for counts, indices in (
        (mask.q_num_blocks, mask.q_indices),
        (mask.full_q_num_blocks, mask.full_q_indices),
    ):
        if counts is not None and indices is not None:
            row = (b % counts.size(0), h % counts.size(1), kv_block)
            named += indices[row][: int(counts[row])].tolist()
    return named


def check_order(mask: BlockMask, width: int, length: int) -> None:
    """Ranks of all additions to a block are as many as lower tiles add to it."""
    tensors = [torch.zeros(BATCH, HEADS, length, width, dtype=torch.bfloat16) for _ in range(3)]
    seen = run_backward(
        lambda q, k, v: flexhop.flex_attention(q, k, v, block_mask=mask, kernel_options=ASKED),
        tensors,
    )
    tiles = seen.constants["TILES_PER_KV_BLOCK"]
    order = seen.order
    for b, h in ((b, h) for b in range(BATCH) for h in range(HEADS)):
        plane = order[b % order.size(0), h % order.size(1)]
        added: dict[int, int] = defaultdict(int)
        for tile in range(plane.size(0)):
            visited = visits_of(mask, b, h, tile // tiles)
            assert [int(plane[tile, block]) for block in visited] == [added[i] for i in visited]
            for block in visited:
                added[block] += 1


def scattered(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Some blocks of each head, some of them whole; the last queries see nothing."""
    block = (q // 128 * 7 + k // 128 * 3 + h + 2 * b) % 5
    return ((block == 0) | ((block == 1) & (k % 3 > 0))) & (q < 1000)


@pytest.mark.parametrize("length", [128, 1100])
@pytest.mark.parametrize("width", [64, 128, 256])
def test_of_a_causal_mask(width: int, length: int):
    check_order(
        flexhop.create_block_mask(causal, None, None, length, length, "cpu"), width, length
    )


@pytest.mark.parametrize("width", [64, 256])
def test_of_scattered_blocks_by_batch_and_head(width: int):
    mask = flexhop.create_block_mask(scattered, BATCH, HEADS, 1100, 1100, "cpu")
    check_order(mask, width, 1100)


def test_of_lists_that_name_a_block_twice():
    """Such a mask computes the block twice, and whoever comes after waits for both."""
    mask = flexhop.create_block_mask(causal, None, None, 640, 640, "cpu")
    assert mask.full_q_num_blocks is not None and mask.full_q_indices is not None
    mask.full_q_num_blocks[0, 0, 1] += 2
    count = int(mask.full_q_num_blocks[0, 0, 1])
    mask.full_q_indices[0, 0, 1, :count] = torch.tensor([3, 2, 4, 3, 2][:count])
    check_order(mask, 128, 640)


def test_blocks_before_the_full_ones_are_counted():
    """Lists that ascend are walked through in the order of their blocks."""

    def window(b: Any, h: Any, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return (q >= k) & (q - k < 400)

    length = 1536
    mask = flexhop.create_block_mask(window, None, None, length, length, "cpu")
    assert mask.q_indices is not None and mask.full_q_indices is not None
    tensors = [torch.zeros(BATCH, HEADS, length, 128, dtype=torch.bfloat16) for _ in range(3)]
    seen = run_backward(
        lambda q, k, v: flexhop.flex_attention(q, k, v, block_mask=mask, kernel_options=ASKED),
        tensors,
    )
    for tile in range(length // 128 - 4):
        assert visits_of(mask, 0, 0, tile) == [tile, tile + 3, tile + 4, tile + 1, tile + 2]
        assert int(seen.order[0, 0, tile, -1]) == 1


@pytest.mark.parametrize("width", [64, 256])
def test_of_packed_sequences(width: int):
    """Of ranges, which tile of keys is the first to add to a block of queries."""
    lengths = random.Random(0).choices(range(1, 500), k=12)
    offsets = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    tokens = sum(lengths)
    tensors = [torch.zeros(tokens, HEADS, width, dtype=torch.bfloat16) for _ in range(3)]
    seen = run_backward(
        lambda q, k, v: flexhop.varlen_attention(
            q, k, v, offsets, is_causal=True, kernel_options=ASKED
        ),
        tensors,
    )
    size, tiles = seen.constants["SPARSE_Q_BLOCK_SIZE"], seen.constants["TILES_PER_KV_BLOCK"]
    assert seen.order.shape[:3] == (1, 1, 1)
    for block in range(-(-tokens // size)):
        start = max(int(offset) for offset in offsets if offset <= block * size)
        first = start // (seen.constants["BLOCK_N"] * tiles)
        assert int(seen.order[0, 0, 0, block]) == first * tiles
