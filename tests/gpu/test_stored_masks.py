"""Masks that read tables, whose partial blocks reach the Hopper kernel as bits, on a GPU.

Of calls with enough heads and tiles, and only there; the others apply mask_mod.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import flexhop
from tests.budgets import assert_within_budget, dense_attention
from tests.cuda_graphs import capture

pytestmark = pytest.mark.gpu
BATCH, HEADS = 3, 16


def random_ids(*size: int, documents: int = 4, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    """Ids of documents in order, each of some tokens."""
    return torch.randint(0, documents, size, device="cuda", dtype=dtype).sort().values


def random_operands(length: int, width: int, batch: int = BATCH) -> list[torch.Tensor]:
    """Query, key and value."""
    size = (batch, HEADS, length, width)
    return [torch.randn(size, device="cuda", dtype=torch.bfloat16) for _ in range(3)]


def documents(ids: torch.Tensor) -> Any:
    return lambda b, h, q, k: (ids[q] == ids[k]) & (q >= k)


def documents_by_batch(ids: torch.Tensor) -> Any:
    return lambda b, h, q, k: (ids[b, q] == ids[b, k]) & (q >= k)


def documents_and_heads(ids: torch.Tensor) -> Any:
    return lambda b, h, q, k: (ids[q] == ids[k]) & (q + h >= k)


def attend(mask: Any, *operands: torch.Tensor) -> torch.Tensor:
    """Attention through compiled kernels."""
    call = torch.compile(lambda *t: flexhop.flex_attention(*t, block_mask=mask), fullgraph=True)
    with torch.no_grad():
        return call(*operands)


def check(out: torch.Tensor, mod: Any, operands: list[torch.Tensor], score: Any = None) -> None:
    """Hold a result against the dense formula under the mask of `mod`, a batch at a time."""
    batch, heads, length, width = operands[0].shape
    place = torch.arange(length, device="cuda")
    head = torch.arange(heads, device="cuda")[:, None, None]
    for b in range(batch):
        one = [tensor[b : b + 1] for tensor in operands]
        seen = mod(torch.tensor(b, device="cuda"), head, place[:, None], place[None, :])[None]
        gold, reference = (
            dense_attention(*(t.to(dtype) for t in one), score, seen, width**-0.5).out
            for dtype in (torch.float64, torch.bfloat16)
        )
        assert_within_budget(out[b : b + 1], gold, reference)


@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("length", [1024, 1000])
@pytest.mark.parametrize(
    ("make", "size", "dtype"),
    [
        (documents, (), torch.int32),
        (documents, (), torch.int64),
        (documents_by_batch, (BATCH,), torch.int32),
        (documents_and_heads, (), torch.int32),
    ],
    ids=["documents", "int64", "by_batch", "by_head"],
)
def test_tables(make, size, dtype, length, width):
    mod = make(random_ids(*size, length, dtype=dtype))
    mask = flexhop.create_block_mask(
        mod, BATCH if size else None, HEADS if make is documents_and_heads else None,
        length, length, "cuda",
    )  # fmt: skip
    operands = random_operands(length, width)
    check(attend(mask, *operands), mod, operands)


@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("is_causal", [False, True])
def test_tiles_where_long_documents_meet(is_causal, width):
    """Half of such a tile's queries see nothing of its first blocks, or of its last ones."""
    length = 25 * 128 - 30
    starts = torch.zeros(length, dtype=torch.int32, device="cuda")
    for block, place in ((5, 20), (11, 90), (14, 10), (14, 100), (20, 64)):
        starts[block * 128 + place] = 1
    ids = starts.cumsum(0, dtype=torch.int32)
    mod = documents(ids) if is_causal else lambda b, h, q, k: ids[q] == ids[k]
    mask = flexhop.create_block_mask(mod, None, None, length, length, "cuda")
    operands = random_operands(length, width, batch=2)
    check(attend(mask, *operands), mod, operands)


def partial_blocks(mod: Any, length: int) -> Any:
    """A mask whose lists hold every block under the diagonal as partial."""
    mask = flexhop.create_block_mask(
        lambda b, h, q, k: q >= k, None, None, length, length, "cuda", separate_full_blocks=False
    )
    mask.mask_mod = mod
    return mask


@pytest.mark.parametrize("width", [64, 128])
def test_lists_that_serve_batches_whose_masks_differ(width):
    mod, operands = documents_by_batch(random_ids(BATCH, 900)), random_operands(900, width)
    check(attend(partial_blocks(mod, 900), *operands), mod, operands)


@pytest.mark.parametrize("width", [64, 128])
def test_blocks_behind_those_whose_bits_are_stored(width):
    length = 36 * 128 - 50
    ids = torch.randint(0, 3, (length,), device="cuda", dtype=torch.int32)  # in no order
    operands = random_operands(length, width, batch=1)
    mod = documents(ids)
    check(attend(partial_blocks(mod, length), *operands), mod, operands)
    # Full blocks stand between those with bits and those without.
    mixed = lambda b, h, q, k: (q >= k) & ((k < 256) | (ids[q] == ids[k]))  # noqa: E731
    mask = flexhop.create_block_mask(mixed, None, None, length, length, "cuda")
    check(attend(mask, *operands), mixed, operands)


def test_a_score_mod_beside_it():
    ids, slopes = random_ids(1024), torch.rand(HEADS, device="cuda")
    mod, operands = documents(ids), random_operands(1024, 128, batch=2)
    mask = flexhop.create_block_mask(mod, None, None, 1024, 1024, "cuda")

    def alibi(score, b, h, q, k):
        return score + slopes[h] * (k - q)

    call = torch.compile(lambda *t: flexhop.flex_attention(*t, alibi, mask), fullgraph=True)
    with torch.no_grad():
        check(call(*operands), mod, operands, alibi)


def test_one_dynamic_graph_serves_changing_lengths():
    def call(query, key, value, mask):
        return flexhop.flex_attention(query, key, value, block_mask=mask)

    compiled = torch.compile(call, fullgraph=True, dynamic=True)
    for length in (1024, 777, 1300, 2048):
        mod, operands = documents(random_ids(length)), random_operands(length, 128)
        mask = flexhop.create_block_mask(mod, None, None, length, length, "cuda")
        with torch.no_grad():
            out = compiled(*operands, mask)
        check(out, mod, operands)


def test_a_replayed_graph_reads_new_ids():
    """The lists stay, the ids that decide what is seen in their blocks do not."""
    ids, operands = random_ids(1024), random_operands(1024, 128)
    mod = documents(ids)
    mask = partial_blocks(mod, 1024)
    call = torch.compile(lambda *t: flexhop.flex_attention(*t, block_mask=mask), fullgraph=True)
    with torch.no_grad():
        graph, out = capture(call, *operands)
    for documents_now in (2, 9):
        ids.copy_(random_ids(1024, documents=documents_now))
        graph.replay()
        check(out, mod, operands)


def test_a_replayed_graph_reads_a_mask_that_was_copied():
    """`copy_` writes the lists and the captured ids of another mask where the graph reads them."""
    operands = random_operands(1024, 128)
    sources = [
        flexhop.create_block_mask(
            documents(random_ids(1024, documents=n)), None, None, 1024, 1024, "cuda"
        )
        for n in (3, 2, 9)
    ]
    static = sources[0].clone()
    call = torch.compile(lambda *t: flexhop.flex_attention(*t, block_mask=static), fullgraph=True)
    with torch.no_grad():
        graph, out = capture(call, *operands)
    for source in sources[1:]:
        static.copy_(source)
        graph.replay()
        check(out, source.mask_mod, operands)


def test_a_hundred_passes_are_equal():
    mod, operands = documents(random_ids(1000)), random_operands(1000, 128)
    mask = flexhop.create_block_mask(mod, None, None, 1000, 1000, "cuda")
    call = torch.compile(lambda *t: flexhop.flex_attention(*t, block_mask=mask), fullgraph=True)
    with torch.no_grad():
        first = call(*operands).clone()
        assert all(call(*operands).equal(first) for _ in range(100))
