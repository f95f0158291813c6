"""Integers that name no place, on a GPU: what lies around the tensors is neither read nor written.

Run it under `compute-sanitizer` with PYTORCH_NO_CUDA_MEMORY_CACHING=1 to see every access.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tests.hostile_calls import KINDS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
]
MARGIN = 1 << 16  # elements on each side


def between_canaries(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """A copy of a tensor on the GPU, and the memory around it: NaN, or the largest integer."""
    canary = math.nan if tensor.is_floating_point() else torch.iinfo(tensor.dtype).max
    memory = torch.full((2 * MARGIN + tensor.numel(),), canary, dtype=tensor.dtype, device="cuda")
    inside = memory[MARGIN : MARGIN + tensor.numel()].view(tensor.shape)
    return inside.copy_(tensor), memory


@pytest.mark.parametrize("backend", ["auto", "triton"])
@pytest.mark.parametrize("kind", KINDS)
def test_canaries_live(kind, backend):
    hostile = KINDS[kind]({"backend": backend}, width=64)
    dtype = torch.bfloat16 if backend == "auto" else torch.float32  # Hopper kernels, if any serves
    given = [t.to(dtype) if t.is_floating_point() else t for t in hostile.operands]
    operands, memory = zip(*map(between_canaries, given), strict=True)
    for tensor in operands[: len(hostile.floats)]:
        tensor.requires_grad_(hostile.is_trained)
    out = torch.compile(hostile.call, fullgraph=True)(*operands)
    out = out[0] if isinstance(out, tuple) else out
    results = [out]
    if hostile.is_trained:
        out.sum().backward()
        grads = [t.grad for t in operands[: len(hostile.floats)]]
        results += [grad for grad in grads if grad is not None]  # of what the call reads
    torch.cuda.synchronize()
    assert not any(result.isnan().any() for result in results)
    for around, original in zip(memory, given, strict=True):
        for side in (around[:MARGIN], around[MARGIN + original.numel() :]):
            canaries = side.isnan() if side.is_floating_point() else side == side.max()
            assert canaries.all()
        inside = around[MARGIN : MARGIN + original.numel()].view(original.shape)
        assert inside.detach().cpu().equal(original)
