"""Which constants a problem gives: pure functions, no compiler."""

import dataclasses
import math

import pytest
import torch

from flexhop.errors import TileError, TileResourceError
from flexhop.lowering.hopper import backward as hopper_grad
from flexhop.lowering.portable import kernels, splits
from flexhop.lowering.portable.tiles import table_tile
from flexhop.lowering.problem import Cache, MaskBlocks, head_pieces, round_head_dim
from flexhop.options import KernelOptions, Tile
from tests.problems import ALL_KERNELS, device, launched_kernels, problem, usual_problem

PLAIN = KernelOptions()
SQUARE = Tile(64, 64)


def constants(kernel="forward", tile=SQUARE, options=PLAIN, **facts):
    return kernels.constants(kernel, problem(**facts), options, tile)


@pytest.mark.parametrize(("size", "rounded"), [(1, 16), (16, 16), (17, 32), (94, 128), (512, 512)])
def test_head_dims_round_to_powers_of_two(size, rounded):
    assert round_head_dim(size) == rounded


@pytest.mark.parametrize(
    ("size", "pieces"),
    [(1, (16, 0)), (17, (32, 0)), (64, (64, 0)), (80, (64, 16)), (96, (64, 32)), (97, (128, 0)),
     (192, (128, 64)), (300, (256, 64)), (513, (512, 16)), (576, (512, 64))],
)  # fmt: skip
def test_pieces_of_a_head(size, pieces):
    assert head_pieces(size) == pieces


@pytest.mark.parametrize(
    ("dims", "is_view", "once"),
    [((576, 512), True, True), ((576, 512), False, False), ((576, 576), True, True),
     ((576, 520), True, False), ((576, 256), True, False)],
)  # fmt: skip
def test_values_that_are_the_first_piece_of_keys_are_read_once(dims, is_view, once):
    call = {"head_dim": dims[0], "value_head_dim": dims[1], "value_is_key": is_view}
    found = constants("decode", **call)
    assert found["VALUE_IS_KEY"] == once
    assert (found["QK_FIRST"], found["QK_REST"]) == (512, 64)
    plain = Cache(0, torch.bfloat16, torch.bfloat16)
    assert constants("decode", cache=plain, **call)["VALUE_IS_KEY"] == once
    changed = dataclasses.replace(plain, has_value_mod=True)
    assert not constants("decode", cache=changed, **call)["VALUE_IS_KEY"]


def test_heads_in_pieces_take_any_number_of_queries():
    """All heads of a group share tiles, and prompts are not divided."""
    for queries, heads, shares in ((1, 128, True), (4096, 128, False), (5000, 16, False)):
        call = problem(
            head_dim=576, query_len=queries, query_heads=heads, kv_heads=1, key_len=8192
        )
        assert kernels.forward_kernel(call, PLAIN) == "decode"
        assert (kernels.num_splits(call, PLAIN) > 1) == shares
        assert kernels.num_splits(call, KernelOptions(short_queries="forward")) == 1
    assert splits.row_tiles(call, 64) == 40 * 2 * 16  # blocks of 128 queries of each head


def test_scale_is_folded_into_the_exponent_without_a_score_mod():
    found = constants(scale=0.5)
    assert not found["SCALE_SCORES"]
    assert found["EXP_SCALE"] == 0.5 * math.log2(math.e)


@pytest.mark.parametrize("facts", [{"has_score_mod": True}, {"scale": -0.5}, {"scale": 0.0}])
def test_scores_are_scaled_where_somebody_looks_or_the_sign_matters(facts):
    found = constants(**facts)
    assert found["SCALE_SCORES"]
    assert found["EXP_SCALE"] == math.log2(math.e)


def test_prescaling_replaces_both():
    found = constants(options=KernelOptions(prescale_qk=True), has_score_mod=True)
    assert found["PRESCALE_QK"] and not found["SCALE_SCORES"]
    assert found["EXP_SCALE"] == math.log2(math.e)


def test_prescaling_is_of_half_precision():
    """In fp32 it would only change how scores are rounded."""
    exact = constants(options=KernelOptions(prescale_qk=True), dtype=torch.float32)
    assert not exact["PRESCALE_QK"] and exact["SCALE_SCORES"]


def test_float32_precision_is_quoted_source(monkeypatch):
    assert (
        constants(options=KernelOptions(float32_precision="tf32"))["FLOAT32_PRECISION"] == "'tf32'"
    )
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "highest")
    assert constants()["FLOAT32_PRECISION"] == "'ieee'"
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "high")
    assert constants()["FLOAT32_PRECISION"] == "'tf32'"


def test_lengths_known_to_be_multiples_need_no_checks():
    assert not constants()["CHECK_Q"]
    found = constants(is_query_multiple=lambda n: False)
    assert found["CHECK_Q"] and not found["CHECK_KV"]


def test_blocks_that_tiles_do_not_divide_are_checked():
    found = constants(
        tile=Tile(16, 16), blocks=MaskBlocks(20, 48, has_full=True), has_mask_mod=True
    )
    assert found["CHECK_Q"]
    assert (found["TILES_PER_Q_BLOCK"], found["TILES_PER_KV_BLOCK"]) == (2, 3)
    assert found["HAS_FULL_BLOCKS"]


def test_without_blocks_a_tile_is_a_block():
    found = constants(tile=Tile(64, 32))
    assert not found["HAS_BLOCKS"]
    assert (found["SPARSE_Q_BLOCK_SIZE"], found["SPARSE_KV_BLOCK_SIZE"]) == (64, 32)


def test_large_outputs_have_wide_offsets():
    assert constants()["OFFSET_DTYPE"] == "tl.int32"
    assert constants(large_output=True)["OFFSET_DTYPE"] == "tl.int64"


def test_groups():
    found = constants(query_heads=12, kv_heads=2)
    assert (found["Q_HEADS"], found["GQA_GROUP"]) == (12, 6)


@pytest.mark.parametrize(
    ("tokens", "heads"), [(128, 200), (512, 50), (1024, 25), (4096, 8), (16384, 6)]
)
def test_sections_have_an_eighth_of_the_cache_or_a_few_heads_in_half_of_it(tokens, heads):
    """A key head of 128 tokens has 32 KiB of keys and values."""
    call = problem(batch=64, query_len=tokens, key_len=tokens)
    assert kernels.heads_per_section(call) == heads


def test_sections_hold_whole_groups():
    small = problem(query_heads=8, kv_heads=2, query_len=128, key_len=128)
    assert kernels.constants("forward", small, PLAIN, Tile(64, 64))["HEADS_PER_SECTION"] == 16
    long = problem(query_heads=8, kv_heads=2, key_len=1 << 20)
    assert kernels.constants("forward", long, PLAIN, Tile(64, 64))["HEADS_PER_SECTION"] == 4


def test_sections_of_packed_sequences_hold_many_heads():
    ranges = MaskBlocks(128, 128, has_full=True, has_ranges=True)
    facts = {"query_heads": 48, "kv_heads": 48, "query_len": 1 << 20, "key_len": 1 << 20}
    packed = problem(batch=1, blocks=ranges, **facts)
    assert kernels.heads_per_section(packed) == 16
    assert hopper_grad.constants(packed, hopper_grad.table_tile(packed)).HEADS_PER_SECTION == 16
    batch = problem(batch=2, blocks=ranges, **facts)
    assert kernels.heads_per_section(batch) == 1


@pytest.mark.parametrize("kernel", ALL_KERNELS)
def test_a_users_tile_is_taken_and_filled(kernel):
    field = kernels.option_of(kernel)
    options = KernelOptions(**{field: Tile(32, 16, num_warps=8, num_stages=1)})
    (tile,) = kernels.choose_tiles(kernel, usual_problem(kernel), options, search=True)
    assert tile == Tile(32, 16, num_warps=8, num_stages=1)


def test_a_triton_that_needs_more_registers_has_tiles_of_its_own():
    call = problem(90, 256)
    wide, narrow = (
        table_tile("grad_query", dataclasses.replace(call, device=compiled))
        for compiled in (dataclasses.replace(call.device, triton=(3, n)) for n in (8, 9))
    )
    assert wide.block_m * wide.block_n > narrow.block_m * narrow.block_n


def test_a_users_tile_must_divide_the_blocks():
    blocks = problem(blocks=MaskBlocks(96, 128, has_full=False))
    with pytest.raises(TileError, match="must be divisible by the selected tile sizes") as caught:
        kernels.choose_tiles("forward", blocks, KernelOptions(forward=Tile(64, 64)), search=False)
    assert (caught.value.facts["block_m"], caught.value.facts["q_block"]) == (64, 96)


def test_a_users_tile_must_fit_the_device():
    options = KernelOptions(forward=Tile(256, 256, num_warps=8, num_stages=4))
    with pytest.raises(TileResourceError) as caught:
        kernels.choose_tiles("forward", problem(86, 256), options, search=False)
    assert (
        caught.value.facts["needed"] > caught.value.facts["available"] == device(86).shared_memory
    )


@pytest.mark.parametrize("kernel", ALL_KERNELS)
def test_constants_are_the_dataclass(kernel):
    found = constants(kernel)
    assert found["BLOCK_M"] == found["BLOCK_N"] == 64
    assert all(name.isupper() for name in found)


def test_problems_of_equal_facts_are_equal():
    first, second = problem(), problem()
    assert first == second, "the two predicates must not count"
    assert first != dataclasses.replace(first, batch=3)


def test_a_backward_pass_has_all_gradients():
    for width in (16, 64, 128, 256, 512, 576):
        names = launched_kernels(problem(head_dim=width))
        assert names[:2] == ("decode" if width > 512 else "forward", "grad_query")
        assert set(names[2:]) in ({"grad_key_value"}, {"grad_key", "grad_value"})
