"""Which calls the decode kernel gets, and into how many shares it divides the keys."""

import pytest
import torch

from flexhop.errors import OptionConflictError
from flexhop.lowering.portable import kernels, splits
from flexhop.lowering.problem import Cache, MaskBlocks
from flexhop.options import KernelOptions, Tile
from tests.problems import problem

PLAIN = KernelOptions()


def step(batch=1, heads=32, kv_heads=8, keys=8192, **facts):
    """One query of every sequence."""
    facts = {"query_len": 1, "head_dim": 128} | facts
    return problem(batch=batch, query_heads=heads, kv_heads=kv_heads, key_len=keys, **facts)


@pytest.mark.parametrize(
    ("queries", "group", "keys", "chosen"),
    [
        (1, 1, 1, True),
        (1, 7, 8192, True),
        (1, 128, 8192, True),
        (1, 129, 8192, False),
        (16, 8, 64, True),
        (16, 9, 8192, False),
        (17, 1, 64, False),  # as many products as reads
        (17, 1, 68, True),
        (128, 1, 512, True),
        (129, 1, 1 << 20, False),
    ],
)
def test_short_queries_with_many_keys_are_decoded(queries, group, keys, chosen):
    call = step(heads=2 * group, kv_heads=2, keys=keys, query_len=queries)
    assert kernels.forward_kernel(call, PLAIN) == ("decode" if chosen else "forward")


def test_a_user_decides():
    call = step()
    assert kernels.forward_kernel(call, KernelOptions(short_queries="forward")) == "forward"
    square = problem(query_len=64, key_len=64)
    assert kernels.forward_kernel(square, PLAIN) == "forward"
    assert kernels.forward_kernel(square, KernelOptions(short_queries="decode")) == "decode"
    with pytest.raises(OptionConflictError, match="their product must be at most 128"):
        kernels.forward_kernel(problem(query_len=200), KernelOptions(short_queries="decode"))


def test_heads_are_packed_unless_they_have_lists_of_their_own():
    shared, own = (MaskBlocks(128, 128, True, per_head=own) for own in (False, True))
    assert splits.packed_heads(step()) == splits.packed_heads(step(blocks=shared)) == 4
    few = step(blocks=own, keys=4096)
    assert splits.packed_heads(few) == 1
    constants = kernels.constants("decode", few, PLAIN, Tile(16, 64))
    assert (constants["PACKED_HEADS"], constants["HAS_MERGED_LISTS"]) == (1, False)


@pytest.mark.parametrize(
    ("facts", "packed"),
    [
        ({"keys": 8192}, 4),  # 32 MiB of keys and values
        ({"keys": 8191}, 1),
        ({"keys": 128, "key_len_varies": True}, 4),  # as many as it may have
        ({"batch": 8, "keys": 1024}, 4),
        ({"keys": 8192, "cache": Cache(0, torch.int8, torch.int8)}, 1),
        ({"heads": 128}, 16),
        ({"heads": 136}, 1),  # two bits for each do not fit
        ({"heads": 8}, 1),
        ({"head_dim": 576}, 1),
    ],
)
def test_lists_of_heads_are_merged_if_their_keys_are_many(facts, packed):
    call = step(blocks=MaskBlocks(128, 128, True, per_head=True), **facts)
    assert splits.packed_heads(call) == packed
    assert splits.merges_lists(call) == (packed > 1)


def test_rows_are_those_of_one_block_of_queries():
    assert splits.rows(step(query_len=5)) == 20
    narrow = step(query_len=5, blocks=MaskBlocks(2, 128, True))
    assert splits.rows(narrow) == 8
    assert splits.row_tiles(narrow, 16) == 3


@pytest.mark.parametrize(
    ("batch", "heads", "kv_heads", "keys", "count"),
    [
        (32, 32, 8, 8192, 1),  # 256 programs for 132 multiprocessors
        (8, 32, 8, 32768, 2),
        (1, 32, 8, 131072, 16),
        (1, 32, 8, 4096, 16),
        (1, 32, 8, 256, 2),  # two tiles of 128 keys
        (1, 32, 8, 100, 1),
        (128, 32, 8, 4096, 1),
    ],
)
def test_shares_fill_the_device(batch, heads, kv_heads, keys, count):
    assert kernels.num_splits(step(batch, heads, kv_heads, keys), PLAIN) == count


@pytest.mark.parametrize("batch", range(1, 40))
def test_shares_cost_little_more_than_the_best_number(batch):
    call = step(batch, keys=1 << 16)
    (tile,) = kernels.choose_tiles("decode", call, PLAIN, search=False)
    processors, tiles = call.device.multiprocessors, (1 << 16) // tile.block_n

    def time(count: int) -> int:
        return -(-batch * 8 * count // processors) * -(-tiles // count)

    chosen = kernels.num_splits(call, PLAIN)
    assert time(chosen) <= 1.05 * min(time(n) for n in range(1, 4 * processors // (8 * batch) + 1))


def test_a_varying_number_of_keys_gives_one_kernel():
    counts = {
        kernels.num_splits(step(keys=keys, key_len_varies=True), PLAIN)
        for keys in (1, 100, 1000, 8191)
    }
    assert counts == {16}


def test_a_user_chooses_the_shares():
    options = KernelOptions(splits=7)
    assert kernels.num_splits(step(), options) == 7
    assert kernels.constants("decode", step(), options, Tile(16, 64))["SPLITS"] == 7
    assert kernels.combine_constants(step(), options, 7).SPLITS_ROUNDED == 8


def test_a_row_may_see_nothing_in_one_share():
    options = KernelOptions(rows_guaranteed_safe=True)
    assert not kernels.constants("decode", step(), options, Tile(16, 64))["ROWS_GUARANTEED_SAFE"]
