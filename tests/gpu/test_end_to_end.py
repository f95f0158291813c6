"""torch.compile on a GPU against the specification and against PyTorch's own flex_attention.

scripts/test tests/gpu: some 16 minutes on 16 cores with one GPU
"""

from __future__ import annotations

import dataclasses
import gc
from typing import Literal

import pytest
import torch
from torch.nn.attention import flex_attention as stock

import flexhop
from flexhop.errors import OptionConflictError
from flexhop.masks import causal
from flexhop.options import KernelOptions
from tests.budgets import TF32
from tests.case_inputs import (
    Case,
    Shape,
    copy_inputs,
    make_block_mask,
    make_call,
    make_inputs,
    make_loss,
    unpack,
)
from tests.cases import BY_NAME, CASES
from tests.cuda_graphs import capture
from tests.judging import Outcome, assert_case

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _exact_products():
    """fp32 products in fp32; the TF32 test asks for the other."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)
    gc.collect()
    torch.cuda.empty_cache()


def compiled_run(case: Case, inputs, **compile_options) -> Outcome:
    """Forward and backward through compiled kernels."""
    call = torch.compile(make_call(case, inputs), fullgraph=True, **compile_options)
    result = call(inputs.query, inputs.key, inputs.value)
    make_loss(case, inputs)(result).backward()
    return Outcome.of(case, result, inputs)


def stock_run(case: Case, inputs) -> Outcome:
    """The same call of torch.nn.attention.flex_attention."""
    inputs = copy_inputs(case, inputs)
    if case.blocks is not None:
        raise ValueError("a block mask of ours; the case must not be marked stock")
    mask = make_block_mask(case, inputs, stock.create_block_mask)
    aux = {}
    if case.lse or case.max_scores:
        aux["return_aux"] = stock.AuxRequest(lse=case.lse, max_scores=case.max_scores)
    call = make_call(case, inputs, stock.flex_attention, block_mask=mask, **aux)
    result = torch.compile(call, fullgraph=True)(inputs.query, inputs.key, inputs.value)
    make_loss(case, inputs)(result).backward()
    return Outcome.of(case, result, inputs)


def assert_not_worse(case: Case, ours: Outcome, theirs: Outcome, gold: Outcome) -> None:
    """M(flexhop) <= 2 M(stock) + a, with a twice the rounding of the largest number."""
    for name, actual in ours.tensors.items():
        reference = gold.tensors[name].detach().double()
        finite = reference.isfinite()
        if name not in theirs.tensors or not bool(finite.any()):
            continue
        error, bound = (
            float(
                (t.tensors[name].detach().double() - reference)[finite]
                .abs()
                .nan_to_num(torch.inf)
                .max()
            )
            for t in (ours, theirs)
        )
        rounding = 2 * torch.finfo(actual.dtype).eps * float(reference[finite].abs().max())
        assert error <= 2 * bound + rounding, (
            f"{case.name}: {name}: {error:.3e} against {bound:.3e}"
        )


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_case(case: Case):
    case = case.on_gpu()
    inputs = make_inputs(case, "cuda")
    ours = compiled_run(case, inputs)
    gold, _ = assert_case(case, inputs, ours)
    if not case.stock:
        return
    try:
        theirs = stock_run(case, inputs)
    except (torch._inductor.exc.InductorError, torch._dynamo.exc.TorchDynamoException):
        # PyTorch refuses some of our cases: blocks that its tiles do not divide, one table read
        # twice, a shared batch without a mask, tables that do not fit shared memory.
        return
    assert_not_worse(case, ours, theirs, gold)


def in_half(case: Case, backend: Literal["triton", "hopper"]) -> Case:
    """The case in bfloat16, with heads and blocks that both forward kernels take."""
    case = case.on_gpu()
    shape = case.shape
    sizes = case.block_size if isinstance(case.block_size, tuple) else (case.block_size,) * 2
    return dataclasses.replace(
        case,
        name=f"{case.name}_{backend}",
        dtype=torch.float16 if case.dtype == torch.float16 else torch.bfloat16,
        shape=dataclasses.replace(
            shape, head_dim=max(64, shape.head_dim), value_head_dim=max(64, shape.value_head_dim)
        ),
        block_size=(-(-sizes[0] // 128) * 128, -(-sizes[1] // 128) * 128),
        options=KernelOptions(backend=backend),
    )


@pytest.mark.parametrize("backend", ["triton", "hopper"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_results_of_either_forward_kernel(case: Case, backend):
    if backend == "hopper" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    case = in_half(case, backend)
    inputs = make_inputs(case, "cuda")
    call = torch.compile(make_call(case, inputs), fullgraph=True)
    try:
        with torch.no_grad():
            results = unpack(call(inputs.query, inputs.key, inputs.value))
    except OptionConflictError as error:  # not wrapped by Inductor
        pytest.skip(str(error))
    wanted = {"out": True, "lse": case.lse, "max_scores": case.max_scores}
    found = zip(wanted, results, strict=True)
    outcome = Outcome({name: value for name, value in found if wanted[name] and value is not None})
    assert_case(case, inputs, outcome)


@pytest.mark.parametrize("backend", ["triton", "hopper"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_gradients_of_either_backward_kernel(case: Case, backend):
    """In 16 bits; tables that learn and are read by single scores have the portable kernels."""
    if backend == "hopper" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    case = in_half(case, backend)
    inputs = make_inputs(case, "cuda")
    try:
        outcome = compiled_run(case, inputs)
    except OptionConflictError as error:
        pytest.skip(str(error))
    assert_case(case, inputs, outcome)


@pytest.mark.parametrize(
    "name", ["causal_small_blocks", "soft_cap", "learned_table", "head_dim_96"]
)
def test_tf32(name):
    torch.set_float32_matmul_precision("high")
    case = BY_NAME[name].on_gpu()
    inputs = make_inputs(case, "cuda")
    ours = compiled_run(case, inputs)
    assert_case(case, inputs, ours, budget=TF32)


LONG = dataclasses.replace(
    BY_NAME["causal"], name="long", shape=Shape(2, 8, 2, 2048, 2048, 64, 64), dtype=torch.bfloat16
)
WIDE = dataclasses.replace(LONG, name="wide", shape=Shape(1, 4, 4, 1024, 1024, 128, 128))


@pytest.mark.parametrize(
    "case", [LONG, WIDE, BY_NAME["learned_table"].on_gpu()], ids=lambda c: c.name
)
@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune-no-cudagraphs"])
def test_modes(case: Case, mode: str):
    inputs = make_inputs(case, "cuda")
    call = torch.compile(make_call(case, inputs), mode=mode, fullgraph=True)
    loss = make_loss(case, inputs)
    for _ in range(4):  # warm up, record, replay twice
        torch.compiler.cudagraph_mark_step_begin()
        for leaf in inputs.leaves(case).values():
            leaf.grad = None
        result = call(inputs.query, inputs.key, inputs.value).clone()
        loss(result).backward()
    assert_case(case, inputs, Outcome.of(case, result, inputs))


def test_a_replayed_graph_reads_its_new_inputs():
    call = torch.compile(
        lambda q, k, v, mask: flexhop.flex_attention(q, k, v, block_mask=mask),
        mode="reduce-overhead",
    )
    mask = flexhop.create_block_mask(causal, None, None, 512, 512, "cuda")
    for seed in range(4):
        torch.manual_seed(seed)
        tensors = [
            torch.randn(1, 4, 512, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3)
        ]
        torch.compiler.cudagraph_mark_step_begin()
        out = call(*tensors, mask).clone()
        expected = torch.nn.functional.scaled_dot_product_attention(*tensors, is_causal=True)
        torch.testing.assert_close(out, expected, atol=2e-2, rtol=2e-2)


def test_creating_a_mask_is_captured_in_a_cuda_graph():
    ids = torch.zeros(512, dtype=torch.int32, device="cuda")

    def make():
        return flexhop.create_block_mask(
            lambda b, h, q, k: (ids[q] == ids[k]) & (q >= k), None, None, 512, 512, "cuda"
        )

    graph, mask = capture(make)
    for boundary in (128, 300):
        ids.copy_((torch.arange(512, device="cuda") >= boundary).int())
        graph.replay()
        expected = make()
        assert torch.equal(mask.to_dense(), expected.to_dense())
        assert torch.equal(mask.full_kv_num_blocks, expected.full_kv_num_blocks)


@pytest.mark.parametrize("grouped", [False, True])
def test_one_dynamic_graph_serves_changing_lengths(grouped):
    graphs = []
    torch._dynamo.reset()

    def attention(query, key, value, mask):
        return flexhop.flex_attention(
            query, key, value, lambda s, b, h, q, k: s + (q - k) * 0.01, mask, enable_gqa=grouped
        )

    def count(module, inputs, **keywords):
        from torch._inductor.compile_fx import compile_fx

        graphs.append(module)
        return compile_fx(module, inputs, **keywords)

    call = torch.compile(attention, dynamic=True, fullgraph=True, backend=count)
    for length in (513, 640, 1023, 257):
        shape = Shape(2, 8, 2 if grouped else 8, length, length, 64, 64)
        case = Case("dynamic", mask=lambda c: causal, shape=shape, dtype=torch.bfloat16,
                    score=lambda c: lambda s, b, h, q, k: s + (q - k) * 0.01)  # fmt: skip
        inputs = make_inputs(case, "cuda")
        mask = make_block_mask(case, inputs)
        result = call(inputs.query, inputs.key, inputs.value, mask)
        make_loss(case, inputs)(result).backward()
        assert_case(case, inputs, Outcome.of(case, result, inputs))
    assert len(graphs) == 1


@pytest.mark.parametrize(
    "case", [LONG, WIDE, BY_NAME["empty_rows_alternate"].on_gpu()], ids=lambda c: c.name
)
def test_results_are_bitwise_reproducible(case: Case):
    inputs = make_inputs(case, "cuda")
    first = compiled_run(case, inputs)
    second = compiled_run(case, copy_inputs(case, inputs))
    for name, tensor in first.tensors.items():
        assert torch.equal(tensor, second.tensors[name]), name


@pytest.mark.parametrize("width", [64, 128, 256])
def test_a_hundred_forward_passes_are_equal(width):
    """Programs take tiles in the order in which they get free: no result may depend on it."""
    tensors = [
        torch.randn(2, 8, 2048, width, device="cuda", dtype=torch.bfloat16) for _ in range(3)
    ]
    mask = flexhop.create_block_mask(causal, None, None, 2048, 2048, "cuda")
    call = torch.compile(lambda q, k, v: flexhop.flex_attention(q, k, v, block_mask=mask))
    first = call(*tensors)
    assert all(torch.equal(call(*tensors), first) for _ in range(100))


def test_deterministic_mode_keeps_its_promise():
    torch.use_deterministic_algorithms(True)
    try:
        inputs = make_inputs(LONG, "cuda")
        first = compiled_run(LONG, inputs)
        second = compiled_run(LONG, copy_inputs(LONG, inputs))
        assert all(torch.equal(t, second.tensors[n]) for n, t in first.tensors.items())
        case = BY_NAME["learned_distance"].on_gpu()
        inputs = make_inputs(case, "cuda")
        first = compiled_run(case, inputs)
        second = compiled_run(case, copy_inputs(case, inputs))
        assert torch.equal(first.tensors["grad_bias"], second.tensors["grad_bias"])
    finally:
        torch.use_deterministic_algorithms(False)


def test_more_batches_times_heads_than_a_grid_axis_holds():
    tensors = [
        torch.randn(22720, 3, 64, 32, device="cuda", dtype=torch.float16, requires_grad=True)
        for _ in range(3)
    ]
    out = torch.compile(flexhop.flex_attention)(*tensors)
    out.sum().backward()
    last = [t.detach()[-2:] for t in tensors]
    expected = torch.nn.functional.scaled_dot_product_attention(*last)
    torch.testing.assert_close(out[-2:], expected, atol=2e-2, rtol=2e-2)
    assert all(t.grad is not None and t.grad.shape == t.shape for t in tensors)


def test_offsets_beyond_int32():
    """Keys and values spread over more than 2**31 elements of storage."""
    length, width = 4096, 64
    stride = (2**31 + 2**28) // length  # between two keys
    storage = torch.zeros(length * stride, device="cuda", dtype=torch.bfloat16)
    key = storage.as_strided((1, 1, length, width), (0, 0, stride, 1))
    value = storage.as_strided((1, 1, length, width), (0, 0, stride, 1), width)
    packed = [
        torch.randn(1, 1, length, width, device="cuda", dtype=torch.bfloat16) for _ in range(3)
    ]
    key.copy_(packed[1])
    value.copy_(packed[2])
    query = packed[0]
    mask = flexhop.create_block_mask(lambda b, h, q, k: k >= q, None, None, length, length, "cuda")
    options = KernelOptions(backend="triton")  # the Hopper kernel takes only one of the layouts
    call = torch.compile(
        lambda q, k, v: flexhop.flex_attention(q, k, v, block_mask=mask, kernel_options=options)
    )
    out = call(query, key, value)
    expected = call(*packed)
    assert torch.equal(out, expected)


def test_large_outputs_have_wide_offsets():
    """Query and out of more than 2**31 elements; the last rows are compared."""
    shape = (1, 2, (1 << 24) + 128, 64)
    query = torch.zeros(shape, device="cuda", dtype=torch.bfloat16)
    torch.manual_seed(0)
    query[:, :, -64:] = torch.randn(1, 2, 64, 64, device="cuda").to(torch.bfloat16)
    key, value = (torch.randn(1, 2, 128, 64, device="cuda").to(torch.bfloat16) for _ in range(2))
    with torch.no_grad():
        out = torch.compile(flexhop.flex_attention)(query, key, value)
    tail = torch.nn.functional.scaled_dot_product_attention(query[:, :, -64:], key, value)
    torch.testing.assert_close(out[:, :, -64:], tail, atol=2e-2, rtol=2e-2)


def test_pytorchs_block_mask_is_taken():
    case = dataclasses.replace(LONG, name="theirs")
    inputs = make_inputs(case, "cuda")
    mask = make_block_mask(case, inputs, stock.create_block_mask)
    call = torch.compile(make_call(case, inputs, block_mask=mask), fullgraph=True)
    result = call(inputs.query, inputs.key, inputs.value)
    make_loss(case, inputs)(result).backward()
    assert_case(case, inputs, Outcome.of(case, result, inputs))


def test_a_fused_epilogue():
    case = LONG
    inputs = make_inputs(case, "cuda")
    call = make_call(case, inputs)
    plain = torch.compile(call)(inputs.query, inputs.key, inputs.value)
    fused = torch.compile(lambda *t: call(*t) * 2 + 1)(inputs.query, inputs.key, inputs.value)
    torch.testing.assert_close(fused, plain * 2 + 1, atol=2e-2, rtol=2e-2)
