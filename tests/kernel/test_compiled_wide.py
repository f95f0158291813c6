"""Kernels of heads in pieces compile for GPUs that need not be here: they fit and do not spill."""

import functools

import pytest
import torch

import flexhop
from flexhop.compat.kernels.gluon_versions import triton_version
from flexhop.lowering.portable import kernels
from flexhop.offline import Kernel, generate_code, generate_codes
from flexhop.offline.cubin import compile_kernel
from flexhop.options import Tile
from tests.problems import problem

HEADS, DIMS = 128, (576, 512)


def tile_of(kernel) -> Tile:
    sides = kernel.constants["BLOCK_M"], kernel.constants["BLOCK_N"]
    return Tile(*sides, kernel.num_warps, kernel.num_stages)


PRODUCTS = {80: "mma", 90: "wgmma", 100: "tcgen05"}


@functools.cache
def steps_of_latent_attention() -> dict[int, Kernel]:
    """128 heads share a key head, and values are read with keys."""
    query = torch.zeros(2, HEADS, 1, DIMS[0], dtype=torch.bfloat16)
    latent = torch.zeros(2, 1, 8192, DIMS[0], dtype=torch.bfloat16)
    generated = generate_codes(
        lambda q, kv: flexhop.flex_attention(
            q, kv, kv[..., : DIMS[1]], enable_gqa=True, kernel_options={"backend": "triton"}
        ),
        query, latent, capabilities=[divmod(a, 10) for a in PRODUCTS],
    )  # fmt: skip
    found = [one.kernel_with("attend_share") for one in generated]
    return dict(zip(PRODUCTS, found, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("architecture", PRODUCTS)
def test_a_step_of_latent_attention(architecture):
    kernel = steps_of_latent_attention()[architecture]
    assert kernel.constants["VALUE_IS_KEY"] and kernel.constants["SPLITS"] > 1
    cubin = compile_kernel(kernel, architecture)
    call = problem(
        architecture, DIMS[0], value_head_dim=DIMS[1], value_is_key=True, query_heads=HEADS,
        kv_heads=1, query_len=1, key_len=8192,
    )  # fmt: skip
    estimate = kernels.shared_memory("decode", call, tile_of(kernel))
    assert getattr(cubin, PRODUCTS[architecture]) > 0
    assert cubin.spills <= (2 if architecture == 90 and triton_version() >= (3, 9) else 0)
    assert cubin.shared <= estimate <= call.device.shared_memory


@pytest.mark.slow
def test_gradients():
    inputs = [
        torch.zeros(1, 2, 256, d, dtype=torch.bfloat16, requires_grad=True)
        for d in (DIMS[0], *DIMS)
    ]
    generated = generate_code(
        lambda q, k, v: flexhop.flex_attention(q, k, v), *inputs, grad=True, capability=(9, 0)
    )
    call = problem(90, DIMS[0], value_head_dim=DIMS[1])
    found = {}
    for kernel in generated.templates:
        if "zero_pieces" not in kernel.functions or "attend_share" in kernel.functions:
            continue
        name = "grad_query"
        if "grad_key_value_blocks" in kernel.functions:
            name = "grad_key" if kernel.constants["WRITES_KEY"] else "grad_value"
        cubin = compile_kernel(kernel, 90)
        found[name] = cubin.spills
        estimate = kernels.shared_memory(name, call, tile_of(kernel))
        assert cubin.shared <= estimate <= call.device.shared_memory, name
    assert found == {"grad_query": 0, "grad_key": 0, "grad_value": 0}
