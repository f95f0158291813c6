"""Rows of numbers, and what they are read for, for problems from FIRST on: others keep theirs.

Up to forty learned numbers of a query, of a key or of a head, of which a mod computes one;
windows in two and three dimensions; functions that few users know.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F

from tests.fuzz.functions import Entry, span

FIRST = 36 * 10**8  # the smallest number of a problem that may have these
_SIDE = 7  # of a window


def rows(name, length, width, factor=1.0):
    """Rows of numbers of positions: `length` is "q", "k" or "both"."""

    def captures(s, r):
        rows = {"q": s.q_len, "k": s.kv_len, "both": span(s)}[length]
        return {name: factor * r.normal(rows, width)}

    return captures


def two_rows(left, right, width, factor=1.0):
    def captures(s, r):
        return {left: factor * r.normal(s.q_len, width), right: factor * r.normal(s.kv_len, width)}

    return captures


def alike(*tensors):
    """Of one dtype: the oracle has learned tensors in fp64, and products take no two dtypes."""
    dtype = functools.reduce(torch.promote_types, [tensor.dtype for tensor in tensors])
    return [tensor.to(dtype) for tensor in tensors]


def _in_window(place):
    """A position in a packed window of 7 x 7."""
    return place // _SIDE % _SIDE, place % _SIDE


def _packed_windows(c):
    def mod(s, b, h, q, k):
        (q_row, q_column), (k_row, k_column) = map(_in_window, (q, k))
        rows, columns = q_row - k_row + _SIDE - 1, q_column - k_column + _SIDE - 1
        return s + c.of_window[rows * (2 * _SIDE - 1) + columns, h]

    return mod


def _axial(c):
    """A position is a frame, a row and a column; each distance has a table."""

    def parts(place):
        return place // 12, place // 4 % 3, place % 4

    def mod(s, b, h, q, k):
        apart = [x - y for x, y in zip(parts(q), parts(k), strict=True)]
        time = c.of_time[h, apart[0].clamp(-5, 5) + 5]
        return s + time + c.of_axis[0, apart[1] + 3] + c.of_axis[1, apart[2] + 3]

    return mod


def _mixed(c):
    """A softmax over a row of the query weighs a row of the head."""

    def mod(s, b, h, q, k):
        weights = torch.softmax(c.choice_of[q], -1)
        return s + (weights * c.chosen_bias[h]).sum(-1)

    return mod


def _layer(c):
    def mod(s, b, h, q, k):
        layer, inputs = alike(c.layer, c.input_of)
        hidden = torch.tanh(layer @ inputs[k] + c.layer_bias)
        return s + (hidden * c.layer_out).sum()

    return mod


def _bilinear(c):
    def mod(s, b, h, q, k):
        left, form, right = alike(c.form_left, c.form, c.form_right)
        return s + left[q] @ form[h] @ right[k]

    return mod


def _einsum(c):
    def mod(s, b, h, q, k):
        left, right = alike(c.sum_left, c.sum_right)
        return s + torch.einsum("i,i->", left[q], right[k])

    return mod


def _popcount(x):
    return sum((x >> i) & 1 for i in range(8))


SCORES: dict[str, Entry] = {
    "row_of_key": Entry(
        lambda c: lambda s, b, h, q, k: s + c.key_row[k].tanh().sum() * 0.3,
        rows("key_row", "k", 5), ("key_row",),
    ),
    "row_of_query": Entry(
        lambda c: lambda s, b, h, q, k: s * (1 + c.query_row[q].square().mean()),
        rows("query_row", "q", 9), ("query_row",),
    ),
    "wide_row_of_key": Entry(
        lambda c: lambda s, b, h, q, k: s + torch.sigmoid(c.wide_row[k]).mean(-1),
        rows("wide_row", "k", 40), ("wide_row",),
    ),
    "row_of_batch": Entry(
        lambda c: lambda s, b, h, q, k: s - F.softplus(c.batch_rows[b, k]).sum() * 0.1,
        lambda s, r: {"batch_rows": r.normal(s.batch, s.kv_len, 6)}, ("batch_rows",),
    ),
    "log_of_row": Entry(
        lambda c: lambda s, b, h, q, k: s + torch.logsumexp(c.logit_row[k], 0),
        rows("logit_row", "k", 8), ("logit_row",),
    ),
    "largest_of_row": Entry(
        lambda c: lambda s, b, h, q, k: s + c.peak_row[q].amax() - c.peak_row[k].amin(),
        rows("peak_row", "both", 5), ("peak_row",),
    ),
    "dot": Entry(
        lambda c: lambda s, b, h, q, k: s + (c.dot_left[q] * c.dot_right[k]).sum(-1),
        two_rows("dot_left", "dot_right", 16, 0.4), ("dot_left", "dot_right"),
    ),
    "einsum": Entry(
        _einsum, two_rows("sum_left", "sum_right", 6, 0.5), ("sum_left", "sum_right"),
    ),
    "similar": Entry(
        lambda c: lambda s, b, h, q, k: s + F.cosine_similarity(c.look[q], c.seen[k], dim=-1),
        two_rows("look", "seen", 7), ("look", "seen"),
    ),
    "norm": Entry(
        lambda c: lambda s, b, h, q, k: (
            s - torch.linalg.vector_norm(c.where_to[q] - c.where_at[k] + 3.0)
        ),
        two_rows("where_to", "where_at", 3, 0.3), ("where_to", "where_at"),
    ),
    "first_powers": Entry(
        lambda c: lambda s, b, h, q, k: s - (c.spot_to[q] - c.spot_at[k]).abs().sum(-1) * 0.3,
        two_rows("spot_to", "spot_at", 5), ("spot_to", "spot_at"),
    ),
    "gaussian": Entry(
        lambda c: lambda s, b, h, q, k: (
            s * torch.exp(-((c.mean_to[q] - c.mean_at[k]) ** 2).sum(-1) / c.spread_of[h])
        ),
        lambda s, r: two_rows("mean_to", "mean_at", 3, 0.4)(s, r)
        | {"spread_of": 1 + r.uniform(s.heads)},
        ("mean_to", "mean_at", "spread_of"),
    ),
    "mixed_by_query": Entry(
        _mixed,
        lambda s, r: {"choice_of": r.normal(s.q_len, 6), "chosen_bias": r.normal(s.heads, 6)},
        ("choice_of", "chosen_bias"),
    ),
    "layer": Entry(
        _layer,
        lambda s, r: {
            "layer": r.normal(6, 4), "input_of": r.normal(s.kv_len, 4), "layer_bias": r.normal(6),
            "layer_out": r.normal(6) * 0.4,
        },
        ("layer", "input_of", "layer_bias", "layer_out"),
    ),
    "bilinear": Entry(
        _bilinear,
        lambda s, r: two_rows("form_left", "form_right", 4, 0.5)(s, r)
        | {"form": r.normal(s.heads, 4, 4)},
        ("form_left", "form", "form_right"),
    ),
    "packed_windows": Entry(
        _packed_windows, lambda s, r: {"of_window": r.normal((2 * _SIDE - 1) ** 2, s.heads)},
        ("of_window",),
    ),
    "axial": Entry(
        _axial, lambda s, r: {"of_time": r.normal(s.heads, 11), "of_axis": r.normal(2, 7)},
        ("of_time", "of_axis"),
    ),
    "two_directions": Entry(
        lambda c: lambda s, b, h, q, k: s + torch.where(q < k, c.after[h], c.before[h])
        * torch.log2((q - k).abs() + 2.0),
        lambda s, r: {"after": -r.uniform(s.heads), "before": -r.uniform(s.heads)},
        ("after", "before"),
    ),
    "forgetting": Entry(
        lambda c: lambda s, b, h, q, k: s + c.logs[b, h, q] - c.logs[b, h, k],
        lambda s, r: {"logs": -r.uniform(s.batch, s.heads, span(s)).cumsum(-1) * 0.2}, ("logs",),
    ),
    "horner": Entry(
        lambda c: lambda s, b, h, q, k: (
            s + ((c.cubic[0] * (q - k) * 0.02 + c.cubic[1]) * (q - k) * 0.02 + c.cubic[2])
        ),
        lambda s, r: {"cubic": r.normal(3)}, ("cubic",),
    ),
    "bounds_of_head": Entry(
        lambda c: lambda s, b, h, q, k: torch.clamp(s, c.least_of[h], c.most_of[h]),
        lambda s, r: {"least_of": -1 - r.uniform(s.heads), "most_of": 1 + r.uniform(s.heads)},
        ("least_of", "most_of"),
    ),
    "many_tables": Entry(
        lambda c: lambda s, b, h, q, k: (
            s + c.first_of[h, q % 3] + c.second_of[k % 4] * c.third_of[(q + k) % 5]
            - c.fourth_of[(q * k) % 6]
        ),
        lambda s, r: {
            "first_of": r.normal(s.heads, 3), "second_of": r.normal(4), "third_of": r.normal(5),
            "fourth_of": r.normal(6),
        },
        ("first_of", "second_of", "third_of", "fourth_of"),
    ),
    "looked_up_twice": Entry(
        lambda c: lambda s, b, h, q, k: s + c.cluster_bias[c.cluster[c.member[q]], c.cluster[k]],
        lambda s, r: {
            "cluster_bias": r.normal(4, 4), "cluster": r.integers(4, span(s)),
            "member": r.integers(span(s), span(s)).long(),
        },
        ("cluster_bias",),
    ),
    "rotated": Entry(
        lambda c: lambda s, b, h, q, k: (
            s + c.phase[h] * torch.sin(q * 0.3) * torch.cos(k * 0.3)
        ),
        lambda s, r: {"phase": r.normal(s.heads)}, ("phase",),
    ),
    "squashed": Entry(lambda c: lambda s, b, h, q, k: s / (1 + s.abs()) + F.relu6(s + 1)),
    "shrunk": Entry(lambda c: lambda s, b, h, q, k: F.softshrink(s, 0.3) + F.hardtanh(s)),
    "normal_log": Entry(lambda c: lambda s, b, h, q, k: torch.special.log_ndtr(s)),
    "entropy": Entry(lambda c: lambda s, b, h, q, k: torch.special.entr(torch.sigmoid(s)) * 4),
    "xlogy": Entry(lambda c: lambda s, b, h, q, k: s + torch.xlogy(0.1 * h, (q - k).abs() + 1)),
    # Never 0, where the derivative is as large as a rounding, fused or not, makes it.
    "angles": Entry(lambda c: lambda s, b, h, q, k: s + torch.atan2(s, (q - k) * 0.1 + 2.05)),
    "multiplied_out": Entry(
        lambda c: lambda s, b, h, q, k: torch.addcdiv(s, s, (k % 5) + 2.0, value=0.5).neg().abs()
    ),
    "signed_log": Entry(lambda c: lambda s, b, h, q, k: s.sign() * (s.abs() + 1).log2()),
    "steps": Entry(
        lambda c: lambda s, b, h, q, k: s + torch.heaviside((q - k).float(), c.half_step) * 0.5,
        lambda s, r: {"half_step": torch.tensor(0.5)},
    ),
}  # fmt: skip

MASKS: dict[str, Entry] = {
    "equal_rows": Entry(
        lambda c: lambda b, h, q, k: (c.labels[q] == c.labels[k]).any(-1),
        lambda s, r: {"labels": r.integers(5, span(s), 3)},
    ),
    "all_labels": Entry(
        lambda c: lambda b, h, q, k: (c.needs[q] <= c.offers[k]).all(),
        lambda s, r: {"needs": r.integers(3, s.q_len, 2), "offers": r.integers(4, s.kv_len, 2)},
    ),
    "near_rows": Entry(
        lambda c: lambda b, h, q, k: torch.linalg.vector_norm(c.close_to[q] - c.close_at[k]) < 1.5,
        two_rows("close_to", "close_at", 2),
    ),
    "shared_bits": Entry(
        lambda c: lambda b, h, q, k: (c.groups_of[q] & c.groups_of[k]) != 0,
        lambda s, r: {"groups_of": r.integers(2**16, span(s)).to(torch.int64) & 0x1111},
    ),
    "bit_of_key": Entry(
        lambda c: lambda b, h, q, k: (c.bit_words[q] >> (k % 16)) & 1 == 1,
        lambda s, r: {"bit_words": r.integers(2**16, s.q_len)},
    ),
    "few_bits": Entry(lambda c: lambda b, h, q, k: _popcount((q ^ k) & 255) <= 2),
    "period_of_head": Entry(
        lambda c: lambda b, h, q, k: (q - k) % c.period_of[h] == 0,
        lambda s, r: {"period_of": 1 + r.integers(7, s.heads)},
    ),
    "powers_of_two": Entry(
        lambda c: lambda b, h, q, k: (q == k) | (((q - k) & (q - k - 1)) == 0) & (q > k)
    ),
    "within_budget": Entry(
        lambda c: lambda b, h, q, k: c.rank_of[k] < c.budget_of[q],
        lambda s, r: {
            "rank_of": r.uniform(s.kv_len).argsort().int(),
            "budget_of": r.integers(s.kv_len + 1, s.q_len),
        },
    ),
    "hexagons": Entry(
        lambda c: lambda b, h, q, k: (
            (q // 6 - k // 6).abs() + (q % 6 - k % 6 + (q // 6 - k // 6) // 2).abs() <= 3
        )
    ),
    "logarithmic": Entry(
        lambda c: lambda b, h, q, k: torch.frac(torch.log2((q - k).abs() + 1.5)) < 0.4
    ),
    "turns": Entry(
        lambda c: lambda b, h, q, k: (c.speaker[q] != c.speaker[k]) & (c.turn[q] >= c.turn[k]),
        lambda s, r: {"speaker": r.integers(3, span(s)), "turn": r.documents(6, span(s))},
    ),
    "between": Entry(
        lambda c: lambda b, h, q, k: (c.opens[q] <= k) & (k < c.opens[q] + c.lasts[q]),
        lambda s, r: {
            "opens": r.integers(s.kv_len, s.q_len), "lasts": r.integers(20, s.q_len).long()
        },
    ),
    "sorted_lengths": Entry(
        lambda c: lambda b, h, q, k: k < torch.minimum(c.room[b], q + c.lead[h]),
        lambda s, r: {
            "room": r.integers(s.kv_len + 1, s.batch), "lead": 1 + r.integers(30, s.heads)
        },
    ),
    "half_known": Entry(
        lambda c: lambda b, h, q, k: c.known[b, k] | (q == k) | ~c.known[b, q],
        lambda s, r: {"known": r.flags(s.batch, span(s))},
    ),
    "triangles": Entry(
        lambda c: lambda b, h, q, k: (
            torch.floor((torch.sqrt(8.0 * q + 1) - 1) / 2)
            == torch.floor((torch.sqrt(8.0 * k + 1) - 1) / 2)
        )
    ),
    "spaced": Entry(lambda c: lambda b, h, q, k: (q - k) % (1 + (q - k).abs() // 16) == 0),
    "gathered_flags": Entry(
        lambda c: lambda b, h, q, k: torch.take(c.flat_flags, q // 4 * 40 + k // 4 % 40),
        lambda s, r: {"flat_flags": r.flags(40 * (s.q_len // 4 + 1))},
    ),
}  # fmt: skip
BY_BATCH = frozenset({"sorted_lengths", "half_known"})
BY_HEAD = frozenset({"period_of_head", "sorted_lengths"})
