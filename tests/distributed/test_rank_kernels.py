"""A rank's kernels are those of one GPU: generated for Hopper, without one."""

import ast
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

LENGTH, HEADS, KEY_HEADS = 4096, 16, 8
# What may differ: sizes that only the schedule of tiles reads, and where the band lies.
SIZES = {"HEADS_PER_SECTION", "BAND_FIRST", "BAND_END"}


def leaves(queries, keys):
    sizes = ((HEADS, queries), (KEY_HEADS, keys), (KEY_HEADS, keys))
    return [
        torch.zeros(1, heads, length, 128, dtype=torch.bfloat16).requires_grad_()
        for heads, length in sizes
    ]


def constants(generated):
    """Constants of flexhop's kernels, in order."""
    found = [re.search(r"'config_args': (\{.*?\})", k.source) for k in generated.templates]
    return [ast.literal_eval(match[1]) for match in found if match]


def of_one(mask, score_mod):
    def attend(q, k, v):
        return flexhop.flex_attention(q, k, v, score_mod, mask, enable_gqa=True)

    return constants(offline.generate_code(attend, *leaves(LENGTH, LENGTH), grad=True))


def of_rank(mask, score_mod, rank, **choice):
    plan = sharded.make_plan(mask, 2, **choice)
    view = make_view(plan, "", rank, torch.device("cpu"))
    call = Call(None, True, None, False, None)

    def attend(q, k, v):
        args = AttentionArgs(q, k, v, score_mod or noop_score, mask.mask_mod, (), 0.0, {})
        return attend_view(args, call, view, ("0", ""), False)[0]

    generated = offline.generate_code(attend, *leaves(plan.tokens, plan.tokens), grad=True)
    return constants(generated)


def alibi(score, b, h, q_idx, kv_idx):
    return score - 0.1 * (q_idx - kv_idx)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("score_mod", [None, alibi])
def test_a_window_stays_a_band(rank, score_mod):
    mask = flexhop.create_block_mask(
        masks.sliding_window(700), None, None, LENGTH, LENGTH, device="cpu"
    )
    one = of_one(mask, score_mod)
    found = of_rank(mask, score_mod, rank, layout="contiguous", method="blocks")
    assert len(one) == len(found) == 2  # and no kernel that stores the mask as bits
    for whole, part in zip(one, found, strict=True):
        assert {**part, **{name: whole[name] for name in SIZES & whole.keys()}} == whole
        assert part["HAS_BAND"]
        assert part["BAND_END"] - part["BAND_FIRST"] == 700
    # The buffer of the second rank begins 700 keys before its queries, in whole blocks.
    assert found[0]["BAND_END"] == (1 if rank == 0 else 1 + 768)
