"""Heads whose masks have lists of their own read the keys of their group once."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import flexhop
from flexhop.lowering.portable import splits
from flexhop.mods import dequantize
from flexhop.offline.interpret import Memory, interpret
from tests.budgets import assert_within_budget
from tests.caches import place

pytestmark = pytest.mark.filterwarnings("ignore::flexhop.errors.EagerWarning")

HEADS, KV_HEADS, KEYS = 6, 2, 300


@pytest.fixture(autouse=True)
def merge_lists_of_few_keys(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(splits, "_LEAST_MERGED", 0)


def odd(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """Knows nothing of the lists: they decide, where they say nothing or "full"."""
    return (q_idx + kv_idx + h) % 3 != 0


def lists(batch: int, heads: int, rows: int, columns: int, *, full: bool) -> list[Any]:
    """A third of the blocks partial, a third full; one of six heads lists none. Then junk."""
    kind = torch.rand(batch, heads, rows, columns) * 3
    kind[..., columns // 2] = 1.5  # full for all heads
    kind[:, 1] = 3 if heads == HEADS else 1.5
    found: list[Any] = []
    for chosen in (kind < 1, (kind >= 1) & (kind < 2)):
        indices = torch.argsort(chosen, dim=-1, descending=True, stable=True).to(torch.int32)
        count = chosen.sum(-1, dtype=torch.int32)
        junk = torch.arange(columns) >= count[..., None]
        found += [count, indices.masked_fill(junk, 2**30)]
    return found if full else [*found[:2], None, None]


def check(mask: flexhop.BlockMask, query: Any, *kv: Any, **keywords: Any) -> None:
    """The kernels' output and lse are those of the definition."""

    def call(query: Any, key: Any, value: Any) -> Any:
        return flexhop.flex_attention(
            query, key, value, block_mask=mask, enable_gqa=True,
            return_aux=flexhop.AuxRequest(lse=True), **keywords,
        )  # fmt: skip

    found = interpret(call, query, *kv, memory=Memory(poison=True, check_bounds=True))
    assert any("mark_blocks" in kernel.functions for kernel in found.templates)
    (out, aux), (plain, plain_aux) = found.result, call(query, *kv)
    exact, exact_aux = call(query.double(), *(t.double() if t.itemsize > 1 else t for t in kv))
    assert_within_budget(out, exact, plain, name="out")
    assert_within_budget(aux.lse, exact_aux.lse, plain_aux.lse, name="lse")


@pytest.mark.parametrize(
    ("queries", "q_block", "kv_block", "mask_mod", "full"),
    [
        (1, 128, 64, odd, True),
        (3, 2, 64, odd, True),
        (1, 16, 32, None, True),
        (2, 128, 64, None, False),
        (1, 128, 64, odd, False),
    ],
)
def test_lists_decide_for_each_head(queries, q_block, kv_block, mask_mod, full):
    torch.manual_seed(0)
    query = torch.randn(2, HEADS, queries, 16)
    key, value = (torch.randn(2, KV_HEADS, KEYS, 16) for _ in range(2))
    rows, columns = -(-queries // q_block), -(-KEYS // kv_block)
    mask = flexhop.BlockMask.from_kv_blocks(
        *lists(2, HEADS, rows, columns, full=full), BLOCK_SIZE=(q_block, kv_block),
        mask_mod=mask_mod, seq_lengths=(queries, KEYS),
    )  # fmt: skip
    check(mask, query, key, value)


def test_many_heads_and_more_blocks_than_a_program_looks_at_together():
    """The last of 16 heads has the sign bit; lists of one batch serve all."""
    torch.manual_seed(0)
    query, keys = torch.randn(2, 16, 1, 16), 16 * 260 + 5
    key, value = (torch.randn(2, 1, keys, 16) for _ in range(2))
    mask = flexhop.BlockMask.from_kv_blocks(
        *lists(1, 16, 1, 261, full=True), BLOCK_SIZE=(128, 16), mask_mod=odd,
        seq_lengths=(1, keys),
    )  # fmt: skip
    check(mask, query, key, value)


@pytest.mark.parametrize("page", [16, 128])
def test_in_pages_of_sequences_one_of_which_is_empty(page):
    torch.manual_seed(0)
    query, room = torch.randn(3, HEADS, 2, 32), 384
    key, value = (torch.randn(3, KV_HEADS, room, 32) for _ in range(2))
    paged = place(key, value, [250, 0, 37], page)
    mask = flexhop.BlockMask.from_kv_blocks(
        *lists(3, HEADS, 1, room // 32, full=True), BLOCK_SIZE=(128, 32), mask_mod=odd,
        seq_lengths=(2, room),
    )  # fmt: skip
    check(mask, query, paged.key_cache, paged.value_cache, page_table=paged.table)


def test_in_one_byte_with_chosen_blocks():
    """A mask as users write it: blocks of keys that are chosen for each key head."""
    torch.manual_seed(0)
    chosen = torch.rand(2, KV_HEADS, -(-KEYS // 16)) < 0.3
    mask = flexhop.create_block_mask(
        lambda b, h, q_idx, kv_idx: chosen[b, h // 3, kv_idx // 16], 2, HEADS, 1, KEYS, "cpu",
        BLOCK_SIZE=(1, 16),
    )  # fmt: skip
    assert mask.full_kv_num_blocks.sum() > 0
    query = torch.randn(2, HEADS, 1, 32, dtype=torch.bfloat16)
    key, value = (torch.randn(2, KV_HEADS, KEYS, 32).to(torch.float8_e4m3fn) for _ in range(2))
    scale = torch.rand(2, KV_HEADS, KEYS) + 0.5
    words = {"k_mod": dequantize(scale), "v_mod": dequantize(scale)}
    check(mask, query, key, value, **words)
