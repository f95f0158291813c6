"""Biases of pairs: the order of programs that share one, and tiles of one that are copied."""

from __future__ import annotations

import dataclasses
import re
from functools import partial

import pytest
import torch

import flexhop
from flexhop.lowering.hopper import constants as hopper_constants
from flexhop.lowering.portable import shared
from flexhop.offline import generate_code
from flexhop.offline.cubin import compile_kernel
from flexhop.offline.interpret import Emulator, Memory, interpret
from flexhop.options import KernelOptions
from tests.case_inputs import Case, Shape, make_inputs
from tests.judging import assert_case
from tests.kernel.test_emulated import emulated
from tests.kernel.test_interpreted import interpreted
from tests.needs import needs_hopper

pytestmark = pytest.mark.filterwarnings("ignore::flexhop.errors.EagerWarning")
SHARED = Case(
    "shared", score=lambda c: lambda s, b, h, q, k: s + c.bias[h, q, k], learned=("bias",),
    captures=lambda s, r: {"bias": r.normal(s.heads, s.q_len, s.kv_len)}, lse=True,
    shape=Shape(3, 4, 2, 40, 72, 16, 24),
)  # fmt: skip
MASKED = dataclasses.replace(SHARED, name="masked", mask=lambda c: flexhop.masks.causal)


@pytest.fixture
def batch_inner(monkeypatch):
    """As if the bias did not fit the L2 cache."""
    for module in (shared, hopper_constants):
        monkeypatch.setattr(module, "is_batch_inner", lambda problem: problem.batch > 1)


@pytest.mark.usefixtures("batch_inner")
@pytest.mark.parametrize("case", [SHARED, MASKED], ids=lambda case: case.name)
def test_batches_of_a_head_come_one_after_the_other(case):
    inputs = make_inputs(case)
    assert_case(case, inputs, interpreted(case, inputs))


@needs_hopper
@pytest.mark.usefixtures("batch_inner")
def test_they_do_in_hopper_kernels():
    emulated(
        dataclasses.replace(
            MASKED, learned=(), shape=Shape(3, 4, 2, 100, 136, 64, 64), dtype=torch.bfloat16,
            options=KernelOptions(backend="hopper"),
        ),
        "random",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("batch", "length", "expected"), [(2, 4096, True), (2, 256, False), (1, 4096, False)]
)
@pytest.mark.parametrize("backend", ["triton", "hopper"])
def test_only_a_bias_that_exceeds_the_cache_orders_programs(batch, length, expected, backend):
    bias = torch.zeros(8, length, length, dtype=torch.bfloat16)
    tensors = [torch.zeros(batch, 8, length, 64, dtype=torch.bfloat16) for _ in range(3)]
    code = generate_code(
        lambda q, k, v: flexhop.flex_attention(
            q, k, v, lambda s, b, h, i, j: s + bias[h, i, j], kernel_options={"backend": backend}
        ),
        *tensors,
    )
    text = {"triton": f": tl.constexpr = {expected}", "hopper": f" = gl.constexpr({expected})"}
    assert "BATCH_INNER" + text[backend] in code.templates[0].source.replace("R :", "R:")


def biased(name: str, shape: Shape, size: tuple[int, ...], score, of=torch.bfloat16, **more):
    """A case of the Hopper forward kernel with a bias of pairs of this size and dtype."""
    return Case(
        name, score=score, captures=lambda s, r: {"bias": r.normal(*size).to(of)}, lse=True,
        shape=shape, options=KernelOptions(backend="hopper"),
        **{"dtype": torch.bfloat16} | more,
    )  # fmt: skip


COPIED = [
    biased("scores", Shape(2, 2, 1, 130, 136, 64, 64), (2, 2, 130, 136),
           lambda c: lambda s, b, h, q, k: s + c.bias[b, h, q, k]),
    biased("heads", Shape(2, 3, 3, 200, 264, 128, 128), (3, 200, 264),
           lambda c: lambda s, b, h, q, k: 2 * s - c.bias[h, q, k] * 0.5,
           mask=lambda c: flexhop.masks.causal),
    biased("float32", Shape(1, 2, 2, 130, 200, 64, 64), (2, 130, 200),
           lambda c: lambda s, b, h, q, k: s + c.bias[h, q, k], torch.float32,
           dtype=torch.float16),
    # More rows and columns than there are queries and keys; a head of another number.
    biased("larger", Shape(1, 4, 2, 70, 77, 80, 40), (2, 96, 80),
           lambda c: lambda s, b, h, q, k: torch.tanh(s) + c.bias[h // 2 - 2, q, k]),
    biased("all heads", Shape(2, 2, 2, 100, 136, 192, 128), (100, 136),
           lambda c: lambda s, b, h, q, k: torch.where(q % 3 == 0, s, s + c.bias[q, k])),
    biased("documents", Shape(1, 2, 2, 300, 304, 128, 64), (2, 300, 304),
           lambda c: lambda s, b, h, q, k: s + c.bias[h, q, k],
           mask=lambda c: lambda b, h, q, k: q // 90 == k // 90),
    biased("wide", Shape(1, 2, 1, 70, 136, 256, 256), (1, 2, 70, 136),
           lambda c: lambda s, b, h, q, k: s + c.bias[b, h, q, k]),
]  # fmt: skip


@needs_hopper
@pytest.mark.parametrize("case", COPIED, ids=lambda case: case.name)
def test_tiles_of_a_bias_are_copied(case, monkeypatch):
    monkeypatch.setenv("FLEXHOP_STRICT", "1")
    emulated(case, "random")


def chosen(score_mod, width=64, length=256, **words) -> str:
    """The name of a forward kernel."""
    tensors = [torch.zeros(2, 4, length, width, dtype=torch.bfloat16) for _ in range(3)]
    call = partial(flexhop.flex_attention, score_mod=score_mod, **words)
    return generate_code(call, *tensors).templates[0].functions[0]


BIAS = torch.zeros(2, 4, 256, 256, dtype=torch.bfloat16)
FLAT = torch.zeros(4 * 256 * 256 + 8, dtype=torch.bfloat16)
PLAIN, WITH_PAIRS = "flexhop_hopper_forward", "flexhop_hopper_forward_pairs"


@needs_hopper
@pytest.mark.parametrize(
    "score_mod",
    [
        lambda s, b, h, q, k: s + BIAS[b, h, q, k],
        lambda s, b, h, q, k: s * BIAS[b, h][q][k].abs(),
        lambda s, b, h, q, k: s + BIAS.transpose(0, 1)[h, b, q, k],
        lambda s, b, h, q, k: s + BIAS.mT[b, h, k, q],
        lambda s, b, h, q, k: s + BIAS.float()[b, h, q, k] * (q - k),
        lambda s, b, h, q, k: torch.where(h > 1, s + BIAS[0, 0, q, k], s),
        lambda s, b, h, q, k: s + FLAT[8:].view(4, 256, 256)[h, q, k],
    ],
)
def test_a_bias_is_copied_however_it_is_written(score_mod, monkeypatch):
    monkeypatch.setenv("FLEXHOP_STRICT", "1")
    assert chosen(score_mod) == WITH_PAIRS


@needs_hopper
@pytest.mark.parametrize(
    "score_mod",
    [
        # Two reads of pairs; a bias in columns; rows or a start that are not aligned; booleans.
        lambda s, b, h, q, k: s + BIAS[b, h, q, k] + BIAS[b, h, k, q],
        lambda s, b, h, q, k: s + BIAS[b, h, k, q],
        lambda s, b, h, q, k: s + BIAS[b, h, q // 2, k],
        lambda s, b, h, q, k: s + BIAS[..., :255].contiguous()[b, h, q, k.clamp(max=254)],
        lambda s, b, h, q, k: s + FLAT[1:-7].view(4, 256, 256)[h, q, k],
        lambda s, b, h, q, k: torch.where(BIAS.bool()[b, h, q, k], s, -1.0),
    ],
)
def test_other_reads_are_not_copied(score_mod, monkeypatch):
    monkeypatch.setenv("FLEXHOP_STRICT", "1")
    assert chosen(score_mod) != WITH_PAIRS


@needs_hopper
def test_batches_may_change_in_number(monkeypatch):
    monkeypatch.setenv("FLEXHOP_STRICT", "1")
    *tensors, bias = (torch.zeros(3, 4, 256, n, dtype=torch.bfloat16) for n in (64, 64, 64, 256))
    for tensor in (*tensors, bias):
        torch._dynamo.mark_dynamic(tensor, 0)

    def call(q, k, v, t):
        return flexhop.flex_attention(q, k, v, lambda s, b, h, i, j: s + t[b, h, i, j])

    (kernel,) = generate_code(call, *tensors, bias).templates
    assert kernel.functions[0] == WITH_PAIRS
    assert re.search(r"pairs, \[\(1024\*ks\d\), 256\], \[256, 1\]", kernel.source)


@needs_hopper
@pytest.mark.parametrize(
    ("width", "backend", "expected"),
    [(64, "auto", "triton"), (64, "hopper", PLAIN), (192, "auto", PLAIN)],
)
def test_a_bias_whose_start_is_not_aligned_is_read(width, backend, expected, monkeypatch):
    """Facts do not tell where a view starts, so the choice is made once more."""
    monkeypatch.setenv("FLEXHOP_STRICT", "1")

    def score_mod(s, b, h, q, k):
        return s + FLAT[1:-7].view(4, 256, 256)[h, q, k]

    found = chosen(score_mod, width, kernel_options={"backend": backend})
    assert found.startswith(expected)
    assert found != WITH_PAIRS


@needs_hopper
@pytest.mark.parametrize(
    ("width", "dtype"), [(64, "bfloat16"), (128, "float32"), (256, "bfloat16")]
)
def test_the_kernel_does_not_spill(width, dtype):
    bias = BIAS.to(getattr(torch, dtype))
    tensors = [torch.zeros(2, 4, 256, width, dtype=torch.bfloat16) for _ in range(3)]
    (kernel,) = generate_code(
        lambda q, k, v: flexhop.flex_attention(
            q, k, v, lambda s, b, h, i, j: s + bias[b, h, i, j]
        ),
        *tensors,
    ).templates
    assert compile_kernel(kernel, 90).spills == 0


@needs_hopper
def test_a_bias_that_the_graph_computes_is_there_before():
    torch.manual_seed(0)
    table, *tensors = (torch.randn(2, 128, 64).bfloat16() for _ in range(4))

    def attention(q, k, v):
        bias = table @ table.mT * q.amax()
        return flexhop.flex_attention(
            q[None], k[None], v[None], lambda s, b, h, i, j: s + bias[h, i, j],
            kernel_options={"backend": "hopper"},
        )  # fmt: skip

    found = interpret(attention, *tensors, memory=Memory(poison=True), emulator=Emulator())
    kernels = [kernel.functions[0] for kernel in found.templates]
    assert kernels == [WITH_PAIRS]
    torch.testing.assert_close(found.result, attention(*tensors), atol=2e-2, rtol=2e-2)
