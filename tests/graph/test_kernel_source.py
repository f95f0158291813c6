"""One whole kernel per template, in the simplest case: causal attention, from its `def` on.

The texts are in *.expected beside this file, and docs/kernel.md shows them. They are accepted like
the inline ones: `EXPECTTEST_ACCEPT=1 pytest tests/graph`.
"""

import functools
import os
from pathlib import Path

import pytest
import torch

import flexhop
from flexhop.masks import causal
from flexhop.offline import Generated, generate

HERE = Path(__file__).parent
# A device function that only this kernel has.
MARKS = {
    "forward": "attend_blocks",
    "grad_query": "grad_query_blocks",
    "grad_key_value": "grad_key_value_blocks",
}


@functools.cache
def _generated() -> Generated:
    torch.manual_seed(0)
    inputs = [
        torch.randn(2, 4, 256, 64, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)
    ]
    mask = flexhop.create_block_mask(causal, None, None, 256, 256, "cpu")
    return generate(
        lambda q, k, v: flexhop.flex_attention(q, k, v, block_mask=mask), *inputs, grad=True
    )


@pytest.mark.parametrize("kernel", MARKS)
def test_kernel(kernel: str):
    text = _generated().kernel_with(MARKS[kernel]).text()
    file = HERE / f"{kernel}.expected"
    if os.environ.get("EXPECTTEST_ACCEPT"):
        file.write_text(text, encoding="utf-8")
    assert file.exists(), f"No {file.name} yet; accept it with EXPECTTEST_ACCEPT=1."
    assert text == file.read_text(encoding="utf-8"), (
        f"{file.name} differs; see this file's docstring."
    )
