"""One whole kernel per template, in the simplest case: causal attention, from its `def` on.

The texts are in *.expected beside this file, and docs/kernel.md shows them. They are accepted like
the inline ones: `EXPECTTEST_ACCEPT=1 pytest tests/graph`.
"""

import functools
import os
from pathlib import Path
from typing import Literal

import pytest
import torch

import flexhop
from flexhop.compat import gluon_versions
from flexhop.masks import causal
from flexhop.offline import Generated, generate

HERE = Path(__file__).parent
# A device function that only this kernel has.
MARKS = {
    "forward": "attend_blocks",
    "grad_query": "grad_query_blocks",
    "grad_key_value": "grad_key_value_blocks",
    "hopper_forward": "produce",
}


@functools.cache
def _generated(backend: Literal["triton", "hopper"]) -> Generated:
    torch.manual_seed(0)
    inputs = [
        torch.randn(2, 4, 256, 64, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)
    ]
    mask = flexhop.create_block_mask(causal, None, None, 256, 256, "cpu")
    options = flexhop.KernelOptions(backend=backend)
    return generate(
        lambda q, k, v: flexhop.flex_attention(q, k, v, block_mask=mask, kernel_options=options),
        *inputs, grad=True,
    )  # fmt: skip


@pytest.mark.parametrize("kernel", MARKS)
def test_kernel(kernel: str):
    is_hopper = kernel == "hopper_forward"
    if is_hopper and gluon_versions.obstacle():
        pytest.skip(gluon_versions.obstacle())
    generated = _generated("hopper" if is_hopper else "triton")
    text = generated.kernel_with(MARKS[kernel]).text()
    file = HERE / f"{kernel}.expected"
    if os.environ.get("EXPECTTEST_ACCEPT"):
        file.write_text(text, encoding="utf-8")
    assert file.exists(), f"No {file.name} yet; accept it with EXPECTTEST_ACCEPT=1."
    assert text == file.read_text(encoding="utf-8"), (
        f"{file.name} differs; see this file's docstring."
    )
