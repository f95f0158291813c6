"""Tiles of the Hopper forward kernel for mask blocks of fewer than 128 tokens."""

from __future__ import annotations

import itertools

import pytest

from flexhop.lowering.hopper import backward, forward, tiles
from flexhop.lowering.hopper.tiles import Gathered
from flexhop.lowering.mods.bands import Band
from flexhop.lowering.portable.tiles import table_tile
from flexhop.lowering.problem import MaskBlocks, Problem
from flexhop.options import KernelOptions, Tile
from tests.needs import needs_hopper
from tests.problems import problem

AUTO = KernelOptions()


def small(q_size: int, kv_size: int, group: int = 1, per_head: bool = False, **facts) -> Problem:
    """A call with 128 columns and 8 query heads."""
    blocks = MaskBlocks(q_size, kv_size, True, per_head=per_head)
    widths = {"head_dim": 128, "value_head_dim": 128}
    return problem(blocks=blocks, kv_heads=8 // group, **widths | facts)


# Sizes of a block, query heads per key head, and what follows: queries, keys and heads of a tile,
# tiles of a program, and the blocks of keys and queries that a tile holds.
TILES = {
    (128, 128, 1): (128, 128, 1, 1, Gathered(1, 1)),
    (128, 64, 4): (128, 128, 1, 1, Gathered(2, 1)),
    (64, 128, 1): (64, 64, 1, 2, Gathered(1, 1)),
    (64, 64, 1): (64, 64, 1, 2, Gathered(1, 1)),
    (192, 64, 1): (64, 64, 1, 2, Gathered(1, 1)),
    (32, 32, 1): (64, 64, 1, 2, Gathered(2, 2)),
    (16, 64, 1): (64, 64, 1, 2, Gathered(1, 4)),
    (64, 64, 2): (64, 128, 2, 1, Gathered(2, 1)),
    (32, 32, 2): (32, 64, 2, 2, Gathered(2, 1)),
    (32, 32, 4): (32, 128, 4, 1, Gathered(4, 1)),
    (16, 16, 2): (64, 128, 2, 1, Gathered(8, 4)),
    (16, 16, 8): (16, 128, 8, 1, Gathered(8, 1)),
}


@needs_hopper
@pytest.mark.parametrize("case", TILES)
def test_tiles_hold_blocks(case):
    call = small(*case)
    tile = tiles.table_tile(call)
    held = (tile.block_m, tile.block_n, tile.heads, tile.num_tiles, tiles.gathers(call, tile))
    assert held == TILES[case]
    assert list(forward.obstacles(call, AUTO)) == []


@pytest.mark.parametrize("facts", [{"per_head": True}, {"mask_uses_head": True}])
def test_heads_with_masks_of_their_own_share_no_tile(facts):
    tile = tiles.table_tile(small(32, 32, 8, **facts))
    assert (tile.heads, tile.num_tiles) == (1, 2)


@pytest.mark.parametrize("width", [48, 64, 80, 128, 192, 256])
@pytest.mark.parametrize("sides", [(64, 64), (32, 16), (16, 256), (128, 32)])
def test_tiles_fit_in_shared_memory(width, sides):
    for value_width, group in itertools.product((64, 128, 256), (1, 2, 8)):
        call = small(*sides, group, head_dim=width, value_head_dim=value_width)
        tile = tiles.table_tile(call)
        assert tiles.shared_memory(call, tile) <= call.device.shared_memory
        assert tile.num_slots >= 2


def test_what_needs_neighbouring_keys_is_off_in_gathered_tiles():
    facts = {"has_score_mod": True, "has_key_slope": True, "has_mask_mod": True}
    lines = {True: small(64, 64, **facts), False: small(32, 32, **facts)}
    for kept, call in lines.items():
        assert forward.constants(call, AUTO, tiles.table_tile(call)).HAS_SLOPE == kept
    for size, kept in ((64, True), (32, False)):
        call = small(64, size, mask_band=Band(-9, 9), has_mask_mod=True)
        found = forward.constants(call, AUTO, tiles.table_tile(call))
        assert (found.HAS_BAND, found.HAS_SPANS) == (kept, kept)


def test_rows_of_several_blocks_may_see_nothing_in_a_tile():
    safe = KernelOptions(rows_guaranteed_safe=True)
    for size, kept in ((64, True), (32, False)):
        call = small(size, 64)
        assert forward.constants(call, safe, tiles.table_tile(call)).ROWS_GUARANTEED_SAFE == kept


@pytest.mark.parametrize(
    ("facts", "heads"),
    [
        ({}, 1),
        ({"has_mask_mod": True, "mask_reads_per_element": True}, 1),
        ({"has_mask_mod": True, "mask_reads": True}, 16),
        ({"has_mask_mod": True, "mask_band": Band(-9, 9)}, 16),
        ({"is_deterministic": True}, 16),
    ],
)
def test_heads_of_scattered_blocks_take_turns_in_the_cache(facts, heads):
    """In the backward kernel, for blocks of any size."""
    call = small(128, 128, query_len=16384, key_len=16384, batch=4, **facts)
    constants = backward.constants(call, backward.table_tile(call))
    assert constants.HEADS_PER_SECTION == heads


def test_portable_gradients_of_small_blocks_have_few_warps():
    table = {"has_mask_mod": True, "mask_reads_per_element": True}
    expected = {
        (16, "grad_query"): Tile(16, 16, 1, 3),
        (16, "grad_key_value"): Tile(16, 16, 1, 2),
        (32, "grad_query"): Tile(32, 32, 2, 3),
        (32, "grad_key_value"): Tile(32, 32, 2, 2),
        (64, "grad_query"): Tile(64, 64, 4, 2),
    }
    found = {key: table_tile(key[1], small(key[0], key[0], **table)) for key in expected}
    assert found == expected
    others = [small(32, 32, has_score_mod=True), small(32, 32, is_key_multiple=lambda n: n < 9)]
    assert [table_tile("grad_query", call) for call in others] == [Tile(128, 64, 8, 3)] * 2


def test_words_of_small_tiles():
    words = [tiles.table_tile(small(32, 32, group)).words() for group in (1, 4)]
    assert words == [
        "2 tiles of 64 queries x 64 keys, 10 warps (2 loads), 3 slots",
        "32 queries of 4 heads x 128 keys, 9 warps (1 loads), 3 slots",
    ]


@pytest.mark.parametrize(
    ("cost", "by_head", "keys"), [(30.0, True, 64), (16.0, True, 128), (30.0, False, 128)]
)
def test_a_long_mask_that_is_asked_has_short_steps(cost, by_head, keys):
    call = problem(
        head_dim=128, query_len=8192, blocks=MaskBlocks(128, 128, True, kv_columns=8),
        has_mask_mod=True, mask_cost=cost, mask_uses_head=by_head,
    )  # fmt: skip
    assert tiles.table_tile(call).block_n == keys
