"""Functions as kernels of 16-bit operands compute them: PTX without branches, run in numpy."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

import numpy as np
import pytest
import torch

import flexhop
from flexhop.compat.kernels.functions import FUNCTIONS
from flexhop.offline import generate_code
from flexhop.offline.interpret import interpret, run_kernel
from flexhop.offline.packed_assembly import run_packed
from tests.compiler_stages import compile_to_layouts
from tests.needs import needs_hopper
from tests.unit.offline.kernels import POINTERS, kernel

HELPER = "from flexhop.compat.kernels.triton_runtime import PTX_SIGMOID, run_1\n"
BODY = """
i = tl.program_id(0) * 1024 + tl.arange(0, 1024)
tl.store(out + i, run_1(tl.load(x + i), PTX_SIGMOID))
"""
NEAR = torch.logspace(-20, 1, 8192).float()
NUMBERS = torch.cat([NEAR, -NEAR, torch.linspace(-30, 30, 16385)])
POSITIVE = torch.logspace(-37, 37, 8192).float()
AROUND_ONE = torch.linspace(0.5, 2, 8193)
UP_TO_ONE = torch.cat([torch.linspace(-1, 1, 16385), NEAR[NEAR < 1], -NEAR[NEAR < 1]])
ANGLES = torch.linspace(-1e7, 1e7, 16385)


def computed(name: str, *args: torch.Tensor) -> torch.Tensor:
    """What the text of a function gives."""
    arrays = [np.ascontiguousarray(x.numpy()) for x in torch.broadcast_tensors(*args)]
    text = FUNCTIONS[name].text
    return torch.from_numpy(run_packed(text, 1, arrays, [np.dtype(np.float32)])[0])


def assert_exact(found: torch.Tensor, exact: torch.Tensor, relative: float = 2.0**-17) -> None:
    """Off by less than `relative`, or 2**-21; what fp32 cannot hold is infinite, or 0."""
    shown = exact.clamp(-3.5e38, 3.5e38)
    infinite = exact.abs() > 3.4e38
    assert torch.equal(found[infinite].double(), exact[infinite].sign() * torch.inf)
    error = (found.double() - shown)[~infinite].abs()
    assert bool((error <= (shown.abs() * relative).clamp(min=2.0**-21)[~infinite]).all())


@pytest.mark.parametrize(
    ("name", "x"),
    [
        *((name, NUMBERS) for name in ("exp", "exp2", "expm1", "sigmoid", "tanh", "erf")),
        ("log1p", NUMBERS[NUMBERS > -1]),
        ("log1p", POSITIVE),
        ("sqrt", POSITIVE),
        ("rsqrt", POSITIVE),
        *((name, x) for name in ("sign", "reciprocal") for x in (POSITIVE, -POSITIVE)),
        *((name, x) for name in ("sin", "cos") for x in (NUMBERS, ANGLES)),
        *((name, NUMBERS) for name in ("erfc", "sinh", "cosh", "asinh", "atan")),
        *((name, UP_TO_ONE) for name in ("asin", "acos", "atanh")),
        *((name, sign * POSITIVE) for name in ("asinh", "atan") for sign in (1, -1)),
        ("acosh", 1 + POSITIVE),
        *((name, x) for name in ("log", "log2", "log10") for x in (POSITIVE, AROUND_ONE)),
        ("sinh", torch.linspace(-89.4, 89.4, 4097)),
    ],
)
def test_functions_are_off_by_less_than_a_rounding_to_16_bits(name, x):
    assert_exact(computed(name, x), getattr(torch, name)(x.double()))


@pytest.mark.parametrize("name", ["sigmoid", "tanh", "erf", "erfc", "sin", "cos", "atan"])
def test_bounded_functions_have_the_digits_of_a_largest_score(name):
    """Calls return the largest scores in fp32."""
    exact = getattr(torch, name)(NUMBERS.double())
    assert float((computed(name, NUMBERS) - exact).abs().max()) < 2.0**-20


def test_tangents():
    """Around a pole, the result magnifies the rounding of the angle's rest."""
    x = torch.cat([NUMBERS, torch.linspace(-1e5, 1e5, 16385)])
    exact = x.double().tan()
    assert_exact(computed("tan", x)[exact.abs() < 64], exact[exact.abs() < 64], 2.0**-15)


@pytest.mark.parametrize("name", ["atan2", "hypot"])
def test_functions_of_two_numbers(name):
    sizes = torch.cat([torch.logspace(-12, 30, 600).float(), torch.zeros(1)])
    signed = torch.cat([sizes, -sizes])
    exact = getattr(torch, name)(signed[:, None].double(), signed.double())
    assert_exact(computed(name, signed[:, None], signed), exact)


def test_what_tanh_takes_from_a_small_number_is_right():
    """The root of it is a score in random problems; it shows errors that are far below 2**-21."""
    near = torch.logspace(-4, -0.4, 8192).float()
    found = (near.double() - computed("tanh", near)).sqrt()
    torch.testing.assert_close(
        found, (near.double() - near.double().tanh()).sqrt(), rtol=0, atol=5e-5
    )


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("x", [POSITIVE, AROUND_ONE])
def test_logarithms_of_magnitudes_have_all_digits_around_one(x, sign):
    exact = x.double().log2()
    assert_exact(computed("log2_of_size", sign * x), exact, relative=2.0**-21)


def test_quotients():
    x, y = NUMBERS[::7][:, None], torch.cat([POSITIVE, -POSITIVE])[::9]
    exact = x.double() / y.double()
    within = (exact.abs() < 1e38) & (y.abs() < 2.0**126) & (y.abs() > 2.0**-126)
    assert_exact(computed("divide", x, y)[within], exact[within])


def power(base: torch.Tensor, exponent: torch.Tensor) -> torch.Tensor:
    base, exponent = torch.broadcast_tensors(base, exponent)
    return computed("power", computed("log2_of_size", base), base, exponent)


def test_powers():
    base = torch.cat([AROUND_ONE[::64], torch.tensor([0.99, 0.9999, 1.0, 1e-3, 40.0])])[:, None]
    exponent = torch.cat([torch.arange(-40, 5000, 7.0), torch.linspace(-3, 3, 99)])
    exact = base.double() ** exponent.double()
    usual = (exact < 1e38) & (exact > 1e-37)
    assert_exact(power(base, exponent)[usual], exact[usual], relative=2.0**-12)
    negative = torch.tensor([[-2.0], [-0.5]])
    whole = torch.arange(-9.0, 9.0)
    assert_exact(power(negative, whole), negative.double() ** whole.double())
    assert power(negative, torch.tensor([0.5, 1 / 3])).isnan().all()
    zero = torch.zeros(3)
    assert power(zero, torch.tensor([0.0, 2.0, -1.0])).tolist() == [1.0, 0.0, torch.inf]


@pytest.mark.parametrize(
    ("name", "ends"),  # of infinity, its negative, NaN, 0, 1e30 and -1e30
    [
        ("exp", [torch.inf, 0, torch.nan, 1, torch.inf, 0]),
        ("expm1", [torch.inf, -1, torch.nan, 0, torch.inf, -1]),
        ("sigmoid", [1, 0, torch.nan, 0.5, 1, 0]),
        ("tanh", [1, -1, torch.nan, 0, 1, -1]),
        ("erf", [1, -1, torch.nan, 0, 1, -1]),
        ("log", [torch.inf, torch.nan, torch.nan, -torch.inf, math.log(1e30), torch.nan]),
        ("erfc", [0, 2, torch.nan, 1, 0, 2]),
        ("sinh", [torch.inf, -torch.inf, torch.nan, 0, torch.inf, -torch.inf]),
        ("cosh", [torch.inf, torch.inf, torch.nan, 1, torch.inf, torch.inf]),
        ("atanh", [torch.nan, torch.nan, torch.nan, 0, torch.nan, torch.nan]),
        ("asin", [torch.nan, torch.nan, torch.nan, 0, torch.nan, torch.nan]),
        ("sign", [1, -1, 0, 0, 1, -1]),
    ],
)
def test_functions_at_the_ends(name, ends):
    x = torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0, 1e30, -1e30])
    expected = torch.tensor(ends, dtype=torch.float32)
    torch.testing.assert_close(computed(name, x), expected, rtol=1e-7, atol=0, equal_nan=True)


def test_angles_beyond_the_range_stay_bounded():
    x = torch.tensor([1e30, -3e38, torch.inf, torch.nan])
    for name in ("sin", "cos"):
        found = computed(name, x)
        assert float(found[:2].abs().max()) <= 1
        assert found[2:].isnan().all()


def test_a_kernel_runs_a_text():
    x, out = NUMBERS[:8192], torch.full((8192,), -7.0)
    run_kernel(kernel(POINTERS, BODY, HELPER), (8,), {"x": x, "out": out})
    assert_exact(out, x.double().sigmoid())


MODS: dict[str, Callable[..., torch.Tensor]] = {
    "tanh": lambda s, b, h, m, n: s * s.tanh(),
    "exp": lambda s, b, h, m, n: s.exp(),
    "divide": lambda s, b, h, m, n: s / (1 + s * s),
    "power": lambda s, b, h, m, n: s.abs() ** (1 + s * s),
    "sign": lambda s, b, h, m, n: s.sign() + 2 * s,
    "reciprocal": lambda s, b, h, m, n: s.square().add(1).reciprocal(),
}


def mod_source(name: str, dtype: torch.dtype) -> str:
    """Text of the forward kernel with a score_mod."""
    inputs = [torch.zeros(1, 2, 128, 64, dtype=dtype) for _ in range(3)]
    asked = flexhop.KernelOptions(backend="triton")
    generated = generate_code(
        lambda q, k, v: flexhop.flex_attention(q, k, v, MODS[name], kernel_options=asked), *inputs
    )
    (text,) = (found.source for found in generated.templates)
    return text


@pytest.mark.parametrize("name", MODS)
def test_only_kernels_that_round_to_16_bits_have_them(name):
    used = re.compile(rf"= run_\d\(.*PTX_{name.upper()}\)")
    assert used.search(mod_source(name, torch.bfloat16))
    assert not used.search(mod_source(name, torch.float32))


@pytest.mark.filterwarnings("ignore::flexhop.errors.EagerWarning")
def test_scores_that_are_no_numbers_are_found():
    query, key, value = (torch.randn(1, 1, 32, 16, dtype=torch.bfloat16) for _ in range(3))
    query[0, 0, 5] = torch.nan

    def attend(*x: torch.Tensor) -> torch.Tensor:
        return flexhop.flex_attention(
            *x, lambda s, b, h, q, k: torch.where(s.isnan(), 0.5 * k, s.nan_to_num() * 2)
        )

    found = interpret(attend, query, key, value).result
    assert found.isfinite().all()
    torch.testing.assert_close(found, attend(query, key, value), atol=2e-2, rtol=2e-2)


EVERY = """
abs acos acosh asin asinh atan atanh ceil cos cosh deg2rad erf erfc erfinv exp exp2 expm1 floor
frac i0 log log10 log1p log2 logit nan_to_num neg reciprocal relu round rsqrt sigmoid sign sin
sinc sinh sqrt square tan tanh trunc
""".split()
OF_TWO = "atan2 copysign fmax fmin fmod hypot logaddexp maximum minimum pow xlogy".split()


def every_function(s, b, h, m, n):
    one = sum(getattr(torch, name)(s) for name in EVERY)
    two = sum(getattr(torch, name)(s, 0.1 * (m - n)) for name in OF_TWO)
    return one + two + torch.atan(0.1 * (m - n)) + torch.remainder(s, 0.3)


@pytest.mark.slow
@needs_hopper
def test_hopper_kernels_take_every_function_that_has_a_text():
    """Gluon's tensors have layouts; text that Inductor writes for Triton may lack them."""
    inputs = [torch.zeros(1, 2, 256, 64, dtype=torch.bfloat16, requires_grad=True)] * 3
    asked = flexhop.KernelOptions(backend="hopper")
    generated = generate_code(
        lambda q, k, v: flexhop.flex_attention(q, k, v, every_function, kernel_options=asked),
        *inputs, grad=True,
    )  # fmt: skip
    assert [kernel.is_gluon for kernel in generated.templates] == [True, True]
    for template in generated.templates:
        compile_to_layouts(template, 90)
