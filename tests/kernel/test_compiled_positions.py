"""Compiled portable kernels whose mods read captured tensors at a query or a key."""

from __future__ import annotations

import pytest
import torch

import flexhop
from flexhop.offline import generate_code
from flexhop.offline.cubin import Cubin, compile_kernel, local_accesses

LENGTH = 512
# Of rows: two numbers of each thread, a maximum and a sum, passed on twice or thrice; for operands
# of products, mma.sync exchanges some more.
MOST_EXCHANGES = 24
FEW_COPIES = 8  # of four bytes in a step: statistics of queries; a word per score is 32


@pytest.mark.parametrize("queries", [LENGTH, 8])
@pytest.mark.parametrize("architecture", [80, 90])
def test_scores_keep_the_layout_of_products(architecture: int, queries: int):
    # With the layout of what is read, a maximum takes five exchanges for each score.
    ids = torch.arange(LENGTH) // 100
    bias = torch.zeros(LENGTH, dtype=torch.bfloat16)

    def document(b, h, q_idx, kv_idx):
        return ids[q_idx] == ids[kv_idx]

    q = torch.empty(1, 8, queries, 64, dtype=torch.bfloat16)
    k = torch.empty(1, 1, LENGTH, 64, dtype=torch.bfloat16)
    mask = flexhop.create_block_mask(document, None, None, queries, LENGTH, device="cpu")
    code = generate_code(
        lambda q, k: flexhop.flex_attention(
            q, k, k, score_mod=lambda s, b, h, q_idx, kv_idx: s + bias[kv_idx], block_mask=mask,
            enable_gqa=True, kernel_options={"backend": "triton"},
        ),
        q, k,
    )  # fmt: skip
    _check_steps(compile_kernel(code.templates[0], architecture))


def test_masks_of_pairs_are_read_ahead():
    # In a branch, they were read in a layout that the scores took: 1,191 instructions, not 630.
    kept = torch.ones(LENGTH, LENGTH, dtype=torch.int64)
    mask = flexhop.create_block_mask(
        lambda b, h, q_idx, kv_idx: kept[q_idx, kv_idx] != 0, None, None, LENGTH, LENGTH, "cpu"
    )
    q = torch.empty(1, 2, LENGTH, 32, dtype=torch.bfloat16, requires_grad=True)
    attend = lambda q: flexhop.flex_attention(q, q, q, block_mask=mask)  # noqa: E731
    forward, grad_query, *_ = generate_code(attend, q, grad=True).templates
    for kernel in (forward, grad_query):
        cubin = compile_kernel(kernel, 90)
        _check_steps(cubin, 2)
        assert "LDG.E.128" not in "".join(cubin.loops())


@pytest.mark.parametrize("width", [32, 64, 128])
def test_what_neighbours_share_is_not_copied_for_each_score(width: int):
    # Each score copied a word of its own to shared memory: 1.6 ms instead of 0.7 at 64 columns,
    # and 3.3 instead of 1.1 backward.
    words = torch.zeros(LENGTH, LENGTH // 32, dtype=torch.int32)
    mask = flexhop.create_block_mask(
        lambda b, h, q_idx, kv_idx: ((words[q_idx, kv_idx // 32] >> (kv_idx % 32)) & 1) == 0,
        None, None, LENGTH, LENGTH, "cpu",
    )  # fmt: skip
    q = torch.empty(1, 2, LENGTH, width, dtype=torch.bfloat16, requires_grad=True)
    attend = lambda q: flexhop.flex_attention(  # noqa: E731
        q, q, q, block_mask=mask, kernel_options={"backend": "triton"}
    )
    kernels = generate_code(attend, q, grad=True).templates
    assert len(kernels) == 3
    for kernel in kernels:
        copies = "".join(compile_kernel(kernel, 90).loops()).count("LDGSTS.E [")
        assert copies <= FEW_COPIES


@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("architecture", [80, 90])
def test_masks_of_pairs_do_not_spill_beside_exact_products(architecture: int, width: int):
    # In a branch, steps on sm_80 had 4,533 and 3,941 accesses of local memory.
    kept = torch.ones(LENGTH, LENGTH, dtype=torch.int32)
    mask = flexhop.create_block_mask(
        lambda b, h, q_idx, kv_idx: kept[q_idx, kv_idx] != 0, None, None, LENGTH, LENGTH, "cpu"
    )
    q = torch.empty(1, 2, LENGTH, width)
    capability = divmod(architecture, 10)
    (forward,) = generate_code(
        lambda q: flexhop.flex_attention(q, q, q, block_mask=mask), q, capability=capability
    ).templates
    loops = compile_kernel(forward, architecture).loops()
    assert len(loops) == 2
    assert sum(map(local_accesses, loops)) < 200


@pytest.mark.parametrize("architecture", [80, 90])
def test_tables_by_distance_do_not_spill_beside_exact_products(architecture: int):
    # In a branch, steps of the three kernels had 5,781, 3,621 and 432 accesses of local memory.
    table = torch.zeros(2, 2 * LENGTH)

    def relative(score, b, h, q_idx, kv_idx):
        return score + table[h, q_idx - kv_idx + LENGTH]

    q = torch.empty(1, 2, LENGTH, 64, requires_grad=True)
    kernels = generate_code(
        lambda q: flexhop.flex_attention(q, q, q, relative), q, grad=True,
        capability=divmod(architecture, 10),
    ).templates  # fmt: skip
    for kernel in kernels:
        assert max(map(local_accesses, compile_kernel(kernel, architecture).loops())) < 250


def _check_steps(cubin: Cubin, count: int = 1) -> None:
    steps = [loop for loop in cubin.loops() if loop.count("MUFU.EX2") > 1 and "MMA" in loop]
    assert len(steps) >= count
    for step in steps:
        assert step.count("SHFL") <= MOST_EXCHANGES
        assert not local_accesses(step)
