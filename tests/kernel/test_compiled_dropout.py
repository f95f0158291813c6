"""Kernels with dropout, and with exact sums, as machine code: they fit, and stay in threads."""

from __future__ import annotations

import functools
import re

import pytest
import torch
from torch.testing._internal.common_utils import DeterministicGuard

import flexhop
from flexhop.compat.kernels.gluon_versions import triton_version
from flexhop.compat.offline.fake_gpu import GPUS
from flexhop.offline import Kernel, generate_code, generate_codes
from flexhop.offline.cubin import compile_kernel, wrong_products

MARKS = ("attend_blocks", "attend_share", "grad_query_blocks", "grad_key_value_blocks")


ARCHITECTURES = (80, 90, 100)


def by_distance(table):
    return lambda s, b, h, q, k: s + table[h, q - k + 1024]


@functools.cache
def templates(
    width: int, dropout_p: float, queries: int = 1024, *, reads_table: bool = False
) -> dict[int, dict[str, Kernel]]:
    """The kernels of one dense call, by architecture and the function that tells which they are.

    With a table its gradient is deterministic.
    """
    sizes = ((1, 2, queries, width), *[(1, 2, 1024, width)] * 2)
    inputs = [torch.zeros(size, dtype=torch.bfloat16, requires_grad=True) for size in sizes]
    table = torch.zeros(2, 2048, requires_grad=True)
    with DeterministicGuard(reads_table):
        generated = generate_codes(
            lambda q, k, v, table, seed: flexhop.flex_attention(
                q, k, v, by_distance(table) if reads_table else None,
                dropout_p=dropout_p, dropout_seed=seed,
                kernel_options=flexhop.KernelOptions(backend="triton"),
            ),
            *inputs, table, torch.tensor([1, 2]), grad=queries > 1,
            capabilities=[divmod(a, 10) for a in ARCHITECTURES],
        )  # fmt: skip
    return {
        architecture: {
            mark: kernel for kernel in one.templates for mark in MARKS if mark in kernel.functions
        }
        for architecture, one in zip(ARCHITECTURES, generated, strict=True)
    }


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("width", [64, 128])
def test_kernels_fit(architecture, width):
    kernels = templates(width, 0.1)[architecture] | templates(width, 0.1, 1)[architecture]
    assert set(kernels) == set(MARKS)
    limit = GPUS[divmod(architecture, 10)].shared_memory
    for name, kernel in kernels.items():
        cubin = compile_kernel(kernel, architecture)
        assert cubin.shared <= limit, name
        assert not cubin.spills, name


@pytest.mark.slow
def test_short_sums_keep_all_their_terms():
    """A mask that reads flags, and dropout: tiles of 16 queries and 16 keys."""
    query = torch.zeros(1, 1, 64, 192, requires_grad=True)
    flags = torch.zeros(64, dtype=torch.bool)
    options = flexhop.KernelOptions(backend="triton", float32_precision="tf32")

    def attend(q, flags, seed):
        mask = flexhop.create_block_mask(
            lambda b, h, q, k: flags[(q - k).abs()], None, None, 64, 64, device=q.device
        )
        return flexhop.flex_attention(
            q, q, q, block_mask=mask, dropout_p=0.5, dropout_seed=seed, kernel_options=options
        )

    generated = generate_code(
        attend, query, flags, torch.tensor([1, 2]), grad=True, capability=(9, 0)
    )
    tiles = [(k.constants["BLOCK_M"], k.constants["BLOCK_N"]) for k in generated.templates]
    assert (16, 16) in tiles
    for kernel in generated.templates:
        assert not wrong_products(compile_kernel(kernel, 90)), kernel.name


@pytest.mark.slow
def test_no_factor_of_a_product_has_one_bit_numbers():
    """Triton 3.6 and 3.7 fail to load these; here 3.6 exchanged which weights are kept as such."""
    query, key = torch.zeros(1, 7, 17, 80), torch.zeros(1, 1, 2, 80)
    options = flexhop.KernelOptions(backend="triton", float32_precision="ieee")

    def attend(q, k, flags, factors, seed):
        mask = flexhop.create_block_mask(
            lambda b, h, q, k: flags[q], None, None, 17, 2, q.device, (48, 16)
        )
        return flexhop.flex_attention(
            q, k, k, lambda s, b, h, q, k: s * factors[q - k + 1], mask,
            enable_gqa=True, dropout_p=0.5, dropout_seed=seed, kernel_options=options,
        )  # fmt: skip

    generated = generate_code(
        attend, query.requires_grad_(), key.requires_grad_(), torch.ones(17, dtype=torch.bool),
        torch.ones(18), torch.tensor([1, 2]), grad=True, capability=(9, 0),
    )  # fmt: skip
    (kernel,) = (k for k in generated.templates if "grad_key_value_blocks" in k.functions)
    assert kernel.constants["ISOLATE_SCORE_MOD"]
    cubin = compile_kernel(kernel, 90)
    if triton_version() < (3, 9):
        assert not re.findall(r"(?:convert_layout|local_load) .*xi1.*", cubin.ir)
    assert not wrong_products(cubin)


@pytest.mark.slow
def test_drawing_exchanges_nothing_between_threads():
    """A thread draws for the weights that it holds: not one access to shared memory more."""
    plain, dropping = (templates(128, p)[90] for p in (0.0, 0.1))
    for name in ("grad_query_blocks",):
        tile = [plain[name].constants[side] for side in ("BLOCK_M", "BLOCK_N")]
        assert tile == [dropping[name].constants[side] for side in ("BLOCK_M", "BLOCK_N")]
        first, second = (compile_kernel(k[name], 90) for k in (plain, dropping))
        for access in (r"st\.shared|stmatrix", r"ld\.shared|ldmatrix", r"bar\.sync", r"shfl\."):
            counts = [len(re.findall(access, cubin.ptx)) for cubin in (first, second)]
            assert counts[0] == counts[1], access


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_exact_sums_fit(architecture):
    kernel = templates(128, 0.0, reads_table=True)[architecture]["grad_query_blocks"]
    assert "add_exactly" in kernel.functions
    cubin = compile_kernel(kernel, architecture)
    assert cubin.shared <= GPUS[divmod(architecture, 10)].shared_memory
    assert not cubin.spills
