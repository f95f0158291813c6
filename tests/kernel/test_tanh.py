"""tanh as kernels of 16-bit operands compute it."""

import pytest
import torch

import flexhop
from flexhop.offline import generate
from flexhop.offline.interpret import run_kernel
from tests.unit.offline.kernels import POINTERS, kernel

HELPER = "from flexhop.compat.triton_runtime import branchless_tanh\n"
BODY = """
i = tl.program_id(0) * 1024 + tl.arange(0, 1024)
tl.store(out + i, branchless_tanh(tl.load(x + i)))
"""


def computed(x: torch.Tensor) -> torch.Tensor:
    """By the kernels' function, in the interpreter."""
    out = torch.full_like(x, -7)
    run_kernel(kernel(POINTERS, BODY, HELPER), (x.numel() // 1024,), {"x": x, "out": out})
    return out


def test_tanh_without_a_branch_is_as_exact_as_it_says():
    near = torch.logspace(-20, 0, 8192).float()
    x = torch.cat([near, -near, torch.linspace(-12, 12, 16384), torch.linspace(0.19, 0.21, 1024)])
    exact, error = x.double().tanh(), computed(x).double() - x.double().tanh()
    assert float(error.abs().max()) < 4e-7
    assert float((error / exact).nan_to_num().abs().max()) < 2e-6


def test_tanh_without_a_branch_at_the_ends():
    x = torch.zeros(1024)
    x[:5] = torch.tensor([torch.inf, -torch.inf, torch.nan, 1e30, -1e30])
    expected = torch.tensor([1.0, -1.0, torch.nan, 1.0, -1.0])
    torch.testing.assert_close(computed(x)[:5], expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("dtype", "function"), [(torch.bfloat16, "branchless_tanh"), (torch.float32, "libdevice.tanh")]
)
def test_only_kernels_that_round_to_16_bits_have_it(dtype, function):
    inputs = [torch.zeros(1, 2, 128, 64, dtype=dtype) for _ in range(3)]
    options = flexhop.KernelOptions(backend="triton")
    generated = generate(
        lambda q, k, v: flexhop.flex_attention(
            q, k, v, lambda s, b, h, m, n: s.tanh(), kernel_options=options
        ),
        *inputs,
    )
    (text,) = (found.source for found in generated.templates)
    assert f"= {function}(" in text
