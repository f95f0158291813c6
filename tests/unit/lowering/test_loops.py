"""Which calls of the Hopper kernels have one loop for all steps, and why not the others."""

from typing import Any

import pytest
import torch

from flexhop.lowering.hopper import backward, forward
from flexhop.lowering.hopper.loops import separate_loops
from flexhop.lowering.mods.bands import Band
from flexhop.lowering.mods.lower import read_mods
from flexhop.lowering.problem import MaskBlocks
from flexhop.ops.graphs.subgraphs import trace_mask, trace_score
from flexhop.options import KernelOptions
from tests.problems import problem

CAUSAL = {"blocks": MaskBlocks(128, 128, True), "has_mask_mod": True, "mask_cost": 2.8}
DOCUMENTS = CAUSAL | {"mask_cost": 8.8, "mask_reads": True, "mask_key_bytes": frozenset({4})}
STORED = DOCUMENTS | {
    "batch": 16, "query_heads": 16, "kv_heads": 16,
    "blocks": MaskBlocks(128, 128, True, kv_columns=8, q_columns=8),
}  # fmt: skip
SOME = STORED | {"blocks": MaskBlocks(128, 128, True)}  # nobody knows how many a row lists
RANGES = CAUSAL | {"blocks": MaskBlocks(128, 128, True, has_ranges=True)}
ASKED = CAUSAL | {"mask_cost": 7.8, "mask_uses_head": True}
BY_HEAD = DOCUMENTS | {"mask_uses_head": True}
WINDOW = CAUSAL | {"mask_cost": 6.8, "mask_band": Band(-256, 1)}
LINE = {"has_score_mod": True, "has_key_slope": True, "score_cost": 3.0}
RELU = {"has_score_mod": True, "score_cost": 2.0}
GATE = {"has_score_mod": True, "score_cost": 2.0, "reads_captured": True}
KEYS = GATE | {"score_cost": 2.5, "reads_by_position": True}
PAIRS = KEYS | {"score_cost": 4.0, "reads_per_element": True}
TABLE = PAIRS | {"score_cost": 7.0, "has_distances": True}
CAP = {"has_score_mod": True, "score_cost": 5.0, "takes_products": True}
ODD = {"key_len": 1000, "is_key_multiple": lambda n: 1000 % n == 0}


def reasons(width: int, facts: dict[str, Any]) -> list[str]:
    """Against one loop; those of the constants are the same."""
    call = problem(90, width, **{"value_head_dim": width} | facts)
    tile = forward.table_tile(call)
    found = list(separate_loops(call, tile, forward.stored_bits(call, tile)))
    assert forward.constants(call, KernelOptions(), tile).ONE_LOOP == (not found)
    return found


@pytest.mark.parametrize("mask", [{}, CAUSAL, STORED, BY_HEAD, CAUSAL | ODD])
@pytest.mark.parametrize("width", [72, 128])
def test_one_loop_for_65_to_128_columns(width, mask):
    assert reasons(width, mask) == []


@pytest.mark.parametrize("mask", [{}, CAUSAL, STORED])
@pytest.mark.parametrize("mod", [LINE, RELU, TABLE], ids=["line", "relu", "table"])
def test_one_loop_for_lines_and_short_functions_and_tables(mod, mask):
    assert reasons(128, mod | mask) == []


LONG = {"has_score_mod": True, "score_cost": 12.0}


@pytest.mark.parametrize("mask", [STORED, ASKED], ids=["ids", "asked"])
@pytest.mark.parametrize("mod", [CAP, GATE, KEYS, LONG])
def test_one_loop_for_long_functions_if_tiles_have_blocks_of_both_kinds(mod, mask):
    assert reasons(128, mod | mask) == []
    assert bool(reasons(256, mod | mask)) == (mod is not LONG)


@pytest.mark.parametrize(
    "mask",
    [
        {"blocks": MaskBlocks(128, 128, True)},
        STORED | {"mask_reads": False},
        STORED | {"mask_reads_per_element": True},
        ASKED | {"mask_cost": 5.0},
    ],
    ids=["whole blocks", "bits without reads", "bits of pairs", "a short question"],
)
def test_three_loops_for_long_functions_under_other_masks(mask):
    assert reasons(128, CAP | mask) == ["score_mod takes about 5 instructions per score"]


def test_one_loop_for_64_columns_without_mods():
    assert reasons(64, {}) == reasons(64, ODD) == reasons(64, TABLE | STORED) == []
    for mod in (CAUSAL, STORED, LINE, TABLE):
        assert reasons(64, mod) == ["heads of 64 columns with a mod or a mask"]


@pytest.mark.parametrize(
    ("facts", "why"),
    [
        ({"head_dim": 256}, "heads of 256 columns"),
        ({"head_dim": 192}, "heads of 256 columns"),
        (CAP, "score_mod takes about 5 instructions per score"),
        ({"has_score_mod": True, "score_cost": 12.0}, "64 keys per step"),
        (LINE | {"has_key_bend": True}, "score_mod adds a line with bends"),
        (GATE, "score_mod reads captured tensors"),
        (KEYS, "score_mod reads captured tensors"),
        (PAIRS, "score_mod reads captured tensors"),
        (WINDOW, "each query sees the keys between two numbers"),
        (RANGES, "each query sees the keys between two numbers"),
        (SOME, "some blocks of the mask have bits, and mask_mod is asked about the others"),
        (LINE | BY_HEAD, "score_mod adds a line, and mask_mod takes about 9 instructions"),
        (RELU | BY_HEAD, "mask_mod reads tensors at keys, and there is a score_mod"),
        (BY_HEAD | ODD, "mask_mod reads tensors at keys, and keys may end within a tile"),
        (
            TABLE | CAUSAL | ODD,
            "score_mod reads tensors by position, and keys may end within a tile",
        ),
        (
            CAUSAL | {"blocks": MaskBlocks(64, 128, True)},
            "blocks of the mask that are smaller than a tile",
        ),
        (
            CAUSAL | {"blocks": MaskBlocks(128, 64, True)},
            "blocks of the mask that are smaller than a tile",
        ),
    ],
)
def test_three_loops_where_one_is_slower_or_spills(facts, why):
    width = facts.get("head_dim", 128)
    found = reasons(width, {name: value for name, value in facts.items() if name != "head_dim"})
    assert why in found


LONG_GRAD = LONG | {"grad_cost": 16.0}
BATCHES = {"blocks": MaskBlocks(128, 128, True, per_batch=True), "has_mask_mod": True}
HEADS = BATCHES | {"blocks": MaskBlocks(128, 128, True, per_head=True)}


@pytest.mark.parametrize(
    ("facts", "is_one"),
    [
        (HEADS, True),
        (BATCHES, True),
        (STORED, True),
        (HEADS | {"grad_cost": 4.0}, False),
        (HEADS | {"mask_reads_per_element": True}, False),
        (CAUSAL, False),
        (STORED | {"mask_reads": False}, False),
        (STORED | {"value_head_dim": 192}, False),
        (SOME, False),
        (HEADS | {"blocks": MaskBlocks(128, 128, False, per_head=True)}, False),
    ],
)
def test_gradients_share_a_loop_if_multiprocessors_would_work_on_different_ones(facts, is_one):
    call = problem(90, 128, **LONG_GRAD | facts)
    assert backward.constants(call, backward.table_tile(call)).ONE_LOOP == is_one


GATES, FACTOR = torch.ones(2, 2), torch.tensor(2.0)


@pytest.mark.parametrize(
    ("mod", "reads"),
    [
        (lambda s, b, h, q, k: torch.relu(s) * 2, False),
        (lambda s, b, h, q, k: s * GATES[b, h], True),
        (lambda s, b, h, q, k: s * FACTOR, True),
        (lambda s, b, h, q, k: s + GATES[b, h] * (q - k), False),  # outside of steps
    ],
    ids=["relu", "gates", "factor", "line"],
)
def test_reads_of_score_mods(mod, reads):
    """By index or not, if the tensor is an input of the graph or part of it."""
    query = torch.zeros(1, 1, 2, 64, dtype=torch.bfloat16)
    mask = trace_mask(lambda b, h, q, k: q >= k, query, ())
    assert read_mods(trace_score(mod, query, ()), mask).reads_captured == reads
    passed = trace_score(lambda s, b, h, q, k, x: s * x + s, query, (FACTOR,))
    assert read_mods(passed, mask).reads_captured


SHORT = {"query_len": 1024, "key_len": 1024}
LONGER = {"query_len": 4096, "key_len": 4096}


@pytest.mark.parametrize(
    ("width", "facts", "is_first"),
    [
        (64, SHORT, True),
        (64, LONGER, False),
        (64, {"query_len": 960, "key_len": 960}, False),  # three consumers
        (64, LONGER | CAP, True),
        (64, LONGER | CAUSAL | TABLE, True),
        (64, LONGER | CAUSAL | LINE, False),
        (64, LONGER | WINDOW | LINE, False),
        (64, LONGER | CAUSAL, False),
        (64, LONGER | STORED, True),
        (64, LONGER | WINDOW, True),
        (64, LONGER | {"blocks": MaskBlocks(64, 64, True)}, False),
        (128, SHORT | STORED, False),
    ],
)
def test_where_values_are_waited_for(width, facts, is_first):
    call = problem(90, width, **{"value_head_dim": width} | facts)
    tile = forward.table_tile(call)
    assert forward.constants(call, KernelOptions(), tile).VALUES_FIRST == is_first
