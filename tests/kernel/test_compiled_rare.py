"""Calls of which some kernel did not compile once, found by random problems."""

from __future__ import annotations

import re
from functools import partial

import pytest
import torch

import flexhop
from flexhop.compat.offline.fake_gpu import GPUS
from flexhop.masks import causal
from flexhop.mods import dequantize
from flexhop.offline import Generated, generate_code
from flexhop.offline.cubin import compile_kernel, local_accesses
from tests.needs import needs_hopper

BF16 = torch.bfloat16


def operands(*shape: int, learned: str = "", dtype: torch.dtype = BF16) -> list[torch.Tensor]:
    """Query, key and value; those that `learned` names need a gradient."""
    return [torch.zeros(shape, dtype=dtype, requires_grad=name in learned) for name in "qkv"]


def compiled(generated: Generated) -> int:
    """How many kernels of ours there are; each compiles for Hopper GPUs."""
    cubins = [compile_kernel(kernel, 90) for kernel in generated.templates]
    assert all(cubin.registers for cubin in cubins)
    return len(cubins)


def hopper_call(query, key, value, *captured):
    table = captured[0] if captured else None

    def score_mod(score, b, h, q_idx, kv_idx):
        return score if table is None else score + table[h, q_idx] * table[h, kv_idx]

    return flexhop.flex_attention(
        query, key, value, score_mod, kernel_options=flexhop.KernelOptions(backend="hopper")
    )


@needs_hopper
@pytest.mark.parametrize("learned", ["q", "k", "v", "qv"])
def test_some_gradients_of_the_hopper_kernel_are_not_asked_for(learned):
    generated = generate_code(hopper_call, *operands(1, 2, 256, 64, learned=learned), grad=True)
    generated.kernel_with("differentiate")


@needs_hopper
def test_no_gradient_but_of_a_captured_tensor_is_asked_for():
    table = torch.zeros(2, 256, requires_grad=True)
    generated = generate_code(hopper_call, *operands(1, 2, 256, 64), table, grad=True)
    generated.kernel_with("differentiate")


@needs_hopper
def test_lse_alone_is_asked_of_the_hopper_kernel():
    def lse_of(query, key, value):
        _, aux = flexhop.flex_attention(
            query, key, value, return_aux=flexhop.AuxRequest(lse=True),
            kernel_options=flexhop.KernelOptions(backend="hopper"),
        )  # fmt: skip
        return aux.lse

    generate_code(lse_of, *operands(1, 2, 256, 64)).kernel_with("consume")


def test_a_score_without_dimensions_in_a_branch():
    """Reads of a table by both positions stand in a branch, whose two sides must be alike."""
    table = torch.zeros(2, 299, requires_grad=True)

    def call(query, key, value, table):
        def score_mod(score, b, h, q_idx, kv_idx):
            return torch.zeros_like(score) + table[h, q_idx - kv_idx + 149]

        options = flexhop.KernelOptions(backend="triton")
        return flexhop.flex_attention(query, key, value, score_mod, kernel_options=options)

    generated = generate_code(call, *operands(1, 2, 150, 32, learned="qkv"), table, grad=True)
    assert compiled(generated) == 3


def test_a_score_of_keys_alone_with_dropout():
    def call(query, key, value):
        return flexhop.flex_attention(
            query, key, value, lambda s, b, h, q, k: (k % 7) * 0.3, dropout_p=0.1,
            dropout_seed=torch.zeros(2, dtype=torch.int64),
        )  # fmt: skip

    assert compiled(generate_code(call, *operands(1, 2, 70, 32))) == 1


def test_a_score_that_is_a_number_under_a_mask_that_reads_by_distance():
    """Weights have the layout of an operand, which a branch around the mask could not give."""
    near = torch.arange(-299, 300) % 5 > 0

    def mask_mod(b, h, q_idx, kv_idx):
        return near[q_idx - kv_idx + 299] & ((h % 2 == 0) | (kv_idx % 3 == 0))

    mask = flexhop.create_block_mask(mask_mod, None, 14, 1, 200, "cpu")

    def call(query, key, value):
        return flexhop.flex_attention(
            query, key, value, lambda s, b, h, q, k: torch.zeros_like(s), mask, scale=1.0,
            enable_gqa=True, dropout_p=0.5, dropout_seed=torch.zeros(2, dtype=torch.int64),
            kernel_options=flexhop.KernelOptions(short_queries="forward"),
        )  # fmt: skip

    query = torch.zeros(2, 14, 1, 48, dtype=torch.bfloat16)
    key, value = (torch.zeros(2, 2, 200, 48, dtype=torch.bfloat16) for _ in range(2))
    assert compiled(generate_code(call, query, key, value)) >= 1


def test_a_captured_size_that_is_known_by_now():
    """A difference of two lengths that are one and the same is a number, not a symbol."""

    def call(query, key, value):
        offset = key.size(2) - query.size(2)

        def score_mod(score, b, h, q_idx, kv_idx):
            return score - (q_idx + offset - kv_idx).abs()

        return flexhop.flex_attention(query, key, value, score_mod)

    assert compiled(generate_code(call, *operands(3, 2, 70, 32), dynamic=True)) == 1


def test_a_page_table_of_which_a_size_is_known_by_now():
    table = flexhop.PageTable(
        torch.zeros(2, 24, dtype=torch.int32), 8, torch.full((2,), 192, dtype=torch.int32)
    )
    query = torch.zeros(2, 8, 130, 64)
    key = torch.zeros(48, 4, 8, 64, dtype=torch.float8_e5m2)
    mask = flexhop.create_block_mask(causal, None, None, 130, 192, "cpu", BLOCK_SIZE=64)
    scale = torch.ones(2, 4, 192)

    def call(query, key, value):
        return flexhop.flex_attention(
            query,
            key,
            value,
            block_mask=mask,
            page_table=table,
            k_mod=dequantize(scale),
            enable_gqa=True,
        )

    generated = generate_code(call, query, key, torch.zeros(48, 4, 8, 24), dynamic=True)
    compile_kernel(generated.kernel_with("key_mod"), 90)


@pytest.mark.parametrize("queries", [1, 130])
def test_numbers_of_eight_bits_without_a_mod(queries):
    query = torch.zeros(2, 8, queries, 64, dtype=BF16)
    key = torch.zeros(2, 8, 500, 64, dtype=torch.float8_e4m3fn)
    generated = generate_code(
        flexhop.flex_attention, query, key, torch.zeros(2, 8, 500, 64, dtype=BF16)
    )
    assert compiled(generated) >= 1


@needs_hopper
def test_fewer_keys_than_a_tile_of_the_hopper_kernel():
    query, key, value = operands(1, 2, 53, 64)
    slopes = torch.zeros(53)
    options = flexhop.KernelOptions(backend="hopper")

    def call(query, key, value):
        def score_mod(score, b, h, q_idx, kv_idx):
            return score - slopes[kv_idx] * (q_idx - kv_idx).abs()

        return flexhop.flex_attention(query, key, value, score_mod, kernel_options=options)

    assert compiled(generate_code(call, query, key, value)) == 1


def test_a_page_table_whose_pages_have_a_size_that_depends_on_another():
    """A cache in one piece: under dynamic shapes a page's size is a quotient of symbols."""
    table = flexhop.PageTable(torch.zeros(2, 1, dtype=torch.int32), 17, torch.full((2,), 17).int())
    cache = torch.zeros(1, 6, 5 * 17, 72, dtype=torch.int8)
    mod = dequantize(torch.ones(6))

    def call(query, key, value):
        return flexhop.flex_attention(query, key, value, page_table=table, k_mod=mod, v_mod=mod)

    generated = generate_code(call, torch.zeros(2, 6, 1, 72), cache, cache.clone(), dynamic=True)
    generated.kernel_with("attend_share")


@pytest.mark.parametrize(
    ("dtype", "reads_score", "function"),
    [(torch.float32, True, "grad_query_blocks"), (BF16, False, "attend_tile")],
)
def test_a_mask_and_a_score_that_read_tables_by_both_positions(dtype, reads_score, function):
    """Triton fails on branches with such reads, if an operand of a product follows at once."""
    kept, table = torch.ones(70, 70, dtype=torch.bool), torch.zeros(70)
    mask = flexhop.create_block_mask(
        lambda b, h, q, k: kept[k, q] & (q >= k), None, None, 70, 70, "cpu", BLOCK_SIZE=64
    )

    def score_mod(score, b, h, q_idx, kv_idx):
        if reads_score:
            return torch.clamp(score, -4.0, 4.0)
        return table[q_idx] * table[(q_idx - kv_idx).abs()]

    options = flexhop.KernelOptions(backend="triton", float32_precision="ieee")
    call = partial(
        flexhop.flex_attention, score_mod=score_mod, block_mask=mask, kernel_options=options
    )
    inputs = operands(1, 2, 70, 32, learned="qkv" if reads_score else "", dtype=dtype)
    generated = generate_code(call, *inputs, grad=reads_score)
    assert compile_kernel(generated.kernel_with(function), 90).registers


def by_key(score, b, h, q_idx, kv_idx):
    return (kv_idx % 7) * 0.3


def by_distance(score, b, h, q_idx, kv_idx):
    return (q_idx - kv_idx).abs() * -0.1


@pytest.mark.parametrize("score_mod", [by_key, by_distance])
@pytest.mark.parametrize(("architecture", "width"), [(80, 64), (90, 32)])
def test_a_score_mod_that_ignores_the_score_costs_what_others_do(architecture, width, score_mod):
    """Its weights were spread over threads as an operand: three to six times the instructions."""
    options = flexhop.KernelOptions(backend="triton")

    def longest(score_mod):
        call = partial(flexhop.flex_attention, score_mod=score_mod, kernel_options=options)
        inputs = operands(1, 2, 512, width, dtype=BF16)
        generated = generate_code(call, *inputs, capability=divmod(architecture, 10))
        kernel = compile_kernel(generated.kernel_with("attend_tile"), architecture)
        return max(loop.count(";") for loop in kernel.loops())

    own, added = longest(score_mod), longest(lambda s, *at: s + score_mod(s, *at))
    assert own <= 1.1 * added


def test_fp64_reads_a_table_of_changing_length():
    def call(query, key, table):
        def score_mod(score, b, h, q_idx, kv_idx):
            return score + table[h, kv_idx - q_idx]

        return flexhop.flex_attention(query, key, key, score_mod=score_mod)

    shapes = ((1, 2, 1, 16), (1, 2, 90, 16), (2, 90))
    operands = (torch.randn(shape, dtype=torch.float64) for shape in shapes)
    assert generate_code(call, *operands, dynamic=True).kernels


def test_fp64_reads_8_bit_floats():
    query = torch.randn(1, 2, 3, 16, dtype=torch.float64)
    cache = torch.randn(1, 2, 40, 16).to(torch.float8_e4m3fn)

    def call(query, cache):
        def decode(x, b, h, kv_idx):
            return x * 0.5

        return flexhop.flex_attention(query, cache, cache, k_mod=decode, v_mod=decode)

    for kernel in generate_code(call, query, cache).kernels:
        compile_kernel(kernel, 90, dict.fromkeys(kernel.constexprs, 16))


def test_the_kernels_of_forward_and_backward_find_the_same_scores_in_fp32():
    """Triton would begin the products of forward alone with what a mod adds to them."""

    def call(query, key, value):
        def steep(score, b, h, q_idx, kv_idx):
            return (score + 0.05 * (q_idx - kv_idx)) ** 3

        return flexhop.flex_attention(query, key, value, steep, scale=1.0)

    inputs = operands(1, 2, 70, 32, learned="qkv", dtype=torch.float32)
    generated = generate_code(call, *inputs, grad=True)
    for kernel in generated.templates:
        added_last = re.compile(r"fma\.rn\.f32\s+%\w+, %\w+, 0f3D4CCCCD")  # 0.05
        assert added_last.search(compile_kernel(kernel, 90).ptx)


@pytest.mark.parametrize("architecture", [80, 90])
def test_exact_gradients_of_256_columns_spill_little(architecture):
    """Both lists' steps had 7,600 and 8,200 accesses of local memory with four warps."""
    mask = flexhop.create_block_mask(causal, None, None, 256, 256, "cpu")
    call = partial(flexhop.flex_attention, block_mask=mask)
    inputs = operands(1, 1, 256, 256, learned="qkv", dtype=torch.float32)
    generated = generate_code(call, *inputs, grad=True, capability=divmod(architecture, 10))
    kernel = generated.kernel_with("grad_key_value_blocks")
    loops = compile_kernel(kernel, architecture).loops()
    assert len(loops) == 2
    assert sum(map(local_accesses, loops)) < 500


def test_masks_that_look_pairs_up_fit_shared_memory():
    """What they read is loaded ahead like keys and values, here 16 bytes per score."""
    tables = torch.randint(0, 4, (2, 128, 128))

    def seen(b, h, q_idx, kv_idx):
        return (tables[0, q_idx, kv_idx] > 0) & (tables[1, kv_idx, q_idx] > 1)

    mask = flexhop.create_block_mask(seen, None, None, 128, 128, "cpu")
    options = flexhop.KernelOptions(backend="triton")
    call = partial(flexhop.flex_attention, block_mask=mask, kernel_options=options)
    tensors = operands(1, 1, 128, 256, learned="k")
    generated = generate_code(call, *tensors, grad=True, capability=(9, 0))
    kernel = generated.kernel_with("grad_key_value_blocks")
    assert compile_kernel(kernel, 90).shared <= GPUS[9, 0].shared_memory


def test_few_queries_whose_mask_looks_pairs_up_fit_shared_memory():
    numbers = torch.randint(0, 3, (31, 129))

    def seen(b, h, q_idx, kv_idx):
        return numbers[q_idx, kv_idx] != 0

    mask = flexhop.create_block_mask(seen, None, None, 31, 129, "cpu", BLOCK_SIZE=(32, 128))
    call = partial(flexhop.flex_attention, block_mask=mask, enable_gqa=True)
    shapes = ((1, 6, 31, 64), (1, 2, 129, 64), (1, 2, 129, 32))
    tensors = (torch.randn(shape, dtype=torch.bfloat16) for shape in shapes)
    kernel = generate_code(call, *tensors, capability=(9, 0)).kernel_with("attend_share")
    assert compile_kernel(kernel, 90).shared <= GPUS[9, 0].shared_memory


def test_score_mods_without_scores_that_look_pairs_up_fit_shared_memory():
    """As they are in no branch, what they read is loaded ahead: 196,608 bytes were needed."""
    tables = torch.randn(4, 130, 136)

    def score_mod(score, b, h, q_idx, kv_idx):
        first, second, third, fourth = (table[q_idx, kv_idx] for table in tables)
        return torch.where(q_idx > kv_idx, first * second, third * fourth)

    tensors = operands(1, 1, 130, 128)
    generated = generate_code(flexhop.flex_attention, *tensors, score_mod, capability=(12, 0))
    kernel = generated.kernel_with("attend_blocks")
    assert compile_kernel(kernel, 120).shared <= GPUS[12, 0].shared_memory
