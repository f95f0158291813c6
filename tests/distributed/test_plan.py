"""Plans: pure functions of masks."""

import pytest
import torch

import flexhop
import flexhop.distributed as sharded
from flexhop import errors, masks
from flexhop.distributed.layouts import LAYOUTS, greedy
from flexhop.distributed.routes import NOWHERE, make_routes


def mask_of(mod, length, block=16, heads=None):
    return flexhop.create_block_mask(mod, None, heads, length, length, "cpu", BLOCK_SIZE=block)


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("length", [1, 100, 1024])
def test_every_token_has_one_place(ranks, layout, length):
    plan = sharded.make_plan(mask_of(masks.causal, length), ranks, layout=layout)
    places = torch.cat([plan.positions(rank) for rank in range(ranks)])
    assert torch.equal(places.sort().values, torch.arange(len(places)))
    tokens = torch.arange(length)[None]
    parts = [plan.shard(tokens, 1, rank, fill=-1) for rank in range(ranks)]
    assert {part.shape for part in parts} == {(1, plan.tokens)}
    assert torch.equal(plan.unshard(parts, 1), tokens)
    assert int((torch.cat(parts) == -1).sum()) == len(places) - length


def test_zigzag_balances_a_causal_mask():
    plan = sharded.make_plan(mask_of(masks.causal, 1024), 4, layout="zigzag")
    visits = plan.masks[""].cost.visits
    assert max(visits) == min(visits)


def test_batches_and_heads_that_share_their_lists_count_once():
    alone = sharded.make_plan(mask_of(masks.causal, 300), 4)
    many = flexhop.create_block_mask(masks.causal, 3, 2, 300, 300, "cpu", BLOCK_SIZE=16)
    plan = sharded.make_plan(many, 4)
    assert plan.masks[""].grid.partial.shape[:2] == (1, 1)
    assert plan.fingerprint() == alone.fingerprint()
    lists = many.kv_num_blocks, many.kv_indices, many.full_kv_num_blocks, many.full_kv_indices
    bare = flexhop.BlockMask.from_kv_blocks(
        *(tensor[0, 0] for tensor in lists), BLOCK_SIZE=16, seq_lengths=(300, 300)
    )
    assert sharded.make_plan(bare, 4).fingerprint() == alone.fingerprint()
    differs = mask_of(lambda b, h, q, k: q >= k + 16 * h, 300, heads=2)
    assert sharded.make_plan(differs, 4).masks[""].grid.full.shape[:2] == (1, 2)


def test_greedy_fills_every_rank_alike():
    owner = greedy([9, 1, 1, 1, 8, 1, 7, 1], 4)
    assert sorted(owner) == [0, 0, 1, 1, 2, 2, 3, 3]
    assert len({owner[0], owner[4], owner[6]}) == 3


@pytest.mark.parametrize("layout", LAYOUTS)
def test_needed_units_are_those_that_queries_visit(layout):
    length, ranks = 512, 4
    mod = masks.sliding_window(100)
    plan = sharded.make_plan(mask_of(mod, length), ranks, layout=layout)
    seen = flexhop.create_mask(mod, None, None, length, length, "cpu")[0, 0]
    for rank in range(ranks):
        keys = seen[plan.positions(rank)].any(0).nonzero().flatten()
        assert plan.masks[""].need[rank].tolist() == (keys // plan.unit).unique().tolist()


@pytest.mark.parametrize("method", ["gather", "blocks", "stages"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_sent_is_what_arrives(method, layout):
    """Follow every unit along its route, and its gradient back."""
    ranks = 4
    mask = mask_of(masks.sliding_window(150), 700)
    plan = sharded.make_plan(mask, ranks, layout=layout, method=method)
    routes = [make_routes(plan, "", rank, 1)[-1] for rank in range(ranks)]
    for rank, route in enumerate(routes):
        arriving = []
        for source, other in enumerate(routes):
            out = other.counts[0].tolist()
            start = 0 if other.is_gather else sum(out[:rank])
            sent = other.send[start : start + out[rank]]
            arriving += plan.own[source][sent].tolist()
        assert len(arriving) == int(route.counts[1].sum())
        own = plan.own[rank].tolist() if len(route.own_back) else []
        buffer = own + arriving + [NOWHERE] * (route.received - len(arriving))
        for place, unit in zip(route.order.tolist(), route.columns.tolist(), strict=True):
            if place != NOWHERE:
                assert buffer[place] == unit
        for place, unit in zip(route.received_back.tolist(), arriving, strict=False):
            assert place == NOWHERE or route.columns[place] == unit
        if not route.is_gather:
            wanted = set(plan.masks[""].need[rank].tolist()) - set(plan.own[rank].tolist())
            assert set(arriving) == wanted


def test_masks_share_a_layout():
    """Blocks of several sizes: a unit is whole blocks of all."""
    window = mask_of(masks.sliding_window(50), 960, 48)
    plan = sharded.make_plan({"full": mask_of(masks.causal, 960, 64), "window": window}, 2)
    assert plan.unit == 192
    assert set(plan.masks) == {"full", "window"}


def test_a_narrow_window_travels_less_than_a_gather():
    mask = mask_of(masks.sliding_window(128), 4096, 128)
    plans = {m: sharded.make_plan(mask, 4, method=m) for m in ("gather", "blocks")}
    costs = {name: plan.masks[""].cost for name, plan in plans.items()}
    assert costs["blocks"].bytes * 20 < costs["gather"].bytes
    assert sharded.make_plan(mask, 4).masks[""].cost.method != "gather"


def test_the_cost_model_gathers_where_all_is_needed():
    shape = sharded.AttentionShape()
    plan = sharded.make_plan(mask_of(masks.causal, 2**14, 128), 2, shape=shape)
    assert plan.masks[""].cost.received == (64, 64)


def test_heads_are_chosen_where_a_document_is_longer_than_a_share():
    ids = masks.ids_from_lengths(torch.tensor([30000] + [277] * 10))
    shape = sharded.AttentionShape()
    mask = mask_of(masks.packed_causal(ids), len(ids), 256)
    plan = sharded.make_plan(mask, 8, heads="auto", shape=shape)
    assert plan.heads > 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"layout": "spiral"}, "'contiguous', 'zigzag', 'greedy', 'auto'"),
        ({"method": "pigeon"}, "'gather', 'blocks', 'stages', 'auto'"),
        ({"heads": 3}, "heads is 3, but it must divide the 4 ranks"),
        ({"heads": "auto"}, "shape is missing"),
        ({"heads": 4, "shape": sharded.AttentionShape(kv_heads=2)}, "2 key heads"),
        ({"chunk": 24}, "multiple of the plan's unit of 16 tokens"),
        ({"length": 65}, "the sequence has 65"),
    ],
)
def test_refused_arguments(arguments, words):
    with pytest.raises((errors.PlanError, errors.OptionValueError)) as found:
        sharded.make_plan(mask_of(masks.causal, 64), 4, **arguments)
    assert words in str(found.value)


def test_refused_masks():
    cross = flexhop.create_block_mask(masks.causal, None, None, 64, 128, "cpu")
    with pytest.raises(errors.PlanError, match="64 queries and 128 keys"):
        sharded.make_plan(cross, 2)
    with pytest.raises(errors.PlanError, match="length is missing"):
        sharded.make_plan(None, 2)
    with pytest.raises(errors.PlanError, match="is empty"):
        sharded.make_plan({}, 2)


def test_explanation():
    window = mask_of(masks.sliding_window(64), 1024, 32)
    both = {"full": mask_of(masks.causal, 1024, 32), "window": window}
    text = sharded.explain(
        sharded.make_plan(both, 4, layout="contiguous", method="blocks"), width=16
    )
    assert text == EXPLANATION.strip("\n")


EXPLANATION = """
1024 tokens on 4 ranks: 256 each, 0 of padding in total
layout: contiguous, 1 chunk of 256 tokens per rank; units of 32 tokens

mask 'full': the slowest rank has 1.73 times the mean work
  exchange: blocks, needed units only, one call of attention
  the busiest rank receives 768 tokens, 3.15 MB forward; all keys would be 768 tokens
  estimate: 0.285 ms per layer, forward and backward
       rank 0 ████············
       rank 1 ▒▒▒▒████········
       rank 2 ▒▒▒▒▒▒▒▒████····
       rank 3 ▒▒▒▒▒▒▒▒▒▒▒▒████

mask 'window': the slowest rank has 1.03 times the mean work
  exchange: blocks, needed units only, one call of attention
  the busiest rank receives 64 tokens, 262 kB forward; all keys would be 768 tokens
  estimate: 0.224 ms per layer, forward and backward
       rank 0 ████············
       rank 1 ···▒████········
       rank 2 ·······▒████····
       rank 3 ···········▒████
"""
