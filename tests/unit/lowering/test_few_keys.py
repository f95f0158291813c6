"""Calls of which a tile holds all keys of a head: kernels for gradients, and forward tiles."""

import dataclasses

import pytest
import torch

from flexhop.lowering.hopper.forward import slower
from flexhop.lowering.portable import kernels
from flexhop.lowering.portable.rules import adders, backward_kernels
from flexhop.lowering.portable.tiles import table_tile
from flexhop.lowering.problem import GradFacts, MaskBlocks
from flexhop.options import KernelOptions, Tile
from tests.problems import problem

AUTO = KernelOptions()
TOGETHER = ("gradients",)
APART = ("grad_query", "grad_key_value")
WINDOW = {"batch": 512, "query_len": 49, "key_len": 49, "head_dim": 32, "value_head_dim": 32}


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({}, TOGETHER),
        ({"head_dim": 128, "value_head_dim": 128, "key_len": 64}, TOGETHER),
        ({"head_dim": 128, "value_head_dim": 128, "key_len": 65}, APART),
        ({"head_dim": 64, "key_len": 128, "has_score_mod": True}, TOGETHER),
        ({"key_len": 129}, APART),
        # Nothing is computed twice but products.
        ({"key_len": 100}, APART),
        ({"key_len": 100, "has_score_mod": True}, TOGETHER),
        ({"key_len": 100, "query_len": 500}, TOGETHER),
        ({"head_dim": 136}, ("grad_query", "grad_key", "grad_value")),
        ({"dtype": torch.float32}, APART),
        ({"architecture": 80}, APART),
        ({"key_len_varies": True}, APART),
        # Few programs with many queries each; many programs; few with few queries.
        ({"batch": 1, "query_len": 4096, "key_len": 77}, APART),
        ({"batch": 64, "query_len": 4096, "key_len": 77}, TOGETHER),
        ({"batch": 1, "query_len": 128}, TOGETHER),
        ({"batch": 32, "query_len": 4096, "head_dim": 128, "value_head_dim": 128}, TOGETHER),
        ({"batch": 32, "query_len": 4096}, APART),
        ({"kv_batch_shared": True}, APART),
        ({"has_score_mod": True, "longest_row": 17}, APART),
        ({"blocks": MaskBlocks(128, 128, True)}, TOGETHER),
        ({"blocks": MaskBlocks(64, 64, True)}, TOGETHER),
        ({"blocks": MaskBlocks(32, 32, True)}, APART),
        ({"captured_reads": ("score", "key", "head")}, TOGETHER),
        ({"captured_reads": ("query",)}, APART),
        ({"captured_reads": ("score",), "is_deterministic": True}, APART),
    ],
)
def test_kernels(facts, expected):
    assert backward_kernels(problem(**WINDOW | facts), AUTO) == expected


@pytest.mark.parametrize("kernel", ["grad_query", "grad_key_value"])
def test_a_tile_of_the_user_is_one_of_two_kernels(kernel):
    assert backward_kernels(problem(**WINDOW), KernelOptions(**{kernel: Tile(32, 32)})) == APART


def test_there_is_no_other_tile():
    """One with fewer keys would store a part of the gradient of query."""
    call = problem(**WINDOW | {"key_len": 100}, has_score_mod=True)
    (tile,) = kernels.choose_tiles("gradients", call, AUTO, search=True)
    assert kernels.all_tiles("gradients", call, AUTO) == [tile]


def test_it_adds_to_all_captured_tensors():
    call = problem(**WINDOW)
    assert adders(call, AUTO) == ()
    reads = GradFacts(captured_reads=("score", "key"))
    assert adders(dataclasses.replace(call, grad=reads), AUTO) == TOGETHER


@pytest.mark.parametrize("width", [16, 32, 64, 80, 128])
@pytest.mark.parametrize("queries", [20, 49, 512])
@pytest.mark.parametrize("keys", [20, 49, 64, 100, 128])
def test_a_tile_holds_all_keys_and_fits(width, queries, keys):
    sizes = {"query_len": queries, "key_len": keys, "head_dim": width, "value_head_dim": width}
    call = problem(**WINDOW | sizes, has_score_mod=True)
    if backward_kernels(call, AUTO) == TOGETHER:
        (tile,) = kernels.choose_tiles("gradients", call, AUTO, search=False)
        assert tile.block_n >= keys
        needed = kernels.shared_memory("gradients", call, tile)
        assert needed <= call.device.shared_memory
    else:
        assert width > 64 and keys > 64


CAUSAL = {"blocks": MaskBlocks(128, 128, True), "mask_cost": 3.0}
TOKENS = {"head_dim": 64, "value_head_dim": 64, "has_score_mod": True, "score_cost": 3.0}
OF_KEYS = {"key_bytes": frozenset({4})}
AHEAD, QUICK = "score_mod reads at keys", "under a mask of so few keys"


@pytest.mark.parametrize(
    ("keys", "facts", "reason"),
    [
        (128, CAUSAL, ""),
        (129, CAUSAL, QUICK),
        (256, OF_KEYS, ""),
        (257, OF_KEYS, AHEAD),
        (256, {**CAUSAL, **OF_KEYS}, ""),
        (257, {**CAUSAL, **OF_KEYS}, QUICK),
        (128, {**CAUSAL, "key_len_varies": True}, QUICK),
    ],
)
def test_a_tile_of_keys_takes_the_hopper_kernel(keys, facts, reason):
    lengths = {"query_len": keys, "key_len": keys}
    found = "; ".join(slower(problem(**TOKENS | lengths | facts), AUTO))
    assert (reason in found) if reason else not found


@pytest.mark.parametrize(
    ("keys", "facts", "tile"),
    [
        (64, CAUSAL | {"mask_reads": True}, Tile(64, 32, 4, 2)),
        (64, CAUSAL, Tile(64, 64, 4, 3)),
        (64, CAUSAL | {"mask_reads": True, "key_len_varies": True}, Tile(64, 128, 4, 2)),
        (64, CAUSAL | {"mask_reads": True, "architecture": 80}, Tile(128, 64, 4, 3)),
        (128, OF_KEYS, Tile(64, 64, 4, 3)),
        (129, OF_KEYS, Tile(64, 128, 4, 2)),
        (128, {"has_score_mod": False}, Tile(128, 64, 8, 3)),
    ],
)
def test_forward_tiles(keys, facts, tile):
    assert table_tile("forward", problem(**TOKENS | {"key_len": keys} | facts)) == tile
