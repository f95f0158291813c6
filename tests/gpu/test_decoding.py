"""Decoding on a GPU: CUDA graphs, growing caches, masks sliced step by step, many shapes."""

from __future__ import annotations

import itertools

import pytest
import torch

import flexhop
from flexhop import KernelOptions
from flexhop.masks import causal
from tests.budgets import assert_within_budget, dense_attention, dense_backward
from tests.cuda_graphs import capture

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16


def tensors(batch=2, heads=12, kv_heads=2, queries=1, keys=1000, width=64, dtype=BF16):
    """Random query, key and value on the GPU."""
    shapes = ((batch, heads, queries, width), *[(batch, kv_heads, keys, width)] * 2)
    return [torch.randn(shape, device="cuda", dtype=dtype) for shape in shapes]


def assert_attention(found, query, key, value, visible=None, score_mod=None):
    """Judge (out, aux) of a call against the dense formula, in fp64 and in the call's dtype.

    visible: which keys a query sees, [M, N]; every one by default.
    """
    scale = query.size(-1) ** -0.5
    if visible is None:
        visible = torch.ones(1, 1, dtype=torch.bool, device=query.device)
    wide = [tensor.double() for tensor in (query, key, value)]
    gold = dense_attention(*wide, score_mod, visible, scale)
    reference = dense_attention(query, key, value, score_mod, visible, scale)
    out, aux = found
    for name, actual in (("out", out), ("lse", aux.lse)):
        assert_within_budget(actual, getattr(gold, name), getattr(reference, name), name=name)


def attend(query, key, value, score_mod=None, block_mask=None, **options):
    """flex_attention with groups and lse."""
    return flexhop.flex_attention(
        query, key, value, score_mod, block_mask, enable_gqa=True,
        return_aux=flexhop.AuxRequest(lse=True), kernel_options=options or None,
    )  # fmt: skip


@pytest.mark.parametrize("group", [1, 3, 6, 7, 8])
@pytest.mark.parametrize("queries", [1, 3, 8, 16])
def test_groups_and_queries(group, queries):
    call = torch.compile(attend, fullgraph=True)
    for width, keys in ((64, 1000), (128, 777), (80, 1024)):
        inputs = tensors(heads=2 * group, queries=queries, keys=keys, width=width)
        assert_attention(call(*inputs), *inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("width", [16, 256])
def test_dtypes_and_widths(dtype, width):
    inputs = tensors(dtype=dtype, width=width)
    assert_attention(torch.compile(attend, fullgraph=True)(*inputs), *inputs)


@pytest.mark.parametrize("splits", [1, 2, 33, 200])
def test_any_number_of_shares(splits):
    inputs = tensors(batch=1, keys=3333)
    call = torch.compile(lambda *t: attend(*t, short_queries="decode", splits=splits))
    assert_attention(call(*inputs), *inputs)


def test_a_growing_cache_compiles_once():
    """One token after the other: slices of a cache of fixed size, and tensors of their own."""
    graphs = []

    def count(module, inputs, **keywords):
        from torch._inductor.compile_fx import compile_fx

        graphs.append(module)
        return compile_fx(module, inputs, **keywords)

    for own in (False, True):
        torch.compiler.reset()
        graphs.clear()
        call = torch.compile(attend, dynamic=True, fullgraph=True, backend=count)
        query, cache_k, cache_v = tensors(keys=2048)
        for length in (*range(900, 910), 1024, 2047, 63):
            key, value = cache_k[:, :, :length], cache_v[:, :, :length]
            if own:
                key, value = key.contiguous(), value.contiguous()
            assert_attention(call(query, key, value), query, key, value)
        assert len(graphs) == 1


def test_queries_of_any_length_compile_once_on_each_side_of_the_limit():
    graphs = []

    def count(module, inputs, **keywords):
        from torch._inductor.compile_fx import compile_fx

        graphs.append(module)
        return compile_fx(module, inputs, **keywords)

    call = torch.compile(attend, dynamic=True, fullgraph=True, backend=count)
    for queries in (8, 3, 21, 5, 300, 200, 7):  # times 6 heads: up to 126 rows, and above
        inputs = tensors(queries=queries)
        assert_attention(call(*inputs), *inputs)
    assert len(graphs) == 2


def steps(kind: str, length: int):
    """The mask_mod of a whole sequence, and which keys each query sees."""
    ids = (torch.arange(length, device="cuda") // 300).int()
    table = {
        "causal": causal,
        "window": lambda b, h, q, k: (q >= k) & (q - k < 200),
        "document": lambda b, h, q, k: (q >= k) & (ids[q] == ids[k]),
    }
    mod = table[kind]
    index = torch.arange(length, device="cuda")
    zero = torch.zeros((), dtype=torch.int64, device="cuda")
    return mod, mod(zero, zero, index[:, None], index[None, :])


@pytest.mark.parametrize("kind", ["causal", "window", "document"])
@pytest.mark.parametrize("with_alibi", [False, True])
def test_masks_sliced_per_step_in_a_replayed_graph(kind, with_alibi):
    """One graph is captured; position and query are written between replays."""
    length = 1024
    mod, visible = steps(kind, length)
    whole = flexhop.create_block_mask(mod, None, None, length, length, "cuda")
    query, key, value = tensors(keys=length)
    position = torch.zeros(1, dtype=torch.int64, device="cuda")
    slopes = torch.rand(12, device="cuda")

    def step(query, key, value, position):
        mask = whole[:, :, position // 128]
        mask.seq_lengths = (1, length)
        mask.mask_mod = lambda b, h, q, k: mod(b, h, q + position[0], k)
        alibi = lambda s, b, h, q, k: s + slopes[h] * (k - q - position[0])  # noqa: E731
        return attend(query, key, value, alibi if with_alibi else None, mask)

    call = torch.compile(step, fullgraph=True)
    with torch.no_grad():
        graph, (out, aux) = capture(call, query, key, value, position)
    for at in (0, 1, 127, 128, 500, 1023):
        position.fill_(at)
        query.copy_(torch.randn_like(query))
        graph.replay()
        expected = lambda s, b, h, q, k: s + slopes[h] * (k - q - at)  # noqa: B023, E731
        assert_attention(
            (out, aux), query, key, value, visible[at : at + 1],
            expected if with_alibi else None,
        )  # fmt: skip


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_a_call_neither_waits_nor_reserves_memory():
    inputs = tensors(batch=1, keys=4000)
    call = torch.compile(attend, fullgraph=True)
    with torch.no_grad():
        call(*inputs)
        torch.cuda.synchronize()
        before = torch.cuda.memory_reserved()
        try:
            torch.cuda.set_sync_debug_mode("error")
            for _ in range(3):
                call(*inputs)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_reserved() == before


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune-no-cudagraphs"])
def test_modes(mode):
    call = torch.compile(attend, mode=mode, fullgraph=True)
    for _ in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        inputs = tensors(keys=3000)
        with torch.no_grad():
            found = call(*inputs)
        assert_attention(found, *inputs)


def test_gradients_of_a_short_query():
    inputs = [tensor.requires_grad_() for tensor in tensors(queries=4, dtype=torch.float32)]
    out, _ = torch.compile(attend, fullgraph=True)(*inputs)
    grads = torch.autograd.grad(out.square().sum(), inputs)
    wide = [tensor.detach().double().requires_grad_() for tensor in inputs]
    every = torch.ones(1, 1, dtype=torch.bool, device="cuda")
    gold = dense_attention(*wide, None, every, 0.125)
    dense_backward(gold, 2 * gold.out, None)
    for found, exact in zip(grads, wide, strict=True):
        torch.testing.assert_close(found.double(), exact.grad, atol=1e-4, rtol=1e-4)


def test_the_decode_kernel_and_the_forward_kernel_agree():
    for queries, keys in itertools.product((1, 9), (100, 5000)):
        inputs = tensors(queries=queries, keys=keys)
        found = [
            torch.compile(lambda *t, kind=kind: attend(*t, short_queries=kind))(*inputs)
            for kind in ("decode", "forward")
        ]
        torch.testing.assert_close(found[0][0], found[1][0], atol=1e-2, rtol=1e-2)
        torch.testing.assert_close(found[0][1].lse, found[1][1].lse, atol=1e-4, rtol=1e-4)


def test_options_reach_the_kernel():
    inputs = tensors(keys=3000)
    options = KernelOptions(short_queries="decode", splits=7).to_wire()
    found = torch.compile(lambda *t: attend(*t, **options))(*inputs)
    assert_attention(found, *inputs)
