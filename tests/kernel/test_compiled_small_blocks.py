"""The Hopper forward kernel for small mask blocks compiles without spills and fits in memory."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch

import flexhop
from flexhop.compat.kernels.gluon_versions import triton_version
from flexhop.compat.offline.fake_gpu import GPUS
from flexhop.lowering.hopper import tiles
from flexhop.lowering.problem import MaskBlocks
from flexhop.offline import generate_code
from flexhop.offline.cubin import compile_kernel, local_accesses, product_notes
from tests.needs import needs_hopper
from tests.problems import problem

pytestmark = [
    pytest.mark.slow,
    needs_hopper,
]
TABLE = torch.zeros(8, 1024)


def multiply_by_head(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return s * TABLE[h, 0] + k


def see_most(b: Any, h: Any, q: Any, k: Any) -> Any:
    return (q * 5 + k) % 7 != 0


class Call(NamedTuple):
    """A call with 8 query heads: the size of a block, columns, heads per key head, length."""

    size: int
    width: int
    group: int = 1
    length: int = 1024
    has_mods: bool = False


class Found(NamedTuple):
    """What its kernel needs."""

    spills: int
    shared: int
    notes: list[str]
    steps: list[int]  # accesses to local memory in the shortest loops: of each way to mask


def build(call: Call) -> Found:
    """Compile the kernel of a call whose blocks are listed as partial and as full."""
    size, length = call.size, call.length
    operands = [
        torch.zeros(1, heads, length, call.width, dtype=torch.bfloat16)
        for heads in (8, 8 // call.group, 8 // call.group)
    ]
    rows = -(-length // size)
    counts = torch.full((1, 1, rows), 2, dtype=torch.int32)
    columns = torch.arange(rows, dtype=torch.int32).expand(1, 1, rows, rows).contiguous()
    mask = flexhop.BlockMask.from_kv_blocks(
        counts, columns, counts, columns.flip(-1), BLOCK_SIZE=size, seq_lengths=(length, length),
        mask_mod=see_most if call.has_mods else None,
    )  # fmt: skip
    options = flexhop.KernelOptions(backend="hopper")
    mod = multiply_by_head if call.has_mods else None
    generated = generate_code(
        lambda q, k, v: flexhop.flex_attention(
            q, k, v, mod, mask, enable_gqa=True, kernel_options=options
        ),
        *operands,
    )  # fmt: skip
    cubin = compile_kernel(generated.kernel_with("consume"), 90)
    steps = sorted((x for x in cubin.loops() if "MUFU.EX2" in x), key=len)
    local = [local_accesses(loop) for loop in steps[: 4 if call.has_mods else 2]]
    return Found(cubin.spills, cubin.shared, product_notes(cubin), local)


MOST_ACCESSES = 12 if triton_version() < (3, 7) else 4


@pytest.mark.parametrize(
    "call",
    [Call(16, 128), Call(32, 128, group=4, length=1000, has_mods=True)],
    ids=["plain", "with mods"],
)
def test_kernels_of_small_blocks_do_not_spill_and_fit(call):
    found = build(call)
    assert found.notes == []
    # With a mask, both mods, grouped heads and keys behind the end, a step reads or writes
    # local memory a few times: 3 with Triton 3.7, 5 to 12 with 3.6.
    assert max(found.steps) <= (MOST_ACCESSES if call.has_mods else 0)
    assert call.has_mods or found.spills == 0
    facts = problem(
        head_dim=call.width, value_head_dim=call.width, kv_heads=8 // call.group,
        blocks=MaskBlocks(call.size, call.size, True),
    )  # fmt: skip
    estimate = tiles.shared_memory(facts, tiles.table_tile(facts))
    assert found.shared <= estimate <= GPUS[(9, 0)].shared_memory
