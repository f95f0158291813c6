"""Blocks that intervals leave open in a graph: the kernel that asks the mask about them."""

import pytest
import torch

from flexhop import create_block_mask
from flexhop.block_mask.fields import TENSOR_FIELDS
from flexhop.masks import causal, prefix_lm
from flexhop.offline import generate, generate_code
from flexhop.offline.cubin import compile_kernel
from flexhop.offline.interpret import Memory, interpret

IDS = torch.sort(torch.randint(0, 9, (300,), generator=torch.Generator().manual_seed(0))).values


def documents(b, h, q_idx, kv_idx):
    return (IDS[q_idx] == IDS[kv_idx]) & (q_idx >= kv_idx)


def residues(b, h, q_idx, kv_idx):
    return (q_idx - kv_idx).abs() * (h + 1) % 7 > 2 + b


@pytest.mark.parametrize(
    ("mask", "block", "dynamic"),
    [
        (documents, (128, 64), False),
        (residues, (48, 20), True),
        (residues, (64, 128), False),
    ],
)
def test_lists_of_interpreted_kernels(mask, block, dynamic):
    def create(like):
        return create_block_mask(mask, 2, 3, like.shape[0], like.shape[1], "cpu", block)

    like = torch.empty(290, 300)
    memory = Memory(poison=True, check_bounds=True)
    found = interpret(create, like, memory=memory, dynamic=dynamic)
    assert len(found.templates) == 1
    expected = create(like)
    assert found.result.same_structure(expected)
    for name in () if dynamic else TENSOR_FIELDS:  # with dynamic lengths, lists have more room
        a, b = getattr(found.result, name), getattr(expected, name)
        assert (a is None and b is None) or torch.equal(a, b), name


@pytest.mark.parametrize("architecture", [80, 90, 100])
def test_it_compiles_without_spills(architecture):
    found = generate(lambda: create_block_mask(documents, 1, 1, 300, 300, "cpu"))
    cubin = compile_kernel(found.kernel_with("look_at_block"), architecture)
    assert cubin.spills == 0 and cubin.registers <= 128


def test_lists_of_long_sequences_compile():
    """With hundreds of blocks, Inductor splits the running sums of the lists among programs."""
    found = generate_code(lambda: create_block_mask(residues, None, None, 4096, 4090, "cpu", 16))
    split = found.kernel("triton_spl")
    assert compile_kernel(split, 90, {"R0_BLOCK": 256}).spills == 0


@pytest.mark.parametrize("mask", [causal, prefix_lm(700)], ids=["causal", "prefix"])
def test_lists_of_one_sided_masks_keep_their_constants(mask):
    """Inductor tries several shapes and keeps the fastest: 128 x 128 blocks were wrong in some."""
    found = generate_code(lambda: create_block_mask(mask, None, None, 16384, 16384, "cpu"))
    listing = [kernel for kernel in found.kernels if kernel.kind == "reduction"]
    assert listing
    for kernel in listing:
        for rows, columns, warps in ((2, 128, 2), (1, 256, 2)):
            constants = {"XBLOCK": rows, "R0_BLOCK": columns}
            compile_kernel(kernel, 90, constants, warps, num_stages=1)
