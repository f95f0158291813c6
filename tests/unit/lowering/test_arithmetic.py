"""Arithmetic on positions in floats, where floats are wanted."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from flexhop.analysis import analyse
from flexhop.lowering.mods.analysed import SCORE
from flexhop.lowering.mods.arithmetic import _ORDERED, cheaper
from flexhop.lowering.mods.indices import wrap_reads
from flexhop.ops.graphs.subgraphs import trace_score

aten = torch.ops.aten
TABLE = torch.tensor([0.5, -0.25])


POSITIONS = [*range(9), 18, 19, 31, 32, 63, 64, 70, 127, 128, 4095, 2**23 - 1]


def made_cheaper(mod: Any) -> Any:
    """The graph that kernels print; it has the same values as what the user wrote."""
    graph = trace_score(mod, torch.zeros(1, 1, 2, 64, dtype=torch.bfloat16), ())
    fast = cheaper(graph, SCORE)
    zero, score = torch.tensor(0, dtype=torch.int32), torch.tensor(0.5)
    at = [torch.tensor(n, dtype=torch.int32) for n in POSITIONS]
    for q, k in itertools.product(at, at):
        assert fast(score, zero, zero + 1, q, k).equal(graph(score, zero, zero + 1, q, k))
    return fast


def has_integers(mod: Any) -> bool:
    """Whether what depends on both positions is still computed in integers."""
    fast = made_cheaper(mod)
    found = analyse(fast, SCORE)
    calls = [node for node in fast.graph.nodes if node.op == "call_function"]
    return any(
        node.meta["val"].dtype == torch.int32 and {"q", "k"} <= found[node].depends
        for node in calls
    )


@pytest.mark.parametrize(
    "mod",
    [
        lambda s, b, h, q, k: s + TABLE[h] * (k - q),
        lambda s, b, h, q, k: s - TABLE[h] * (q - k).abs(),
        lambda s, b, h, q, k: s + TABLE[h] * -(q - k),
        lambda s, b, h, q, k: s - 0.5 * (q + 100 - k).abs(),
        lambda s, b, h, q, k: s - 0.5 * (q - k - 1).abs() + (q + k),
        lambda s, b, h, q, k: s - 0.5 * ((q // 64 - k // 64).abs() + (q % 64 - k % 64).abs()),
        lambda s, b, h, q, k: s - TABLE[h] * torch.maximum((q % 7 - k % 7).abs(), q // 7 - k // 7),
        lambda s, b, h, q, k: s + 0.5 * (2 * (q // 9) - 3 * (k % 64)),
    ],
    ids=["difference", "magnitude", "opposite", "shifted", "two", "patches", "largest", "factors"],
)
def test_distances_between_positions_are_floats(mod):
    assert not has_integers(mod)


@pytest.mark.parametrize(
    "mod",
    [
        lambda s, b, h, q, k: s + 0.5 * (q - k + 2**24),
        lambda s, b, h, q, k: s + 0.5 * ((q - k) % 4),
        lambda s, b, h, q, k: s + 0.5 * (q * k),
    ],
    ids=["far", "remainder", "product"],
)
def test_what_floats_might_not_hold_stays_an_integer(mod):
    assert has_integers(mod)


TIMES = torch.tensor([3, -5, 2**40, 2**61, -(2**61), 2**24 + 1, 2**53 + 1, -(2**31)])


@pytest.mark.parametrize(
    "mod",
    [
        lambda s, b, h, q, k: s - TABLE[h] * (TIMES[q % 8] - TIMES[k % 8]).abs(),
        lambda s, b, h, q, k: s + (-(TIMES[q % 8] - TIMES[k % 8])).relu(),
        lambda s, b, h, q, k: s + 0.5 * (TIMES[q % 8] - TIMES[k % 8]).clamp(-64, 2**24),
        lambda s, b, h, q, k: s + (TIMES[q % 8] - TIMES[k % 8]).clamp(min=7).neg(),
        lambda s, b, h, q, k: s * torch.maximum(TIMES[q % 8] ^ TIMES[k % 8], TIMES[k % 8]),
    ],
    ids=["magnitude", "relu", "clamp", "least", "larger"],
)
def test_integers_of_64_bits_are_ordered_as_floats(mod):
    fast = made_cheaper(mod)
    ordered = [node for node in fast.graph.nodes if node.target in _ORDERED]
    assert ordered
    assert all(node.meta["val"].dtype == torch.float32 for node in ordered)


def test_a_bound_that_floats_do_not_hold_stays_an_integer():
    fast = made_cheaper(
        lambda s, b, h, q, k: s + 0.5 * (TIMES[q % 8] - TIMES[k % 8]).clamp(max=2**24 + 1)
    )
    (clamp,) = fast.graph.find_nodes(op="call_function", target=aten.clamp.default)
    assert clamp.meta["val"].dtype == torch.int64


def wide_integers(mod: Any) -> list[str]:
    """Operators of 64-bit integers that kernels print."""
    nodes = made_cheaper(mod).graph.nodes
    calls = (node for node in nodes if node.op == "call_function")
    return [str(n.target) for n in calls if n.meta["val"].dtype == torch.int64]


@pytest.mark.parametrize(
    "mod",
    [
        lambda s, b, h, q, k: s - TABLE[h] * (q.long() - k.long()).abs(),
        lambda s, b, h, q, k: torch.where(q.long() // 64 == k.long() // 64, s, 0.0),
        lambda s, b, h, q, k: torch.where(q.long() - k < 64 * (h.long() + 1), s, 0.0),
        lambda s, b, h, q, k: torch.where((3 * q.long() + k.long()) % 7 == k.long() % 5, s, 0.0),
        lambda s, b, h, q, k: torch.where((q.long() ^ k.long()) & 7 > 3, s, 0.0),
        lambda s, b, h, q, k: s + torch.where(q >= k, q.long(), k.long() - 2).float(),
    ],
    ids=["distance", "blocks", "heads", "remainders", "bits", "choice"],
)
def test_integers_that_fit_have_32_bits(mod):
    assert not wide_integers(mod)


@pytest.mark.parametrize(
    ("mod", "expected"),
    [
        # A hash of captured numbers, one that overflows 32 bits, and one half of a comparison.
        (
            lambda s, b, h, q, k: torch.where(TIMES[q % 8] == TIMES[k % 8], s, 0.0),
            ["aten.index.Tensor"] * 2,
        ),
        (lambda s, b, h, q, k: torch.where(q.long() * 40503 * 30011 % 7 < 3, s, 0.0), None),
        (lambda s, b, h, q, k: torch.where(TIMES[q % 8] >= k.long(), s, 0.0), None),
    ],
    ids=["captured", "product", "half"],
)
def test_integers_that_may_not_fit_have_64_bits(mod, expected):
    found = wide_integers(mod)
    assert found == expected if expected else found


def test_what_is_read_at_a_long_index_is_found_by_its_lower_half():
    kinds, table = torch.tensor([3, -1, 0, 2]), torch.randn(8)
    graph = trace_score(
        lambda s, b, h, q, k: s + table[kinds[q % 4] + 2 * kinds[k % 4]],
        torch.zeros(1, 1, 2, 64),
        (),
    )
    safe = wrap_reads(cheaper(graph, SCORE), SCORE, {"q": 64, "k": 64})
    (read,) = (
        n
        for n in safe.graph.find_nodes(op="call_function", target=aten.index.Tensor)
        if n.meta["val"].dtype == torch.float32
    )
    (index,) = read.args[1]
    assert index.meta["val"].dtype == torch.int32


DIVISIONS = (aten.floor_divide, aten.div, aten.remainder, aten.fmod)
SHIFTS = (aten.bitwise_and, aten.bitwise_right_shift)


def divisions(mod: Any) -> list[Any]:
    """The operators that divide integers, as kernels print them."""
    nodes = made_cheaper(mod).graph.find_nodes
    packets = [*DIVISIONS, *SHIFTS]
    found = (nodes(op="call_function", target=o) for p in packets for o in overloads(p))
    return [node.target.overloadpacket for group in found for node in group]


def overloads(packet: Any) -> list[Any]:
    return [getattr(packet, name) for name in packet.overloads()]


@pytest.mark.parametrize(
    ("mod", "expected"),
    [
        (lambda s, b, h, q, k: s + (q // 64), [aten.bitwise_right_shift]),
        (lambda s, b, h, q, k: s + ((q - k) // 64), [aten.bitwise_right_shift]),
        (lambda s, b, h, q, k: s + ((q - k) % 8), [aten.bitwise_and]),
        (lambda s, b, h, q, k: s + torch.div(q - k, 2, rounding_mode="floor"), SHIFTS[1:]),
        (lambda s, b, h, q, k: s + (k // 48), [aten.div]),
        (lambda s, b, h, q, k: s + (k % 48), [aten.fmod]),
        (lambda s, b, h, q, k: s + ((q - k) // 48), [aten.floor_divide]),
        (lambda s, b, h, q, k: s + ((q - k) % 48), [aten.remainder]),
        (lambda s, b, h, q, k: s + (k // -4), [aten.floor_divide]),
        (lambda s, b, h, q, k: s + k % torch.where(q > 3, 5, 7), [aten.remainder]),
        (lambda s, b, h, q, k: s + s // 4, [aten.floor_divide]),
    ],
)
def test_divisions_that_round_to_zero_or_shift(mod, expected):
    assert divisions(mod) == list(expected)


@pytest.mark.parametrize(
    "index",
    [lambda q: q // 4, lambda q: q % 4, lambda q: q >> 2, lambda q: q & 3, lambda q: q % 3],
)
def test_reads_at_quotients_need_no_limit(index):
    table = torch.zeros(16)
    graph = trace_score(lambda s, b, h, q, k: s + table[index(q)], torch.zeros(1, 1, 2, 64), ())
    safe = wrap_reads(cheaper(graph, SCORE), SCORE, {"q": 64})
    limits = [aten.where.self, aten.minimum.default]
    assert not [n for t in limits for n in safe.graph.find_nodes(op="call_function", target=t)]
