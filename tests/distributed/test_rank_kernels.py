"""A rank's kernels are those of one GPU: generated for Hopper, without one."""

import ast
import functools
import re

import pytest
import torch

import flexhop
import flexhop.distributed as sharded
from flexhop import masks, offline
from flexhop.distributed.attend import attend_view
from flexhop.distributed.views import make_view
from flexhop.mods import noop_score
from flexhop.ops.args import AttentionArgs
from flexhop.ops.call import Call
from tests.needs import needs_hopper

LENGTH, HEADS, KEY_HEADS = 4096, 32, 8
# What may differ: sizes that only the schedule of tiles reads, and where the band lies. Where a
# query's own key lies is not known in a rank's mask, so tiles without keys are to be expected.
SIZES = {"HEADS_PER_SECTION", "BAND_FIRST", "BAND_END", "STORED_BLOCKS", "STORES_EMPTY_TILES"}
WINDOW = 700


def alibi(score, b, h, q_idx, kv_idx):
    return score - 0.1 * (q_idx - kv_idx)


SCORES = {"none": None, "alibi": alibi}
_IDS = masks.ids_from_lengths(torch.tensor([1500, 200, 1300, 1096]))
MASKS = {
    "window": masks.sliding_window(WINDOW),
    "causal": masks.causal,
    "documents": masks.packed_causal(_IDS),
}


@functools.cache
def mask_of(name):
    return flexhop.create_block_mask(MASKS[name], None, None, LENGTH, LENGTH, device="cpu")


def leaves(length):
    return [
        torch.zeros(1, heads, length, 128, dtype=torch.bfloat16).requires_grad_()
        for heads in (HEADS, KEY_HEADS, KEY_HEADS)
    ]


def kernels(generated):
    """Name and constants of flexhop's kernels, in order."""
    found = []
    for kernel in generated.templates:
        name = re.search(r"^def (flexhop_\w+)", kernel.source, re.M)
        constants = re.search(r"'config_args': (\{.*?\})", kernel.source)
        assert constants is not None
        found.append((name and name[1], ast.literal_eval(constants[1])))
    return found


@functools.cache
def of_one(mask, score):
    whole = mask_of(mask)

    def attend(q, k, v):
        return flexhop.flex_attention(q, k, v, SCORES[score], whole, enable_gqa=True)

    return kernels(offline.generate_code(attend, *leaves(LENGTH), grad=True))


def of_rank(mask, score, rank, **choice):
    plan = sharded.make_plan(mask_of(mask), 2, **choice)
    view = make_view(plan, "", rank, torch.device("cpu"))
    call = Call(None, True, None, False, None)

    def attend(q, k, v):
        mods = SCORES[score] or noop_score, MASKS[mask]
        args = AttentionArgs(q, k, v, *mods, (), 0.0, {})
        return attend_view(args, call, view, ("0", ""), False)[0]

    return kernels(offline.generate_code(attend, *leaves(plan.tokens), grad=True))


def assert_same(one, found):
    assert [name for name, _ in found] == [name for name, _ in one]
    assert "flexhop_hopper_forward" in dict(found) and "flexhop_hopper_backward" in dict(found)
    for (_, whole), (_, part) in zip(one, found, strict=True):
        assert {**part, **{name: whole[name] for name in SIZES & whole.keys()}} == whole


@needs_hopper
@pytest.mark.parametrize(("score", "rank"), [("none", 0), ("none", 1), ("alibi", 1)])
def test_a_window_stays_a_band(score, rank):
    found = of_rank("window", score, rank, layout="contiguous", method="blocks")
    assert_same(of_one("window", score), found)
    assert len(found) == 2  # no kernel stores the mask as bits
    for _, part in found:
        assert part["HAS_BAND"]
        assert part["BAND_END"] - part["BAND_FIRST"] == WINDOW
        # The buffer of the second rank begins before its queries, with a whole block.
        assert part["BAND_END"] == (1 if rank == 0 else 1 + 768)


@needs_hopper
@pytest.mark.parametrize(
    ("mask", "choice"),
    [
        ("causal", {"layout": "zigzag", "method": "gather"}),
        ("documents", {"layout": "greedy", "method": "blocks"}),
    ],
    ids=["causal", "documents"],
)
def test_other_masks_take_the_same_kernels(mask, choice):
    assert_same(of_one(mask, "none"), of_rank(mask, "none", 0, **choice))
