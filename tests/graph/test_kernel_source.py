"""One whole kernel per template, in a simple case: causal attention, from its `def` on.

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
from flexhop.compat.kernels import gluon_versions
from flexhop.masks import causal
from flexhop.offline import Generated, generate_code

HERE = Path(__file__).parent
# A device function that only this kernel has.
MARKS = {
    "forward": "attend_blocks",
    "grad_query": "grad_query_blocks",
    "grad_key_value": "grad_key_value_blocks",
    "hopper_forward": "consume",
    "hopper_backward": "differentiate",
}
DECODE_MARKS = {"decode": "attend_share", "decode_combine": "weigh_share"}
CACHED_MARKS = {"cached_decode": "key_mod"}
TANGENT_MARKS = {"jvp_forward": "push_blocks"}
SECOND_MARKS = {
    "jvp_grad_query": "push_grad_query_blocks",
    "jvp_grad_key_value": "push_grad_key_value_blocks",
}


@functools.cache
def _generated(backend: Literal["triton", "hopper"]) -> Generated:
    torch.manual_seed(0)
    inputs = [
        torch.randn(2, 4, 256, 64, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)
    ]
    mask = flexhop.create_block_mask(causal, None, None, 256, 256, "cpu")
    options = flexhop.KernelOptions(backend=backend)
    return generate_code(
        lambda q, k, v: flexhop.flex_attention(q, k, v, block_mask=mask, kernel_options=options),
        *inputs, grad=True,
    )  # fmt: skip


@functools.cache
def _decoded() -> Generated:
    """One query at the end of a cache of 1024 keys, which six heads share."""
    torch.manual_seed(0)
    query = torch.randn(1, 12, 1, 64, dtype=torch.bfloat16)
    key, value = (torch.randn(1, 2, 1024, 64, dtype=torch.bfloat16) for _ in range(2))
    position = torch.tensor(700)
    whole = flexhop.create_block_mask(causal, None, None, 1024, 1024, "cpu")

    def step(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        mask = whole[:, :, position // 128]
        mask.seq_lengths = (1, 1024)
        mask.mask_mod = lambda b, h, q_idx, kv_idx: q_idx + position >= kv_idx
        return flexhop.flex_attention(query, key, value, block_mask=mask, enable_gqa=True)

    return generate_code(step, query, key, value)


@functools.cache
def _cached() -> Generated:
    """One query of each of two sequences, whose keys lie as int8 in pages of 16."""
    query = torch.zeros(2, 12, 1, 64, dtype=torch.bfloat16)
    key, value = (torch.zeros(70, 2, 16, 64, dtype=torch.int8) for _ in range(2))
    table = flexhop.PageTable(
        torch.zeros(2, 32, dtype=torch.int32), 16, torch.zeros(2, dtype=torch.int32)
    )
    mod = flexhop.mods.dequantize(torch.ones(2, 2, 512))

    def step(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return flexhop.flex_attention(
            query, key, value, enable_gqa=True, page_table=table, k_mod=mod, v_mod=mod
        )

    return generate_code(step, query, key, value)


@functools.cache
def _pushed() -> Generated:
    """Causal attention with a factor per head, and tangents of all that it reads."""
    inputs = [torch.zeros(2, 4, 256, 64, dtype=torch.bfloat16) for _ in range(3)]
    inputs.append(torch.zeros(4))
    mask = flexhop.create_block_mask(causal, None, None, 256, 256, "cpu")

    def attend(*x: torch.Tensor) -> torch.Tensor:
        return flexhop.flex_attention(*x[:3], lambda s, b, h, q, k: s * x[3][h], mask)

    return generate_code(lambda *x: torch.func.jvp(attend, x, x), *inputs)


@functools.cache
def _second() -> Generated:
    """A Hessian of causal, capped attention times a vector: what query and key get of it."""
    inputs = [torch.zeros(2, 4, 256, 64, dtype=torch.bfloat16) for _ in range(3)]
    mask = flexhop.create_block_mask(causal, None, None, 256, 256, "cpu")

    def loss(*x: torch.Tensor) -> torch.Tensor:
        out = flexhop.flex_attention(*x, lambda s, b, h, q, k: 2 * (s / 2).tanh(), mask)
        return out.float().square().sum()

    gradient = torch.func.grad(lambda q, k: loss(q, k, inputs[2]), argnums=(0, 1))
    return generate_code(lambda q, k: torch.func.jvp(gradient, (q, k), (q, k))[1], *inputs[:2])


KERNELS = (*MARKS, *DECODE_MARKS, *CACHED_MARKS, *TANGENT_MARKS, *SECOND_MARKS)


@pytest.mark.parametrize("kernel", KERNELS)
def test_kernel(kernel: str):
    is_hopper = kernel.startswith("hopper")
    if is_hopper and gluon_versions.obstacle():
        pytest.skip(gluon_versions.obstacle())
    if kernel in CACHED_MARKS:
        generated = _cached()
    elif kernel in DECODE_MARKS:
        generated = _decoded()
    elif kernel in TANGENT_MARKS:
        generated = _pushed()
    elif kernel in SECOND_MARKS:
        generated = _second()
    else:
        generated = _generated("hopper" if is_hopper else "triton")
    marks = MARKS | DECODE_MARKS | CACHED_MARKS | TANGENT_MARKS | SECOND_MARKS
    text = generated.kernel_with(marks[kernel]).text()
    file = HERE / f"{kernel}.expected"
    if os.environ.get("EXPECTTEST_ACCEPT"):
        file.write_text(text, encoding="utf-8")
    assert file.exists(), f"No {file.name} yet; accept it with EXPECTTEST_ACCEPT=1."
    assert text == file.read_text(encoding="utf-8"), (
        f"{file.name} differs; see this file's docstring."
    )
