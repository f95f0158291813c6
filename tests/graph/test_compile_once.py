"""What compile workers are asked for: each of our kernels once."""

from typing import Any, Literal

import pytest
import torch
from torch._inductor.codegen.triton import TritonScheduling

import flexhop
from flexhop.compat import gluon_versions
from flexhop.masks import causal
from flexhop.offline import Generated, generate


def _generate(backend: Literal["triton", "hopper"]) -> Generated:
    inputs = [
        torch.randn(1, 2, 256, 64, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)
    ]
    mask = flexhop.create_block_mask(causal, None, None, 256, 256, "cpu")
    options = flexhop.KernelOptions(backend=backend)
    return generate(
        lambda q, k, v: flexhop.flex_attention(q, k, v, block_mask=mask, kernel_options=options),
        *inputs, grad=True,
    )  # fmt: skip


@pytest.mark.parametrize("backend", ["triton", "hopper"])
def test_texts_of_a_kernel_are_equal(
    backend: Literal["triton", "hopper"], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers take a text when it is generated and when its module is loaded: one job if equal."""
    if backend == "hopper" and (obstacle := gluon_versions.obstacle()):
        pytest.skip(obstacle)
    early: dict[str, str] = {}
    define = TritonScheduling.define_kernel

    def note(self: Any, source: str, *args: Any, **kwargs: Any) -> str:
        name = define(self, source, *args, **kwargs)
        named = source.replace("Placeholder.DESCRIPTIVE_NAME", name)
        early[name] = named.replace("Placeholder.KERNEL_NAME", name)
        return name

    monkeypatch.setattr(TritonScheduling, "define_kernel", note)
    templates = _generate(backend).templates
    assert len(templates) == (3 if backend == "triton" else 2)
    for kernel in templates:
        # The hash of the backend is of this machine, and generate leaves it out.
        assert _without_hash(kernel.source) == _without_hash(early[kernel.name]), kernel.name


def _without_hash(source: str) -> str:
    return "\n".join(line for line in source.split("\n") if not line.startswith("inductor_meta="))
