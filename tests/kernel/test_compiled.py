"""The generated kernels compile for GPUs that need not be here: no spills, within shared memory.

Inductor's code for a problem is compiled to machine code, and the numbers are read from it.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch._inductor.utils import fresh_cache

import flexhop
from flexhop.compat.graphs import ahead
from flexhop.compat.kernels.gluon_versions import triton_version
from flexhop.compat.offline.fake_gpu import GPUS
from flexhop.lowering.hopper import backward as hopper_grad
from flexhop.lowering.hopper import forward as hopper
from flexhop.lowering.hopper import tiles
from flexhop.lowering.portable import kernels
from flexhop.lowering.problem import MaskBlocks, Problem
from flexhop.masks import causal
from flexhop.offline import Kernel, generate_code, generate_codes
from flexhop.offline.cubin import Cubin, compile_kernel, local_accesses, product_notes
from flexhop.options import Tile
from tests.compiler_stages import shared_memory, steps_of
from tests.needs import needs_hopper
from tests.problems import launched_kernels, problem

# A device function or constant tells which of the templates a kernel came from.
MARKS = {
    "attend_blocks": "forward",
    "attend_share": "decode",
    "weigh_share": "decode_combine",
    "grad_query_blocks": "grad_query",
    "grad_key_value_blocks": "grad_key_value",
}


class Shared(NamedTuple):
    """Bytes of shared memory of one kernel: used, as estimated, and what the device has."""

    kernel: str
    used: int
    estimate: int
    limit: int


def role(kernel: Kernel) -> str:
    """forward, decode, decode_combine, grad_query, grad_key_value, grad_key or grad_value."""
    name = next(role for mark, role in MARKS.items() if mark in kernel.functions)
    if name != "grad_key_value":
        return name
    source = kernel.source
    if "WRITES_VALUE : tl.constexpr = False" in source:
        return "grad_key"
    return "grad_value" if "WRITES_KEY : tl.constexpr = False" in source else name


@functools.cache
def generate(dims: tuple[int, int], dtype: torch.dtype, length: int) -> dict[int, list[Kernel]]:
    """Generate the causal kernels of one problem, forward and backward, for each architecture."""
    width, value_width = dims
    architectures = [a for a, *rest in (*DEFAULT, *TIGHT) if rest == [dims, dtype, length]]
    inputs = [
        torch.zeros(1, 2, length, d, dtype=dtype, requires_grad=True)
        for d in (width, width, value_width)
    ]
    mask = flexhop.create_block_mask(causal, None, None, length, length, "cpu")
    options = flexhop.KernelOptions(backend="triton")
    found = generate_codes(
        lambda q, k, v: flexhop.flex_attention(q, k, v, block_mask=mask, kernel_options=options),
        *inputs, grad=True, capabilities=[divmod(a, 10) for a in architectures],
    )  # fmt: skip
    templates = {a: one.templates for a, one in zip(architectures, found, strict=True)}
    for architecture, kernels_of_it in templates.items():
        call = problem(architecture, width, value_head_dim=value_width, dtype=dtype)
        assert {role(kernel) for kernel in kernels_of_it} == set(launched_kernels(call))
    return templates


def build(
    architecture: int, dims: tuple[int, int], dtype: torch.dtype, length: int
) -> list[tuple[str, Cubin]]:
    """Compile them; by role."""
    kernels = generate(dims, dtype, length)[architecture]
    return [(role(kernel), compile_kernel(kernel, architecture)) for kernel in kernels]


def estimate_of(kernel: Kernel, call: Problem) -> int:
    """Bytes of shared memory of a portable kernel, as its tile was chosen."""
    sizes = kernel.constants["BLOCK_M"], kernel.constants["BLOCK_N"]
    tile = Tile(*sizes, kernel.num_warps, kernel.num_stages)
    return kernels.shared_memory(role(kernel), call, tile)  # type: ignore[arg-type]


def allocate(
    architecture: int, dims: tuple[int, int], dtype: torch.dtype, length: int
) -> list[Shared]:
    """Compile them as far as Triton allocates shared memory."""
    call = problem(architecture, dims[0], value_head_dim=dims[1], dtype=dtype)
    limit = GPUS[architecture // 10, architecture % 10].shared_memory
    return [
        Shared(role(kernel), shared_memory(kernel, architecture), estimate_of(kernel, call), limit)
        for kernel in generate(dims, dtype, length)[architecture]
    ]


class Hopper(NamedTuple):
    """The forward kernel of Hopper GPUs for one problem."""

    cubin: Cubin
    estimate: int
    notes: list[str]


@functools.cache
def build_hopper(dims: tuple[int, int], length: int, is_causal: bool) -> Hopper:
    """Generate and compile the Hopper kernel of one problem."""
    width, value_width = dims
    inputs = [torch.zeros(1, 2, length, d, dtype=torch.bfloat16) for d in (width, *dims)]
    mask = None
    if is_causal:
        mask = flexhop.create_block_mask(causal, None, None, length, length, "cpu")
    options = flexhop.KernelOptions(backend="hopper")
    generated = generate_code(
        lambda q, k, v: flexhop.flex_attention(q, k, v, block_mask=mask, kernel_options=options),
        *inputs,
    )  # fmt: skip
    cubin = compile_kernel(generated.kernel_with("consume"), 90)
    blocks = MaskBlocks(128, 128, has_full=True) if is_causal else None
    call = problem(90, width, value_head_dim=value_width, blocks=blocks)
    estimate = tiles.shared_memory(call, tiles.table_tile(call))
    return Hopper(cubin, estimate, product_notes(cubin))


class Packed(NamedTuple):
    """A Hopper kernel of packed sequences, whose blocks are ranges, and ptxas's notes."""

    cubin: Cubin
    notes: list[str]


def build_packed_hopper(tokens: int, width: int = 128, *, grad: bool = False) -> Packed:
    """The forward kernel, or the backward kernel."""
    inputs = [
        torch.zeros(tokens, 2, width, dtype=torch.bfloat16, requires_grad=grad) for _ in range(3)
    ]
    offsets = torch.tensor([0, 700, tokens], dtype=torch.int32)
    options = flexhop.KernelOptions(backend="hopper")
    generated = generate_code(
        lambda q, k, v, cut: flexhop.varlen_attention(
            q, k, v, cut, is_causal=True, kernel_options=options
        ),
        *inputs, offsets, grad=grad,
    )  # fmt: skip
    kernel = generated.kernel_with("differentiate" if grad else "consume")
    assert kernel.constants["HAS_RANGES"]
    cubin = compile_kernel(kernel, 90)
    return Packed(cubin, product_notes(cubin))


def build_document_hopper(width: int, length: int) -> tuple[Cubin, Cubin, list[str]]:
    """What stores the bits of a document mask, the Hopper kernel, and ptxas's notes on it."""
    inputs = [torch.zeros(16, 16, length, width, dtype=torch.bfloat16) for _ in range(3)]
    ids = (torch.arange(length) >= length // 3).int()
    mask = flexhop.create_block_mask(
        lambda b, h, q, k: (ids[q] == ids[k]) & (q >= k), None, None, length, length, "cpu"
    )
    options = flexhop.KernelOptions(backend="hopper")
    generated = generate_code(
        lambda q, k, v: flexhop.flex_attention(q, k, v, block_mask=mask, kernel_options=options),
        *inputs,
    )  # fmt: skip
    stores, cubin = (
        compile_kernel(generated.kernel_with(function), 90)
        for function in ("join_bits", "consume")
    )
    return stores, cubin, product_notes(cubin)


PRODUCTS = {80: "mma", 90: "wgmma", 100: "tcgen05"}
DEFAULT = [
    (architecture, (width, width), torch.bfloat16, 1024)
    for width in (64, 128, 256)
    for architecture in PRODUCTS
]


@pytest.mark.slow
@pytest.mark.parametrize(("architecture", "dims", "dtype", "length"), DEFAULT)
def test_default_configurations(architecture, dims, dtype, length):
    """They do not spill, and use the matrix products of their architecture."""
    for name, cubin in build(architecture, dims, dtype, length):
        assert cubin.spills == 0, f"{name}: {cubin.registers} registers"
        assert getattr(cubin, PRODUCTS[architecture]) > 0, name


# The widest heads where memory is smallest, where an operand stays in shared memory (90, 100), and
# unequal widths. tests/unit/lowering/test_tiles.py holds the estimate against every combination.
TIGHT = [
    # fp32 with 512 columns has no tile in 99 KB: such calls are computed in chunks.
    *((architecture, (512, 512), torch.float32, 128) for architecture in (80, 90, 100)),
    *((architecture, (256, 256), torch.float32, 128) for architecture in (86, 120)),
    *((architecture, (512, 512), torch.bfloat16, 256) for architecture in (80, 86, 90, 100, 120)),
    *((architecture, (256, 256), torch.bfloat16, 256) for architecture in (86, 120)),
    *((architecture, (256, 256), torch.float32, 256) for architecture in (89, 90, 100)),
    *((architecture, (128, 128), torch.float32, 256) for architecture in (86, 90)),
    *((architecture, (192, 128), torch.bfloat16, 256) for architecture in (86, 90, 100)),
    (120, (80, 80), torch.float32, 256),
    (89, (16, 512), torch.bfloat16, 256),
    (100, (512, 64), torch.bfloat16, 256),
]


@pytest.mark.slow
@pytest.mark.parametrize(("architecture", "dims", "dtype", "length"), TIGHT)
def test_kernels_need_no_more_shared_memory_than_estimated_and_fit(
    architecture, dims, dtype, length
):
    for kernel, used, estimate, limit in allocate(architecture, dims, dtype, length):
        assert used <= estimate <= limit, kernel


@functools.cache
def generate_decode(
    dims: tuple[int, int], dtype: torch.dtype, queries: int
) -> dict[int, list[Kernel]]:
    """Generate the kernels of short queries of 4 heads each, with both mods."""
    width, value_width = dims
    inputs = [
        torch.zeros(1, heads, length, d, dtype=dtype)
        for heads, length, d in ((8, queries, width), (2, 4096, width), (2, 4096, value_width))
    ]
    ids = torch.zeros(4096, dtype=torch.int32)
    mask = flexhop.create_block_mask(
        lambda b, h, q, k: (ids[q] == ids[k]) & (k > q), None, None, queries, 4096, "cpu"
    )
    found = generate_codes(
        lambda q, k, v: flexhop.flex_attention(
            q, k, v, lambda s, b, h, q, k: s + h * (k - q), mask, enable_gqa=True
        ),
        *inputs, capabilities=[divmod(a, 10) for a in PRODUCTS],
    )  # fmt: skip
    return {a: one.templates for a, one in zip(PRODUCTS, found, strict=True)}


DECODED = [
    *(((width, width), torch.bfloat16, queries) for width in (64, 128, 256) for queries in (1, 8)),
    ((128, 128), torch.bfloat16, 32),
    ((512, 512), torch.bfloat16, 1),
    ((192, 80), torch.float16, 1),
    ((64, 64), torch.float32, 16),
]


@pytest.mark.slow
@pytest.mark.parametrize(("dims", "dtype", "queries"), DECODED)
@pytest.mark.parametrize("architecture", PRODUCTS)
def test_decode_does_not_spill_and_fits(architecture, dims, dtype, queries):
    call = problem(
        architecture, dims[0], value_head_dim=dims[1], dtype=dtype, query_len=queries,
        key_len=4096, kv_heads=2,
    )  # fmt: skip
    limit = GPUS[architecture // 10, architecture % 10].shared_memory
    found = {role(one): one for one in generate_decode(dims, dtype, queries)[architecture]}
    assert set(found) == {"decode", "decode_combine"}
    for name, kernel in found.items():
        cubin = compile_kernel(kernel, architecture)
        assert cubin.spills == 0, f"{name}: {cubin.registers} registers"
        if name == "decode":
            assert cubin.shared <= estimate_of(kernel, call) <= limit


@pytest.mark.slow
def test_slices_of_a_cache_with_symbolic_strides_are_read_in_16_bytes():
    query = torch.zeros(2, 8, 1, 128, dtype=torch.bfloat16)
    cache = torch.zeros(2, 2, 512, 128, dtype=torch.bfloat16)[:, :, :500]
    generated = generate_code(
        lambda q, k, v: flexhop.flex_attention(q, k, v, enable_gqa=True),
        query, cache, cache.clone(), dynamic=True,
    )  # fmt: skip
    ptx = compile_kernel(generated.kernel_with("attend_share"), 90).ptx
    assert ptx.count("cp.async.cg.shared.global") > 0
    assert len(re.findall(r"ld\.global\.b16", ptx)) == 0


# Head sizes, length (one that tiles overhang), and whether there is a mask.
HOPPER = [
    ((64, 64), 1024, False),
    ((64, 64), 1024, True),
    ((128, 128), 1024, False),
    ((128, 128), 1000, True),
    ((192, 128), 1024, True),
    ((192, 192), 1000, True),
    ((256, 256), 1024, True),
]


@pytest.mark.slow
@needs_hopper
@pytest.mark.parametrize(("dims", "length", "is_causal"), HOPPER)
def test_the_hopper_kernel_is_pipelined(dims, length, is_causal):
    """What ptxas does in silence: products that wait for each other, and spills in the loops."""
    cubin, estimate, notes = build_hopper(dims, length, is_causal)
    assert cubin.wgmma > 0
    assert cubin.shared <= estimate <= GPUS[(9, 0)].shared_memory
    steps = sorted((loop for loop in cubin.loops() if "MUFU.EX2" in loop), key=len)
    # The shortest loops of two consumers: with a mask, and without.
    in_steps = [local_accesses(loop) for loop in steps[: 4 if is_causal else 2]]
    assert (max(in_steps), notes) == (0, [])
    # If results are stored from registers, a few numbers of a program, or of a tile that
    # overhangs, wait in local memory.
    most = {(256, 256): 6, (192, 192): 8 if triton_version() < (3, 7) else 0}
    assert cubin.spills <= most.get(dims, 0)


@pytest.mark.slow
@needs_hopper
@pytest.mark.parametrize(("dims", "length", "is_causal"), HOPPER[4:])
def test_results_that_find_no_room_are_stored_in_16_bytes(dims, length, is_causal):
    """With a store for the two columns that a thread has, half of each sector is empty."""
    ptx = build_hopper(dims, length, is_causal).cubin.ptx
    stores = re.findall(r"st\.global\S*", ptx)
    # Two consumers with 64 rows each; the others are lse and tiles without keys.
    assert stores.count("st.global.v4.b32") >= 2 * 64 * dims[1] // 128 // 8
    assert stores.count("st.global.b32") + stores.count("st.global.v2.b32") <= 4


@pytest.mark.slow
@needs_hopper
def test_empty_columns_take_no_products():
    """Scores of 128 keys take 9 products instead of 12, out takes 8."""
    some, full = (build_hopper((width, 128), 1024, True).cubin for width in (144, 192))
    assert some.wgmma * (12 + 8) == full.wgmma * (9 + 8)


@pytest.mark.slow
@needs_hopper
@pytest.mark.parametrize("tokens", [2048, 2000])
def test_the_hopper_kernel_of_packed_sequences_is_pipelined(tokens):
    cubin, notes = build_packed_hopper(tokens)
    assert cubin.wgmma > 0
    assert (cubin.spills, notes) == (0, [])
    for full, masked in steps_of(cubin, products=16):
        assert "R2P" in masked, "bits reach predicates seven at a time"
        assert "R2P" not in full, "full blocks have no bits"
        assert "LDG" not in masked, "what a query sees is read once"
        assert len(full.splitlines()) < 490 and len(masked.splitlines()) < 640


@pytest.mark.slow
@needs_hopper
@pytest.mark.parametrize(("width", "length"), [(64, 512), (128, 512), (128, 500)])
def test_the_hopper_kernel_of_stored_masks_is_pipelined(width, length):
    stores, cubin, notes = build_document_hopper(width, length)
    assert stores.registers <= 64  # many programs run side by side
    assert notes == []
    for full, masked in steps_of(cubin, products=8 + width // 16):
        assert "R2P" not in full, "full blocks have no bits"
        assert "R2P" in masked, "bits reach predicates seven at a time"
        lines, local = len(masked.splitlines()), local_accesses(masked)
        # Keys behind the end are masked as well where tiles overhang.
        assert (lines < 680 and local == 0) if length % 128 == 0 else (lines < 820 and local <= 4)


@pytest.mark.slow
@needs_hopper
def test_the_hopper_loop_waits_for_products_after_the_exponentials():
    """A wait for both products above the softmax would undo the overlap."""
    cubin = build_hopper((128, 128), 1024, False).cubin
    for loop, longest in steps_of(cubin, products=16):  # two products of eight instructions
        assert loop == longest, "the first step alone takes another way"
        assert loop.count("MUFU.EX2") == 66  # of scores, and of two rows
        waits = [n for n, line in enumerate(loop.splitlines()) if "WARPGROUP.DEPBAR" in line]
        last = max(n for n, line in enumerate(loop.splitlines()) if "MUFU.EX2" in line)
        assert len(waits) == 2, "one for the scores, one for the product with the values"
        assert waits[-1] > last


SCORE_MODS: dict[str, Callable[..., torch.Tensor]] = {
    "products of tables": lambda s, b, h, q, k: s + SCORES_ROW[q] * SCORES_ROW[k],
    "remainder": lambda s, b, h, q, k: torch.where((q - k) % 7 == 0, s, s * 0.5),
    "whole quotients": lambda s, b, h, q, k: s + (q // 3 - k // 5).float(),
    "quotient": lambda s, b, h, q, k: s / (1 + (q - k).abs()),
}
SCORES_ROW = torch.zeros(1024)


def build_scored_hopper(name: str, monkeypatch: pytest.MonkeyPatch) -> Cubin:
    """The forward kernel with a score_mod, causal: the one that a GPU would be given."""
    fast = _build_scored_hopper(name)
    if fast.spills <= hopper.FEW_BYTES:
        return fast
    monkeypatch.setattr(ahead, "local_memory", lambda choice: fast.spills)
    with fresh_cache():
        return _build_scored_hopper(name)


def _build_scored_hopper(name: str) -> Cubin:
    inputs = [torch.zeros(1, 2, 1024, 128, dtype=torch.bfloat16) for _ in range(3)]
    mask = flexhop.create_block_mask(causal, None, None, 1024, 1024, "cpu")
    generated = generate_code(
        lambda q, k, v: flexhop.flex_attention(
            q, k, v, SCORE_MODS[name], block_mask=mask,
            kernel_options=flexhop.KernelOptions(backend="hopper"),
        ),
        *inputs,
    )  # fmt: skip
    return compile_kernel(generated.kernel_with("consume"), 90)


@pytest.mark.slow
@needs_hopper
@pytest.mark.parametrize("name", SCORE_MODS)
def test_the_hopper_loops_of_a_score_mod_do_not_spill(name, monkeypatch):
    """With queries in registers these had 32 to 56 accesses to local memory in every step.

    A masked step of 1,176 instructions has 6 of them with Triton 3.6 and whole quotients.
    """
    cubin = build_scored_hopper(name, monkeypatch)
    for full, masked in steps_of(cubin, products=16):
        assert local_accesses(full) == 0
        assert local_accesses(masked) <= 6


class HopperBackward(NamedTuple):
    """The backward kernel of Hopper GPUs for one problem."""

    cubin: Cubin
    estimate: int
    notes: list[str]
    in_loops: int  # spills between products of one step


def build_hopper_backward(
    width: int, length: int, is_causal: bool, is_deterministic: bool
) -> HopperBackward:
    """Generate and compile the Hopper backward kernel of one problem."""
    value_width = 128 if width == 192 else width
    inputs = [
        torch.zeros(1, heads, length, columns, dtype=torch.bfloat16, requires_grad=True)
        for heads, columns in ((4, width), (2, width), (2, value_width))
    ]
    mask = None
    if is_causal:
        mask = flexhop.create_block_mask(causal, None, None, length, length, "cpu")
    options = flexhop.KernelOptions(backend="hopper", deterministic=is_deterministic)
    generated = generate_code(
        lambda q, k, v: flexhop.flex_attention(
            q, k, v, block_mask=mask, enable_gqa=True, kernel_options=options
        ),
        *inputs, grad=True,
    )  # fmt: skip
    cubin = compile_kernel(generated.kernel_with("differentiate"), 90)
    call = problem(90, width, value_head_dim=value_width)
    estimate = hopper_grad.shared_memory(call, hopper_grad.table_tile(call))
    steps = [loop for loop in cubin.loops() if loop.count("HGMMA") == GRAD_PRODUCTS[width]]
    assert len(steps) >= (4 if is_causal else 2)
    local = max(local_accesses(loop) for loop in sorted(steps, key=len)[:2])
    return HopperBackward(cubin, estimate, product_notes(cubin), local)


# Instructions of the five products of a step, by width, and what was seen of loads from and stores
# to local memory in it: at 64 columns a tile of 128 queries takes every register.
GRAD_PRODUCTS = {64: 32, 128: 32, 192: 68, 256: 48}
# The last of a key: whether gradients are deterministic.
GRADIENTS = {
    (64, 1024, False, False): 0,
    (64, 1024, True, False): 18,
    (64, 1024, True, True): 31,
    (128, 1024, False, True): 0,
    (128, 1000, True, False): 0,
    (128, 1000, True, True): 0,
    (192, 1000, True, False): 8,  # with values of 128 columns
    (256, 1024, True, False): 0,
    (256, 1024, True, True): 0,
}


@pytest.mark.slow
@needs_hopper
@pytest.mark.parametrize(("call", "most"), GRADIENTS.items(), ids=str)
def test_the_hopper_backward_kernel_is_pipelined(call, most):
    """Spills between steps do not matter: a step takes microseconds, and tiles have many."""
    found = build_hopper_backward(*call)
    assert found.cubin.shared <= found.estimate <= GPUS[(9, 0)].shared_memory
    assert "UTMAREDG" in found.cubin.sass()
    assert found.notes == []
    assert found.in_loops <= most


# Widths and numbers of tokens, also one that is no multiple of the tiles.
@pytest.mark.slow
@needs_hopper
@pytest.mark.parametrize(
    ("width", "tokens"), [(64, 2048), (64, 2000), (128, 2048), (128, 2000), (256, 2048)]
)
def test_the_hopper_backward_kernel_of_packed_sequences_is_pipelined(width, tokens):
    cubin, notes = build_packed_hopper(tokens, width, grad=True)
    assert notes == []
    # A mask that reads tables has tiles of 64 queries: fewer products at 64 columns.
    products = 24 if width == 64 else GRAD_PRODUCTS[width]
    steps = [loop for loop in cubin.loops() if loop.count("HGMMA") == products]
    steps = [step for step in steps if "UTMASTG" not in step]  # or it is the loop over tiles
    assert len(steps) == 4, "with and without the mask, for each consumer"
    assert max(local_accesses(step) for step in steps) == 0
    assert not any("LDG" in step for step in steps), "what a key is seen by is read once"
