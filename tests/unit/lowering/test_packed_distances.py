"""Mods of packed sequences measure distances without tables where both sides are cut alike."""

from __future__ import annotations

import pytest
import torch
from torch.func import vmap

from flexhop.analysis import INDICES
from flexhop.lowering.mods.analysed import SCORE, kernel_graph
from flexhop.lowering.mods.captured import read_sites
from flexhop.lowering.mods.lower import read_mods
from flexhop.lowering.mods.packed_distances import without_bounded
from flexhop.mods.bounded import BOUNDED, bounded
from flexhop.ops.args import unpack_sites
from flexhop.ops.graphs.own_positions import read_at_own_positions
from flexhop.ops.graphs.subgraphs import trace_joint, trace_mask, trace_score
from flexhop.sequences.row_tables import (
    RowTables,
    Window,
    local_mask_mod,
    local_score_mod,
    tabulate_rows,
)

aten = torch.ops.aten
LENGTHS = (5, 0, 9, 2)
QUERY = torch.zeros(1, 2, sum(LENGTHS), 16)
SLOPES, TABLE = torch.ones(2), torch.arange(64.0)


def tables(*, alike: bool = True) -> RowTables:
    cut = torch.tensor([0, *LENGTHS]).cumsum(0)
    other = cut if alike else cut.clone()
    found = tabulate_rows(cut, other, sum(LENGTHS), Window(None, 0))
    return found.with_keys(tabulate_rows(other, cut, sum(LENGTHS), Window()))


def graph(mod, *, alike: bool = True) -> torch.fx.GraphModule:
    """What kernels compute of a mod in local positions."""
    return kernel_graph(trace_score(local_score_mod(mod, tables(alike=alike)), QUERY, ()), SCORE)


def num_reads(of: torch.fx.GraphModule) -> int:
    return len(of.graph.find_nodes(op="call_function", target=aten.index.Tensor))


DISTANCES = {
    "ahead": lambda s, b, h, q, k: s + SLOPES[h] * (k - q),
    "behind": lambda s, b, h, q, k: s - SLOPES[h] * (q - k).abs(),
    "compared": lambda s, b, h, q, k: torch.where(k <= q, s, 2 * s),
    "both": lambda s, b, h, q, k: torch.where(q == k, s, s + (q - k) * 0.5),
    "table": lambda s, b, h, q, k: s + TABLE[q - k],
}


OF_OWN_KEYS = {
    "a quotient": lambda s, b, h, q, k: s + (k // 7) * 0.5,
    "a function": lambda s, b, h, q, k: s + torch.sin(k * 0.3),
    "an entry": lambda s, b, h, q, k: s + TABLE[k],
}


@pytest.mark.parametrize("name", OF_OWN_KEYS)
def test_what_depends_on_a_key_alone_is_computed_from_its_own_position(name):
    _, _, _, query, *_ = graph(OF_OWN_KEYS[name]).graph.find_nodes(op="placeholder")
    assert not query.users


def test_a_number_may_be_taken_from_a_position():
    mod = graph(lambda s, b, h, q, k: torch.where(k - 3 > 2, s, s * 2))
    assert num_reads(mod) > 0


@pytest.mark.parametrize("name", DISTANCES)
def test_distances_read_no_positions(name):
    own = {"table": 1, "ahead": 1, "behind": 1}.get(name, 0)  # of the mod itself
    assert num_reads(graph(DISTANCES[name])) == own
    assert num_reads(graph(DISTANCES[name], alike=False)) >= own + 3


@pytest.mark.parametrize(
    ("mod", "reads"),
    [
        (lambda s, b, h, q, k: s + TABLE[k] + (k - q), 2),  # and the key's own place
        (lambda s, b, h, q, k: s + TABLE[q], 2),
        (lambda s, b, h, q, k: s + (k - 2 * q), 2),
        (lambda s, b, h, q, k: s + (k - q) * b, 1),
    ],
)
def test_what_is_no_distance_is_read(mod, reads):
    assert num_reads(graph(mod)) == reads


@pytest.mark.parametrize("alike", [True, False])
@pytest.mark.parametrize("name", DISTANCES)
def test_the_rewritten_mod_gives_the_same_for_visible_pairs(name, alike):
    packed = tables(alike=alike)
    mod = local_score_mod(DISTANCES[name], packed)
    found, zero = graph(DISTANCES[name], alike=alike), torch.zeros((), dtype=torch.int32)
    for q in range(sum(LENGTHS)):
        for k in range(int(packed.first[q]), int(packed.end[q])):
            pair = (torch.tensor(1.5), zero, zero, *torch.tensor([q, k], dtype=torch.int32))
            assert torch.equal(found(*pair), mod(*pair))


ROWS = torch.randn(len(LENGTHS), 2, max(LENGTHS))
KINDS = torch.tensor([2, 0, 1, 1, 3, 2, 0, 0, 1], dtype=torch.int64)
OF_KEYS = {
    "head": lambda s, b, h, q, k: s + TABLE[k],
    "sequence": lambda s, b, h, q, k: s + ROWS[b, h, k],
    "twice": lambda s, b, h, q, k: s + TABLE[KINDS[k]],
    "both": lambda s, b, h, q, k: torch.where(KINDS[q] == KINDS[k], s + ROWS[b, h, k], s - q),
    "far": lambda s, b, h, q, k: s + TABLE[k] - (q - k).abs(),
}


@pytest.mark.parametrize("alike", [True, False])
@pytest.mark.parametrize("name", OF_KEYS)
def test_tables_of_keys_are_read_once_per_key(name, alike):
    packed, zero = tables(alike=alike), torch.zeros((), dtype=torch.int32)
    mod = local_score_mod(OF_KEYS[name], packed)
    found = graph(OF_KEYS[name], alike=alike)
    facts = read_mods(trace_score(mod, QUERY, ()), trace_mask(lambda *_: zero == 0, QUERY, ()))
    assert facts.reads_by_position
    assert not facts.reads_per_element
    for q in range(sum(LENGTHS)):
        for k in range(int(packed.first[q]), int(packed.end[q])):
            pair = (torch.tensor(1.5), zero, zero, *torch.tensor([q, k], dtype=torch.int32))
            assert torch.equal(found(*pair), mod(*pair))


def test_a_table_of_queries_and_keys_is_read_once_per_score():
    pairs = torch.randn(max(LENGTHS), max(LENGTHS))
    mod = local_score_mod(lambda s, b, h, q, k: s + pairs[q, k], tables())
    nothing = trace_mask(lambda b, h, q, k: q >= 0, QUERY, ())
    assert read_mods(trace_score(mod, QUERY, ()), nothing).reads_per_element


def test_a_slope_is_a_line_over_packed_keys():
    nothing = trace_mask(lambda b, h, q, k: q >= 0, QUERY, ())
    for alike in (True, False):
        score = local_score_mod(DISTANCES["ahead"], tables(alike=alike))
        assert read_mods(trace_score(score, QUERY, ()), nothing).has_key_slope == alike


def test_masks_compare_packed_positions():
    keep = local_mask_mod(lambda b, h, q, k: (k <= q) & (q - k < 3), tables())
    found = without_bounded(trace_mask(keep, QUERY, ()), INDICES)
    assert num_reads(found) == 2  # both ends of the range
    assert not found.graph.find_nodes(op="call_function", target=BOUNDED)


@pytest.mark.parametrize(
    ("mod", "by"),
    [
        (lambda s, b, h, q, k, t: s + t[h, 0] * (k - q), "head"),
        (lambda s, b, h, q, k, t: s + t[h, q - k], "distance"),
        (lambda s, b, h, q, k, t: s + t[h, q], "query"),
        (lambda s, b, h, q, k, t: s + t[h, k], "key"),
        (lambda s, b, h, q, k, t: s + t[b % 2, k], "key"),
        (lambda s, b, h, q, k, t: s + t[b % 2, q], "query"),
        (lambda s, b, h, q, k, t: s + t[h, (q * k) % 64], "score"),
    ],
)
def test_learned_tables_of_packed_sequences(mod, by):
    learned = torch.zeros(2, 64, requires_grad=True)
    packed = tables()
    joint = trace_joint(
        lambda *args: local_score_mod(lambda *five: mod(*five, args[5]), packed)(*args[:5]),
        QUERY, (learned,),
    )  # fmt: skip
    assert read_sites(joint.joint, unpack_sites(joint.sites)) == (by,)
    assert len(unpack_sites(joint.sites)) == 1


def test_bounded_positions_under_vmap():
    place, last = torch.randint(-5, 20, (4, 6)), torch.randint(0, 9, (4,))
    rows = vmap(vmap(bounded, (0, None)), (0, 0))(place, last)
    assert torch.equal(rows, place.clamp(min=0).minimum(last[:, None]))
    columns = vmap(vmap(bounded, (0, None)), (1, None))(place, last[0])
    assert torch.equal(columns, place.T.clamp(min=0).minimum(last[0]))
    only_last = vmap(bounded, (None, 0))(place[0, 0], last)
    assert torch.equal(only_last, place[0, 0].clamp(min=0).minimum(last))


def test_what_equals_a_query_s_value_may_be_computed_later():
    """Derivatives reorder graphs: a read of the sequence comes before that of the key's."""
    written = torch.fx.Graph()
    given = [written.placeholder(name) for name in ("score", "b", "h", "q", "k", "of", "weights")]
    _, _, _, query, key, of, weights = given

    def read(source, place):
        return written.call_function(aten.index.Tensor, (source, [place]))

    number = read(of, query)
    early = read(weights, number)
    own, last = read(of, key), read(of, query)
    place = written.call_function(BOUNDED, (key, last, [own, number, own]))
    written.output(written.call_function(aten.atan2.default, (place, early)))
    found = read_at_own_positions(torch.fx.GraphModule({}, written), SCORE)
    found.graph.lint()
    own_place, weight = found.graph.output_node().args[0].args
    assert str(own_place.args) == "(of, [k])"
    assert weight.args[1] == [own_place]
