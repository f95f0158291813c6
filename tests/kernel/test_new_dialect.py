"""A third dialect is a folder (tests/dialects/rows) and one line of registry."""

from __future__ import annotations

import pytest
import torch

import flexhop
from flexhop import options as registry
from flexhop.errors import OptionConflictError, OptionValueError
from flexhop.masks import causal
from flexhop.offline.interpret import Memory, interpret
from flexhop.options import KernelOptions
from flexhop.reports.report import Report


@pytest.fixture(autouse=True)
def _registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "DIALECTS", {"rows": "tests.dialects.rows", **registry.DIALECTS})
    torch._dynamo.reset()


def inputs(keys: int = 77) -> list[torch.Tensor]:
    """Query, key and value of two query heads for each key head."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 4, 37, 16), (2, 2, keys, 16), (2, 2, keys, 16))
    made = [torch.randn(shape, generator=generator, dtype=torch.float32) for shape in shapes]
    return [tensor.requires_grad_() for tensor in made]


def attend(backend: str, *tensors: torch.Tensor) -> torch.Tensor:
    """A call that chooses its dialect."""
    options = KernelOptions(backend=backend)
    return flexhop.flex_attention(*tensors, enable_gqa=True, kernel_options=options)


def test_an_option_chooses_it_and_gradients_come_from_the_portable_kernels():
    tensors = inputs()
    generated = interpret(
        lambda *args: attend("rows", *args), *tensors, grad=True,
        memory=Memory(poison=True, check_bounds=True),
    )  # fmt: skip
    forward, *backward = generated.templates
    assert "KEYS" in forward.constants and forward.constants["KEYS"] == 128
    assert "grad_query_blocks" in backward[0].functions
    doubles = [tensor.detach().double().requires_grad_() for tensor in tensors]
    keys, values = (tensor.repeat_interleave(2, 1) for tensor in doubles[1:])
    expected = torch.softmax(doubles[0] @ keys.mT / 4.0, -1) @ values
    expected.sum().backward()
    torch.testing.assert_close(generated.result.double(), expected, atol=2e-6, rtol=2e-6)
    for tensor, double in zip(tensors, doubles, strict=True):
        torch.testing.assert_close(tensor.grad.double(), double.grad, atol=2e-5, rtol=2e-5)


def explain(backend: str, **keywords: object) -> Report:
    """What would happen."""
    options = KernelOptions(backend=backend)
    return flexhop.explain(*inputs(), enable_gqa=True, kernel_options=options, **keywords)


def test_it_stands_in_reports():
    chosen = explain("rows")
    assert chosen.forward.reason == "rows serve this call"
    assert "one query x 128 keys, 1 warp; 296 programs" in str(chosen)
    assert "Rows are added up without tensor cores." in chosen.notes
    assert chosen.backward[0].reason.count("not the kernel by rows: it has no backward") == 1
    assert "not the kernel by rows: it takes no tensor cores" in explain("auto").forward.reason
    assert "kernel_options select backend 'triton'" in explain("triton").forward.reason


def test_it_says_why_it_cannot_serve():
    mask = flexhop.create_block_mask(causal, None, None, 37, 77, "cpu")
    with pytest.raises(OptionConflictError, match=r"'rows'.*it knows no mods, masks and dropout"):
        explain("rows", block_mask=mask)


def test_names_outside_of_the_registry_are_refused():
    with pytest.raises(OptionValueError, match="'auto', 'triton', 'hopper' or 'rows'"):
        KernelOptions(backend="columns")
