"""Blocks that intervals leave open in a graph: the kernel that asks the mask about them."""

import subprocess

import pytest
import torch

from flexhop import create_block_mask
from flexhop.block_mask.fields import TENSOR_FIELDS
from flexhop.compat.nvidia_tools import find_tool
from flexhop.offline import generate, generate_code
from flexhop.offline.cubin import compile_kernel, lost_addends
from flexhop.offline.interpret import Memory, interpret

IDS = torch.sort(torch.randint(0, 9, (300,), generator=torch.Generator().manual_seed(0))).values


def documents(b, h, q_idx, kv_idx):
    return (IDS[q_idx] == IDS[kv_idx]) & (q_idx >= kv_idx)


def residues(b, h, q_idx, kv_idx):
    return (q_idx - kv_idx).abs() * (h + 1) % 7 > 2 + b


@pytest.mark.parametrize(
    ("mask", "block"), [(documents, (128, 64)), (residues, (48, 20)), (residues, (64, 128))]
)
def test_lists_of_interpreted_kernels(mask, block):
    def create(like):
        return create_block_mask(mask, 2, 3, like.shape[0], like.shape[1], "cpu", block)

    like = torch.empty(290, 300)
    found = interpret(create, like, memory=Memory(poison=True, check_bounds=True))
    assert len(found.templates) == 1
    expected = create(like)
    for name in TENSOR_FIELDS:
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


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def prefix(b, h, q_idx, kv_idx):
    return (q_idx >= kv_idx) | (kv_idx < 700)


@pytest.mark.parametrize("mask", [causal, prefix])
def test_lists_of_one_sided_masks_keep_their_constants(mask):
    """Inductor tries several shapes and keeps the fastest: 128 x 128 blocks were wrong in some."""
    found = generate_code(lambda: create_block_mask(mask, None, None, 16384, 16384, "cpu"))
    listing = [kernel for kernel in found.kernels if kernel.kind == "reduction"]
    assert listing
    for kernel in listing:
        for rows, columns, warps in ((2, 128, 2), (1, 256, 2)):
            constants = {"XBLOCK": rows, "R0_BLOCK": columns}
            compile_kernel(kernel, 90, constants, warps, num_stages=1)


HALF_OF_A_SUM = """
.version 8.7
.target sm_90a
.address_size 64
.visible .entry high_half(.param .u64 terms, .param .u64 sums)
{
    .reg .b64 %rd<3>;
    .reg .b32 %r<4>;
    .reg .b16 %rs<2>;
    ld.param.b64 %rd1, [terms];
    ld.param.b64 %rd2, [sums];
    ld.global.b32 %r1, [%rd1];
    mov.b32 %r2, 0x00800000;
    add.s16x2 %r3, %r1, %r2;
    mov.b32 {_, %rs1}, %r3;
    st.global.b16 [%rd2], %rs1;
    ret;
}
"""


def test_lost_constants_are_found(tmp_path):
    """With ptxas of CUDA 12.8; once a later one keeps the constant, the mend may go."""
    source, binary = tmp_path / "sum.ptx", tmp_path / "sum.cubin"
    source.write_text(HALF_OF_A_SUM)
    subprocess.run([find_tool("ptxas"), "-arch=sm_90a", "-o", binary, source], check=True)
    (lost,) = lost_addends(HALF_OF_A_SUM, binary.read_bytes())
    assert lost.startswith("VIADD.16x2")
    assert lost_addends("ld.global.b32", binary.read_bytes()) == []
