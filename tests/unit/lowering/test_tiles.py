"""Tiles: tables, the ladder, and the proof that something always fits (its pure part)."""

import itertools

import pytest
import torch

from flexhop.lowering.dialect import plan
from flexhop.lowering.portable import kernels
from flexhop.lowering.portable.special_tiles import search_tiles
from flexhop.lowering.portable.tiles import RULES, smaller_tiles, table_rule, table_tile
from flexhop.lowering.problem import MaskBlocks
from flexhop.offline.cubin import ARCHITECTURES
from flexhop.options import KernelOptions, Tile
from tests.problems import ALL_KERNELS, launched_kernels, problem, usual_problem

WIDTHS = ((1, 1), (16, 16), (64, 64), (80, 80), (128, 128), (192, 192), (256, 256), (512, 512),
          (192, 128), (576 - 64, 64), (64, 512), (24, 94), (576, 512), (576, 576),
          (80, 520))  # fmt: skip
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
BLOCKS = (None, MaskBlocks(128, 128, True), MaskBlocks(16, 256, True), MaskBlocks(20, 96, False))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_estimate_of_every_choice_fits_the_device(architecture):
    count = 0
    for (width, value_width), dtype, blocks, search in itertools.product(
        WIDTHS, DTYPES, BLOCKS, (False, True)
    ):
        call = problem(architecture, width, value_head_dim=value_width, dtype=dtype, blocks=blocks)
        for kernel in launched_kernels(call):
            if not kernels.has_tile(kernel, call):
                # The only calls that no tile serves, and that are computed in chunks.
                assert dtype == torch.float32 and max(width, value_width) > 256, (kernel, width)
                assert call.device.shared_memory < 110_000
                continue
            chosen = kernels.choose_tiles(kernel, call, KernelOptions(), search=search)
            assert chosen
            for tile in chosen:
                needed = kernels.shared_memory(kernel, call, tile)
                assert needed <= call.device.shared_memory, (kernel, width, dtype, blocks, tile)
                count += 1
    assert count > 750


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("kernel", ALL_KERNELS)
def test_the_last_step_of_the_ladder_fits_the_widest_problem(architecture, kernel):
    # Tangents stand beside all operands, and have kernels up to 128 columns of fp32.
    width = 128 if kernel.startswith("jvp_") else 512
    widest = problem(architecture, width, dtype=torch.float32)
    *_, last = smaller_tiles(table_tile(kernel, widest))
    assert (last.block_m, last.block_n, last.num_stages) == (16, 16, 1)
    fits = kernels.shared_memory(kernel, widest, last) <= widest.device.shared_memory
    assert fits == kernels.has_tile(kernel, widest)
    assert fits or widest.device.shared_memory < 110_000


def test_reports_name_the_rule_that_gave_a_tile():
    (usual,) = plan("forward", problem(80), KernelOptions())
    assert usual.reason == "table for sm_80, torch.bfloat16, head size 64"
    (drawn,) = plan("forward", problem(80, 128, dropout_p=0.1), KernelOptions())
    assert drawn.reason == "table for sm_80, torch.bfloat16, head size 128, dropout (not measured)"
    assert any(rule.reason == "no mask and no score_mod" and rule.measured for rule in RULES)


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ({}, "few columns"),
        ({"has_mask_mod": True, "mask_cost": 7.0}, "few columns"),
        ({"has_score_mod": True, "has_mask_mod": True, "mask_cost": 8.0}, ""),
        ({"has_score_mod": True, "key_bytes": frozenset({4})}, ""),
        ({"architecture": 80}, ""),
    ],
)
def test_few_columns(facts, reason):
    assert table_rule("forward", problem(head_dim=32, **facts)).reason == reason


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("width", [16, 64, 128, 256])
def test_reads_by_position_are_less_than_one_for_each_thread(architecture, width):
    facts = {"reads_by_position": True, "key_bytes": frozenset({1, 4})}
    call = problem(architecture, width, has_score_mod=True, **facts)
    (forward,) = kernels.choose_tiles("forward", call, KernelOptions(), search=False)
    assert max(forward.block_m, forward.block_n) < 32 * forward.num_warps
    (decode,) = kernels.choose_tiles("decode", call, KernelOptions(), search=False)
    assert decode.block_n < 32 * decode.num_warps


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ({"is_tf32": True}, "TF32"),
        ({}, "exact float32"),
        ({"has_score_mod": True, "reads_per_element": True}, "exact float32, reads per score"),
        (
            {"head_dim": 128, "is_key_multiple": lambda n: n == 1},
            "exact float32, lengths between tiles",
        ),
        ({"dropout_p": 0.1}, ""),
        ({"is_tf32": True, "tangents": ("query",)}, ""),
        ({"dtype": torch.float64}, ""),
    ],
)
def test_float32_has_tiles_by_precision(facts, reason):
    call = problem(90, **{"dtype": torch.float32} | facts)
    assert table_rule("forward", call).reason == reason
    (tile,) = kernels.choose_tiles("forward", call, KernelOptions(), search=False)
    assert kernels.shared_memory("forward", call, tile) <= call.device.shared_memory
    assert table_rule("forward", problem(80, **{"dtype": torch.float32} | facts)).reason == ""


def test_every_kernel_and_width_has_a_usual_tile():
    last = RULES[-1]
    assert not last.reason and last.when(problem(120))
    assert {kernel for kernel, tiles in last.tiles.items() if 256 in tiles} == set(ALL_KERNELS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_kernels_of_heads_in_pieces_have_tiles(architecture, dtype):
    call = problem(architecture, 576, dtype=dtype)
    for kernel in launched_kernels(call):
        assert table_rule(kernel, call).reason == "heads in pieces"


@pytest.mark.parametrize("start", [Tile(128, 128, 8, 3), Tile(16, 64, 4, 2), Tile(16, 16, 4, 1)])
def test_the_ladder_goes_down(start):
    steps = list(smaller_tiles(start))
    assert steps[0] == start
    sizes = [(t.block_m * t.block_n, t.num_stages) for t in steps]
    assert sizes == sorted(sizes, reverse=True)
    assert all(t.block_m >= 16 and t.block_n >= 16 for t in steps)
    assert len(set(steps)) == len(steps)


@pytest.mark.parametrize(
    "blocks", [(128, 128), (64, 128), (32, 64), (16, 16), (20, 96), (256, 256), (8, 48)]
)
@pytest.mark.parametrize("kernel", ALL_KERNELS)
def test_tiles_divide_the_blocks_of_the_mask(kernel, blocks):
    call = usual_problem(kernel, blocks=MaskBlocks(*blocks, has_full=True), has_mask_mod=True)
    for tile in kernels.choose_tiles(kernel, call, KernelOptions(), search=True):
        sides = list(zip((tile.block_m, tile.block_n), blocks, strict=True))
        for side, block in sides[kernel == "decode" :]:  # its rows are of several heads
            assert block % side == 0 or side == 16, (
                "16 is the smallest tile; such blocks are checked"
            )


@pytest.mark.parametrize("kernel", ALL_KERNELS)
def test_tiles_do_not_exceed_the_lengths(kernel):
    (tile,) = kernels.choose_tiles(
        kernel, usual_problem(kernel, query_len=1, key_len=37), KernelOptions(), search=False
    )
    assert tile.block_m == 16 and tile.block_n <= 64


@pytest.mark.parametrize("kernel", ALL_KERNELS)
def test_a_search_starts_from_the_default_and_has_no_doubles(kernel):
    call = usual_problem(kernel)
    (default,) = kernels.choose_tiles(kernel, call, KernelOptions(), search=False)
    found = kernels.choose_tiles(kernel, call, KernelOptions(), search=True)
    assert found[0] == default
    assert len(set(found)) == len(found) <= 1 + len(search_tiles(kernel))
