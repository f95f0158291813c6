"""score_mods that add a line over keys: which they are, and the slopes that are found."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import flexhop
from flexhop.lowering.mods.lines import key_line, zero
from flexhop.lowering.mods.lower import read_mods
from flexhop.ops.graphs.subgraphs import trace_mask, trace_score

QUERY = torch.zeros(1, 1, 2, 64, dtype=torch.bfloat16)
TABLE = torch.tensor([0.5, -0.25, 2.0, 0.125])


def graph_of(mod: Any) -> torch.fx.GraphModule:
    return trace_score(mod, QUERY, ())


def steep(score, b, h, q_idx, kv_idx):
    return score + TABLE[h] * (kv_idx - q_idx)


LINES = {
    "alibi": steep,
    "mods_alibi": flexhop.mods.alibi(TABLE),
    "number": lambda s, b, h, q, k: s + 0.5 * k,
    "alone": lambda s, b, h, q, k: s + k,
    "downwards": lambda s, b, h, q, k: s - k * TABLE[h],
    "reversed": lambda s, b, h, q, k: (1 - k) * TABLE[h] + s,
    "quotient": lambda s, b, h, q, k: s + (k - q) / 8,
    "quotient_by_head": lambda s, b, h, q, k: s + (k - q) / (h + 1),
    "as_float": lambda s, b, h, q, k: s - (q.float() - k.float()) * TABLE[h],
    "alpha": lambda s, b, h, q, k: torch.add(s, k - q, alpha=0.5),
    "integers": lambda s, b, h, q, k: s + (3 * k - 2 * (q - k)),
    "long": lambda s, b, h, q, k: s + TABLE[h] * (k.long() - q),
    "by_query": lambda s, b, h, q, k: s + (q + 1) * 0.25 * k,
    "by_batch": lambda s, b, h, q, k: s + TABLE[b] * k - TABLE[h] * (q - k),
    "computed": lambda s, b, h, q, k: s + torch.exp2(-((h + 1) * 8.0 / 16)) * (k - q),
    "bias_beside_it": lambda s, b, h, q, k: (s + torch.sin(q.float())) + 0.5 * k - TABLE[h],
    "level": lambda s, b, h, q, k: s + 0.25 * h,
    "on_both_sides": lambda s, b, h, q, k: s + TABLE[h] * k - 0.25 * k,
    "in_64_bits": lambda s, b, h, q, k: (s + TABLE[h].double() * k).float(),
}


@pytest.mark.parametrize("name", LINES)
def test_the_slope_is_the_step_from_one_key_to_the_next(name):
    mod = LINES[name]
    line = key_line(graph_of(mod))
    assert line is not None
    assert line.bend is None
    slope = line.slope
    for b, h, q, k in ((0, 1, 7, 3), (1, 3, 0, 90), (3, 2, 50, 50)):
        at = [torch.tensor(n, dtype=torch.int32) for n in (b, h, q, k)]
        after = [*at[:3], at[3] + 1]
        score = torch.tensor(1.5, dtype=torch.float64)
        step = mod(score, *after) - mod(score, *at)
        found = slope(torch.tensor(0.0), *at)
        assert found.dtype == torch.float32
        torch.testing.assert_close(found.double(), step.double(), rtol=1e-6, atol=1e-6)


NO_LINES = {
    "identity_of_another_scale": lambda s, b, h, q, k: 2 * s + k,
    "bend_of_no_line": lambda s, b, h, q, k: s + (k * k - q).abs(),
    "bend_of_no_line_over_queries": lambda s, b, h, q, k: s + (q * q - k).abs(),
    "bend_at_a_table": lambda s, b, h, q, k: s + (TABLE[q % 4] - k).abs(),
    "bend_at_the_score": lambda s, b, h, q, k: s + (s + k).abs(),
    "bend_in_a_bend": lambda s, b, h, q, k: s + ((q - k).abs() - 3).abs(),
    "slope_over_a_magnitude": lambda s, b, h, q, k: s + k * (q - k).abs(),
    "table_of_keys": lambda s, b, h, q, k: s + TABLE[k % 4],
    "relative_table": lambda s, b, h, q, k: s + TABLE[(q - k) % 4],
    "square": lambda s, b, h, q, k: s + 0.1 * k * k,
    "times_score": lambda s, b, h, q, k: s + s * k,
    "score_of_key": lambda s, b, h, q, k: s * (k + 1),
    "rounded": lambda s, b, h, q, k: s + k // 2,
    "truncated": lambda s, b, h, q, k: s + (k * 0.5).int(),
    "soft_cap": lambda s, b, h, q, k: torch.tanh(s) + k,
    "soft_cap_of_all": lambda s, b, h, q, k: torch.tanh(s + k),
    "chosen_by_parity": lambda s, b, h, q, k: torch.where((q - k) % 2 == 0, s, s + k),
    "chosen_by_a_curve": lambda s, b, h, q, k: torch.where(k * (100 - k) > q, s, s + k),
    "chosen_by_a_distance": lambda s, b, h, q, k: torch.where((q - k).abs() < 9, s, s + k),
    "chosen_by_the_score": lambda s, b, h, q, k: torch.where(s > 0, s, s + k),
    "chosen_by_a_table": lambda s, b, h, q, k: torch.where(TABLE[k % 4] > 0, s, s + k),
    "chosen_scores": lambda s, b, h, q, k: torch.where(k > q, s, 2 * s),
    "no_score_on_one_side": lambda s, b, h, q, k: torch.where(k > q, s, -1.0),
    "bounded_score": lambda s, b, h, q, k: s.clamp(min=-3) + k,
    "one_over": lambda s, b, h, q, k: s + 1.0 / (k + 1),
    "in_16_bits": lambda s, b, h, q, k: s + TABLE.bfloat16()[h] * (k - q),
    "no_score": lambda s, b, h, q, k: 0.5 * k,
    "parity": lambda s, b, h, q, k: s + k.to(torch.int8),
    "step_of_any_size": lambda s, b, h, q, k: s + (q - k >= 12) * TABLE[h] - 0.25 * k,
}


@pytest.mark.parametrize("name", NO_LINES)
def test_what_is_no_line(name):
    assert key_line(graph_of(NO_LINES[name])) is None


BENDS = {
    "distance": lambda s, b, h, q, k: s - TABLE[h] * (q - k).abs(),
    "from_keys": lambda s, b, h, q, k: s + (k.float() - q).abs() * TABLE[h],
    "aligned": lambda s, b, h, q, k: s - TABLE[h] * (q + 40 * b - k).abs(),
    "by_batch": lambda s, b, h, q, k: s - TABLE[h] * (q + TABLE[b] * 100 - k).abs() + 0.5 * k,
    "of_keys": lambda s, b, h, q, k: s + 0.5 * (k - 30).abs() - k,
    "two": lambda s, b, h, q, k: s + (q - k).abs() + (k - 9).abs(),
    "chosen": lambda s, b, h, q, k: torch.where(k > q, s, s + k),
    "step": lambda s, b, h, q, k: torch.where(q - k < 12, s, s - 4.0),
    "step_beside_a_slope": lambda s, b, h, q, k: s + (q - k >= 12) * 2.5 - 0.25 * k,
    "step_of_a_slope": lambda s, b, h, q, k: s + (k > 20).float() * TABLE[h] * k,
    "same_tile": lambda s, b, h, q, k: s + torch.where(q // 16 == k // 16, 0.5 * h, 0.0),
    "other_tile": lambda s, b, h, q, k: s + torch.where(q // 16 != k // 16, -1.0 * k, 0.5 * k),
    "both": lambda s, b, h, q, k: torch.where((k < 20) | ~(q < k + 7), s, s - k * 0.5),
    "nested": lambda s, b, h, q, k: s + torch.where(
        q - k < 8, 3.0, torch.where(q - k < 20, 2.0, 0.5 * k)
    ),
    "bounded": lambda s, b, h, q, k: s - TABLE[h] * (q - k).clamp(min=-5, max=12),
    "least": lambda s, b, h, q, k: s - TABLE[h] * torch.minimum(q - k, 9 + h),
    "most": lambda s, b, h, q, k: s - TABLE[h] * torch.relu(q - k),
    "of_floats": lambda s, b, h, q, k: torch.where((q - k) * 0.1 < 1.5, s, s + 0.5 * k),
}  # fmt: skip


@pytest.mark.parametrize("name", BENDS)
def test_a_bend_parts_two_slopes(name):
    mod = BENDS[name]
    line = key_line(graph_of(mod))
    assert line is not None
    assert line.bend is not None
    sides = set()
    zero = torch.tensor(0.0)
    for k in range(0, 80, 3):
        at = [torch.tensor(n, dtype=torch.int32) for n in (1, 2, 33, k)]
        after = [*at[:3], at[3] + 1]
        side = float(line.bend(zero, *at))
        if float(line.bend(zero, *after)) != side:
            continue
        sides.add(side)
        score = torch.tensor(1.5, dtype=torch.float64)
        step = mod(score, *after) - mod(score, *at)
        found = line.slope(zero, *at)
        torch.testing.assert_close(found.double(), step.double(), rtol=1e-6, atol=1e-5)
    assert len(sides) >= 2


@pytest.mark.parametrize("name", BENDS)
def test_corners_on_the_same_sides_enclose_one_line(name):
    """Between them, the mod adds what it adds at the first key, and the slope from there on."""
    mod = BENDS[name]
    line = key_line(graph_of(mod))
    rows, columns = torch.meshgrid(
        *(torch.arange(64, dtype=torch.int32) for _ in "qk"), indexing="ij"
    )
    at = [torch.tensor(n, dtype=torch.int32) for n in (1, 2)]
    zero = torch.zeros(64, 64)
    sides, slopes = (
        part(zero, *at, rows, columns).expand(64, 64) for part in (line.bend, line.slope)
    )
    added = mod(zero.double(), *at, rows, columns)
    is_one, size = 0, 8
    for q in range(0, 64, size):
        for k in range(0, 64, size):
            ends = (q, q + size - 1), (k, k + size - 1)
            if len({float(sides[i, j]) for i in ends[0] for j in ends[1]}) > 1:
                continue
            is_one += 1
            tile = (slice(q, q + size), slice(k, k + size))
            slope = slopes[tile][:, size // 2, None].double()
            expected = added[tile][:, :1] + slope * torch.arange(size)
            torch.testing.assert_close(added[tile], expected, rtol=1e-5, atol=1e-4)
    assert is_one > 30


def test_no_score_mod_has_no_slope_to_follow():
    mask = trace_mask(lambda b, h, q, k: q >= k, QUERY, ())
    identity = graph_of(lambda s, b, h, q, k: s)
    assert not read_mods(identity, mask).has_key_slope
    assert read_mods(graph_of(steep), mask).has_key_slope
    assert not read_mods(graph_of(steep), mask).has_key_bend
    assert read_mods(graph_of(BENDS["distance"]), mask).has_key_bend
    positions = [torch.tensor(n, dtype=torch.int32) for n in (0, 0, 3, 4)]
    assert zero(identity)(torch.tensor(2.0), *positions) == 0.0


def test_captures_are_inputs_of_the_slope():
    def mod(score, b, h, q_idx, kv_idx, slopes):
        return score + slopes[h] * (kv_idx - q_idx)

    line = key_line(trace_score(mod, QUERY, (TABLE,)))
    assert line is not None
    positions = [torch.tensor(n, dtype=torch.int32) for n in (0, 2, 3, 4)]
    assert line.slope(torch.tensor(0.0), *positions, TABLE) == 2.0
