"""Kernels that read a cache compile for GPUs that need not be here, without spills."""

from __future__ import annotations

import functools

import pytest
import torch

import flexhop
from flexhop.compat.offline.fake_gpu import GPUS
from flexhop.mods import dequantize
from flexhop.offline import Kernel, generate_code, generate_codes
from flexhop.offline.cubin import compile_kernel

BF16, INT8, E4M3 = torch.bfloat16, torch.int8, torch.float8_e4m3fn


ARCHITECTURES = (80, 90, 100)


@functools.cache
def cached_kernels(queries: int, page: int, stored: torch.dtype) -> dict[int, Kernel]:
    """The kernel of a call with four sequences of up to 8192 keys, for each architecture."""
    query = torch.zeros(4, 32, queries, 128, dtype=BF16)
    table, shape = None, (4, 8, 8192, 128)
    if page:
        pages = torch.zeros(4, 8192 // page, dtype=torch.int32)
        table = flexhop.PageTable(pages, page, torch.zeros(4, dtype=torch.int32))
        shape = (pages.numel(), 8, page, 128)
    key, value = (torch.zeros(shape, dtype=stored) for _ in range(2))
    scale = torch.ones(4, 8, 8192)
    mod = None if stored == BF16 else dequantize(scale)
    generated = generate_codes(
        lambda q, k, v: flexhop.flex_attention(
            q, k, v, enable_gqa=True, page_table=table, k_mod=mod, v_mod=mod
        ),
        query, key, value, capabilities=[divmod(a, 10) for a in ARCHITECTURES],
    )  # fmt: skip
    found = [one.kernel_with("add_values") for one in generated]
    return dict(zip(ARCHITECTURES, found, strict=True))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize(
    ("queries", "page", "stored"),
    [(1, 16, BF16), (1, 64, BF16), (1, 128, E4M3), (1, 0, INT8), (300, 16, BF16), (300, 0, E4M3)],
)
def test_kernels_fit(architecture, queries, page, stored):
    cubin = compile_kernel(cached_kernels(queries, page, stored)[architecture], architecture)
    assert cubin.spills == 0
    assert cubin.shared <= GPUS[architecture // 10, architecture % 10].shared_memory
    assert cubin.mma + cubin.wgmma + cubin.tcgen05 > 0


@pytest.mark.parametrize("stored", [INT8, E4M3, torch.float8_e5m2])
def test_no_byte_is_read_alone(stored):
    """Bytes would be, one instruction each, if values were not read in pairs of columns."""
    kernel = cached_kernels(1, 0, stored)[90]
    assert kernel.constants["AS_HALVES"] is True
    loops = compile_kernel(kernel, 90).loops()
    assert any("HMMA" in loop for loop in loops)
    assert not any("LDS.U8" in loop for loop in loops)


@pytest.mark.parametrize(("page", "is_one"), [(16, False), (64, True), (128, True), (256, True)])
def test_a_page_is_looked_up_once_for_a_tile_within_it(page, is_one):
    assert cached_kernels(1, page, BF16)[90].constants["ONE_PAGE"] is is_one


@pytest.mark.parametrize("keeps", ["keys", "keys before"])
def test_scores_have_one_layout_where_a_mask_reads_a_byte_per_key(keeps):
    """What is loaded in another layout would have all maxima and sums computed in both."""
    keep, length = torch.ones(4, 8192, dtype=torch.bool), torch.full((4,), 8192)

    def mask_mod(b, h, q_idx, kv_idx):
        before = q_idx + length[b] > kv_idx
        return keep[b, kv_idx] if keeps == "keys" else keep[b, kv_idx] & before

    mask = flexhop.create_block_mask(mask_mod, 4, None, 1, 8192, device="cpu")
    scale = torch.ones(4, 8, 8192)

    def call(query, key, value):
        mod = dequantize(scale)
        return flexhop.flex_attention(
            query, key, value, block_mask=mask, enable_gqa=True, k_mod=mod, v_mod=mod
        )

    query = torch.zeros(4, 32, 1, 128, dtype=BF16)
    key, value = (torch.zeros(4, 8, 8192, 128, dtype=E4M3) for _ in range(2))
    kernel = generate_code(call, query, key, value).kernel_with("add_values")
    assert kernel.constants["ISOLATE_MASK_MOD"] is True
    masked, free = (loop for loop in compile_kernel(kernel, 90).loops() if "HMMA" in loop)
    assert masked.count("SHFL") == free.count("SHFL")
