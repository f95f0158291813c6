"""Kernels over a paged cache: the place of a page does not change a bit of the result."""

import pytest
import torch

import flexhop
from flexhop.masks import causal_with_offset
from flexhop.offline.interpret import Memory, interpret

pytestmark = pytest.mark.filterwarnings("ignore::flexhop.errors.EagerWarning")

LENGTHS = torch.tensor([70, 33])
PAGE = 16


def fill(paged: flexhop.PagedAttention, key: torch.Tensor, value: torch.Tensor):
    """A cache of NaN with the two sequences in it."""
    caches = [torch.full((1, 2, paged.n_pages * PAGE, 32), torch.nan) for _ in range(2)]
    for sequence, length in enumerate(LENGTHS.tolist()):
        steps = torch.arange(length)[None]
        parts = (t[sequence : sequence + 1, :, :length] for t in (key, value))
        paged.assign(torch.tensor([sequence]), steps, *parts, *caches)
    return [cache.nan_to_num(7.0) for cache in caches]


@pytest.mark.parametrize("queries", [1, 40])
def test_placement_never_changes_the_result(queries):
    torch.manual_seed(0)
    query = torch.randn(2, 4, queries, 32)
    key, value = (torch.randn(2, 2, 80, 32) for _ in range(2))
    offset = LENGTHS - queries
    logical = flexhop.create_block_mask(
        causal_with_offset(offset), 2, None, queries, 80, "cpu", BLOCK_SIZE=(128, PAGE)
    )
    results = []
    for order in ((0, 1), (1, 0)):
        paged = flexhop.PagedAttention(12, PAGE, 2, "cpu")
        for part in (1, 2):
            for sequence in order:
                paged.reserve(sequence, int(LENGTHS[sequence]) * part // 2)
        mask = paged.convert_logical_block_mask(logical, kv_len=LENGTHS)
        k_cache, v_cache = fill(paged, key, value)
        generated = interpret(
            lambda q, k, v, mask=mask: flexhop.flex_attention(
                q, k, v, block_mask=mask, enable_gqa=True,
                kernel_options=flexhop.KernelOptions(backend="triton"),
            ),
            query, k_cache, v_cache, memory=Memory(poison=True, check_bounds=True),
        )  # fmt: skip
        results.append(generated.result)
    assert torch.equal(*results)

    def visible(b, h, q_idx, kv_idx):
        return (q_idx + offset[b] >= kv_idx) & (kv_idx < LENGTHS[b])

    expected = flexhop.flex_attention(
        query, key, value, enable_gqa=True,
        block_mask=flexhop.create_block_mask(visible, 2, None, queries, 80, "cpu"),
    )  # fmt: skip
    torch.testing.assert_close(results[0], expected)
