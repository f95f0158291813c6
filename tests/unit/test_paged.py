"""Paged KV caches: allocation, contents, translation, and attention equal to the unpaged."""

import pytest
import torch
from torch.nn.attention.experimental._paged_attention import PagedAttention as Theirs
from torch.nn.attention.flex_attention import create_block_mask as their_mask

import flexhop
from flexhop import PagedAttention, errors
from flexhop.masks import causal

pytestmark = pytest.mark.filterwarnings("ignore::flexhop.errors.EagerWarning")


def number(value: int) -> torch.Tensor:
    return torch.tensor([value])


def interleaved(pages: int, page_size: int, lengths: list[int]) -> PagedAttention:
    """Sequences that grow in turns, so that their pages mix."""
    paged = PagedAttention(pages, page_size, len(lengths) + 1, "cpu")
    for quarter in (1, 2, 4):
        for sequence, length in enumerate(lengths):
            paged.reserve(number(sequence), number(length * quarter // 4))
    return paged


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8])
def test_caches_of_one_byte_are_written(dtype):
    paged = PagedAttention(n_pages=3, page_size=4, max_batch_size=1, device="cpu")
    paged.reserve(0, 9)
    values = torch.randn(1, 2, 9, 8) * 20
    caches = [torch.zeros(1, 2, 12, 8).to(dtype) for _ in range(2)]
    paged.assign(number(0), torch.arange(9)[None], values, -values, *caches)
    place = (paged.page_table[0, :, None] * 4 + torch.arange(4)).flatten()[:9]
    for cache, written in zip(caches, (values, -values), strict=True):
        assert torch.equal(cache.float()[:, :, place], written.to(dtype).float())


def test_pages_are_given_and_taken_back():
    paged = PagedAttention(n_pages=12, page_size=4, max_batch_size=3, device="cpu")
    for sequence, length in enumerate((8, 24, 13)):
        paged.reserve(number(sequence), number(length))
    assert paged.capacity.tolist() == [8, 24, 16] and not paged.empty_pages
    before = paged.page_table.clone()
    with pytest.raises(errors.PagesExhaustedError, match=r"requested 2 pages .* only 0 empty"):
        paged.reserve(0, 16)
    assert torch.equal(paged.page_table, before)
    paged.erase(number(1))
    assert len(paged.empty_pages) == 6 and (paged.page_table[1] == -1).all()
    paged.reserve(0, 16)
    assert paged.capacity.tolist() == [16, 0, 16]
    owned = paged.page_table[paged.page_table >= 0].tolist()
    assert sorted(owned + paged.empty_pages) == list(range(12))


def test_tables_are_those_of_pytorch():
    ours, theirs = PagedAttention(8, 4, 3, "cpu"), Theirs(8, 4, 3, device="cpu")
    for sequence, length in ((0, 5), (1, 9), (0, 11), (2, 1)):
        for paged in (ours, theirs):
            paged.reserve(number(sequence), number(length))
    for name in ("page_table", "physical_to_logical", "capacity"):
        assert torch.equal(getattr(ours, name), getattr(theirs, name)), name
    assert ours.empty_pages == theirs.empty_pages


def test_a_converted_mask_is_that_of_pytorch():
    ours, theirs = PagedAttention(8, 128, 2, "cpu"), Theirs(8, 128, 2, device="cpu")
    lengths = torch.tensor([512, 512])
    for length in (100, 300, 512):
        for sequence in (0, 1):
            for paged in (ours, theirs):
                paged.reserve(number(sequence), number(length))
    mine = ours.convert_logical_block_mask(
        flexhop.create_block_mask(causal, 2, None, 512, 512, "cpu"), kv_len=lengths
    )
    other = theirs.convert_logical_block_mask(
        their_mask(causal, 2, 1, 512, 512, "cpu"), kv_len=lengths
    )
    for name in ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices"):
        ordered = getattr(mine, name), getattr(other, name)
        if name.endswith("indices"):
            counts = getattr(mine, name.replace("indices", "num_blocks"))
            live = torch.arange(8) < counts[..., None]
            ordered = tuple(torch.where(live, t, 0) for t in ordered)
        assert torch.equal(*ordered), name


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_contents_are_where_the_table_says(page_size):
    lengths = [7, 20, 13]
    paged = interleaved(64 // page_size + 3, page_size, lengths)
    tokens = paged.n_pages * page_size
    caches = [torch.zeros(1, 2, tokens, width) for width in (3, 5)]
    values = [torch.randn(3, 2, 20, width) for width in (3, 5)]
    for sequence, length in enumerate(lengths):
        steps = torch.randperm(length)[None]
        paged.assign(
            number(sequence), steps, *(v[sequence][None][:, :, steps[0]] for v in values), *caches
        )
    for sequence, length in enumerate(lengths):
        position = torch.arange(length)
        page = paged.page_table[sequence, position // page_size]
        place = page * page_size + position % page_size
        for cache, value in zip(caches, values, strict=True):
            assert torch.equal(cache[0][:, place], value[sequence][:, :length])


def bias(score, b, h, q_idx, kv_idx):
    return score + 0.1 * (h + 1) * (kv_idx - q_idx)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_attention_equals_the_unpaged(compiled):
    """Sequences of different lengths, pages mixed; where pages lie changes nothing."""
    lengths, page = [40, 64, 17], 16
    torch.manual_seed(0)
    query = torch.randn(3, 4, 64, 8, dtype=torch.float64)
    key, value = (torch.randn(3, 2, 64, 8, dtype=torch.float64) for _ in range(2))
    kv_len = torch.tensor(lengths)
    logical = flexhop.create_block_mask(causal, 3, None, 64, 64, "cpu", BLOCK_SIZE=page)

    def shorter(b, h, q_idx, kv_idx):
        return (q_idx >= kv_idx) & (kv_idx < kv_len[b])

    call = torch.compile(flexhop.flex_attention) if compiled else flexhop.flex_attention
    expected = flexhop.flex_attention(
        query, key, value, bias,
        flexhop.create_block_mask(shorter, 3, None, 64, 64, "cpu", BLOCK_SIZE=page),
        enable_gqa=True,
    )  # fmt: skip
    paged = interleaved(20, page, lengths)
    caches = [torch.full((1, 2, 320, 8), torch.nan, dtype=torch.float64) for _ in range(2)]
    for sequence, length in enumerate(lengths):
        steps = torch.arange(length)[None]
        parts = (t[sequence : sequence + 1, :, :length] for t in (key, value))
        paged.assign(number(sequence), steps, *parts, *caches)
    caches = [cache.nan_to_num(1e3) for cache in caches]
    out = call(
        query, *caches, paged.get_score_mod(bias, kv_len),
        paged.convert_logical_block_mask(logical, kv_len=kv_len), enable_gqa=True,
    )  # fmt: skip
    torch.testing.assert_close(out, expected)


def test_batches_may_be_any_sequences():
    paged = interleaved(20, 4, [8, 16, 12])
    logical = flexhop.create_block_mask(causal, 2, None, 16, 16, "cpu", BLOCK_SIZE=4)
    chosen, kv_len = torch.tensor([2, 0]), torch.tensor([12, 8])
    mask = paged.convert_logical_block_mask(logical, chosen, kv_len)
    dense = mask.to_dense()
    assert torch.equal(dense[0, 0].sum(0).nonzero()[:, 0], paged.page_table[2, :3].sort().values)
    assert torch.equal(dense[1, 0].sum(0).nonzero()[:, 0], paged.page_table[0, :2].sort().values)
    page = paged.page_table[2, 1]
    see = mask.mask_mod(torch.tensor(0), torch.tensor(0), torch.tensor(5), page * 4 + 1)
    hidden = mask.mask_mod(torch.tensor(1), torch.tensor(0), torch.tensor(5), page * 4 + 1)
    assert see and not hidden


def test_a_full_block_beyond_the_length_is_masked():
    paged = interleaved(8, 16, [32])
    logical = flexhop.create_block_mask(lambda b, h, q, k: k >= 0, 1, None, 16, 32, "cpu", 16)
    assert logical.full_kv_num_blocks.item() == 2
    mask = paged.convert_logical_block_mask(logical, kv_len=torch.tensor([20]))
    assert mask.full_kv_num_blocks.item() == 1 and mask.kv_num_blocks.item() == 1


def test_refusals_change_nothing():
    paged = PagedAttention(4, 4, 2, "cpu")
    paged.reserve(0, 4)
    caches = [torch.zeros(1, 2, 16, 8) for _ in range(2)]
    value = torch.ones(1, 2, 2, 8)
    steps = torch.tensor([[3, 4]])
    with pytest.raises(
        errors.UnmappedPositionError, match=r"Position 4 of sequence 0 .* 4 tokens"
    ):
        paged.assign(number(0), steps, value, value, *caches)
    assert not any(cache.any() for cache in caches)
    with pytest.raises(errors.CacheShapeError, match=r"k_val has shape \[1, 2, 2, 8\]"):
        paged.assign(number(0), torch.tensor([[1]]), value, value, *caches)
    with pytest.raises(errors.CacheShapeError, match="k_val requires a gradient"):
        paged.assign(number(0), steps, value.requires_grad_(), value, *caches)
    with pytest.raises(errors.CacheShapeError, match="k_cache has shape"):
        paged.assign(number(0), steps, *[value.detach()] * 2, *(c[:, :, :8] for c in caches))
    with pytest.raises(errors.OptionValueError, match="batch_idx value 2: it must be from 0 to 1"):
        paged.reserve(2, 4)
    with pytest.raises(errors.OptionValueError, match="page_size"):
        PagedAttention(4, 0, 2, "cpu")
    wrong = flexhop.create_block_mask(causal, 1, None, 16, 16, "cpu", BLOCK_SIZE=8)
    with pytest.raises(errors.BlockSizeError, match="as long as a page, 4 tokens"):
        paged.convert_logical_block_mask(wrong)
