"""Loops of Inductor's reduction kernels that use what an earlier loop stored."""

import re

import torch

import flexhop
from flexhop.offline import generate_code


def test_threads_wait_between_loops():
    """A mask in one byte and numbers in four are stored, and read again, by different threads."""

    def call(query, key, value):
        out = flexhop.flex_attention(query, key, value).float().flatten(1)
        mask = out > 0
        kept = torch.where(mask, out * 2, 0.0)
        rest = kept - kept.amax(1, keepdim=True)
        return mask, kept, torch.where(mask, rest.exp(), 0.0).sum(1)

    inputs = [torch.zeros(2, 2, 64, 64, dtype=torch.bfloat16)] * 3
    text = generate_code(call, *inputs).forward
    kernels = re.split(r"(?=\n@triton\.jit)", text)
    loops = [kernel for kernel in kernels if kernel.count("in tl.range(") > 1]
    assert loops  # a kernel with several loops, of which the first stores
    for kernel in loops:
        before_first, *others = kernel.split("in tl.range(")
        assert "tl.debug_barrier()" not in before_first
        assert all("tl.debug_barrier()" in between for between in others[:-1])
