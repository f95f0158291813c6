"""More of what users write, for problems from FIRST on: others keep their functions.

Tensors of NumPy, which are fp64; times that fp32 cannot tell apart; the largest of several scores;
small networks of a distance; masks that search, count and measure.
"""

from __future__ import annotations

import functools

import torch
from torch.nn.functional import celu, prelu, relu, selu, softplus

from tests.fuzz.functions import Entry, span

FIRST = 35 * 10**8  # the smallest number of a problem that may have these
_START = 1.7e9  # seconds: of fp32, neighbours are 128 apart


def _times(s, r):
    """Times of queries and of keys within a few seconds."""
    ordered = [_START + 5 * r.uniform(n).double().sort().values for n in (s.q_len, s.kv_len)]
    return dict(zip(("asked_at", "known_at"), ordered, strict=True))


def _moments(s, r):
    """As `_times`, under names of their own."""
    return dict(zip(("sent_at", "got_at"), _times(s, r).values(), strict=True))


def _double(name, *sizes):
    return lambda s, r: {name: r.normal(*(n(s) if callable(n) else n for n in sizes)).double()}


def _of_heads(s):
    return s.heads


MASKS: dict[str, Entry] = {
    "moments": Entry(
        lambda c: lambda b, h, q, k: (c.sent_at[q] - c.got_at[k]).abs() < 1.7, _moments
    ),
    "double_levels": Entry(
        lambda c: lambda b, h, q, k: c.double_level[q] >= c.double_step[k] - 0.3,
        lambda s, r: {
            "double_level": r.uniform(s.q_len).double(),
            "double_step": r.uniform(s.kv_len).double(),
        },
    ),
    "between_bounds": Entry(
        lambda c: (
            lambda b, h, q, k: (
                torch.searchsorted(c.bounds, q, right=True)
                == torch.searchsorted(c.bounds, k, right=True)
            )
        ),
        lambda s, r: {"bounds": torch.tensor([0, 10, 25, 40], dtype=torch.int32)},
    ),
    "counted": Entry(
        lambda c: lambda b, h, q, k: (c.starts_of <= q).sum() >= (c.starts_of <= k).sum(),
        lambda s, r: {"starts_of": torch.tensor([5, 12, 25, 47])},
    ),
    "special_keys": Entry(
        lambda c: lambda b, h, q, k: torch.isin(k, c.special) | (q >= k),
        lambda s, r: {"special": torch.tensor([0, 3, 9], dtype=torch.int32)},
    ),
    "any_of": Entry(
        lambda c: (
            lambda b, h, q, k: functools.reduce(
                torch.logical_or, [(k == i) for i in (0, 2, 5)], q - k >= 4
            )
        )
    ),
    "all_of": Entry(lambda c: lambda b, h, q, k: torch.stack([q >= k, q - k < 20, k >= 0]).all()),
    "one_bit": Entry(lambda c: lambda b, h, q, k: ((q ^ k) & ((q ^ k) - 1)) == 0),
    "close": Entry(lambda c: lambda b, h, q, k: torch.isclose(q.float(), k.float(), atol=7.0)),
    "far_cells": Entry(
        lambda c: lambda b, h, q, k: (c.cell_of[q] - c.cell_at[k]).abs().amax() > 2,
        lambda s, r: {"cell_of": r.integers(8, s.q_len, 3), "cell_at": r.integers(8, s.kv_len, 3)},
    ),
    "one_side": Entry(
        lambda c: lambda b, h, q, k: torch.dot(c.toward[q], c.here[k]) > 0,
        lambda s, r: {"toward": r.normal(s.q_len, 2), "here": r.normal(s.kv_len, 2)},
    ),
    "above_median": Entry(
        lambda c: lambda b, h, q, k: (c.worth[k] >= c.worth.median()) | (q == k),
        lambda s, r: {"worth": r.normal(s.kv_len)},
    ),
    "numbers": Entry(lambda c: lambda b, h, q, k: ((q >= k).int() + (k < 3).int()) > 0),
}

SCORES: dict[str, Entry] = {
    "double_table": Entry(
        lambda c: lambda s, b, h, q, k: s + c.double_bias[h, (q - k).abs() % 16],
        _double("double_bias", _of_heads, 16), ("double_bias",),
    ),
    "double_slopes": Entry(
        lambda c: lambda s, b, h, q, k: s - c.double_slope[h] * (q - k).abs() * 0.1,
        _double("double_slope", _of_heads), ("double_slope",),
    ),
    "double_factor": Entry(
        lambda c: lambda s, b, h, q, k: s * c.double_factor[h],
        _double("double_factor", _of_heads), ("double_factor",),
    ),
    "double_keys": Entry(
        lambda c: lambda s, b, h, q, k: torch.tanh(s + c.double_key[k]),
        lambda s, r: {"double_key": r.normal(s.kv_len).double()}, ("double_key",),
    ),
    "double_score": Entry(lambda c: lambda s, b, h, q, k: 3 * torch.tanh(s.double() / 3)),
    "times": Entry(
        lambda c: lambda s, b, h, q, k: s - 0.2 * (c.asked_at[q] - c.known_at[k]).abs(), _times
    ),
    "times_twice": Entry(
        lambda c: lambda s, b, h, q, k: s - c.left_at[q] + c.came_at[k],
        lambda s, r: dict(zip(("left_at", "came_at"), _times(s, r).values(), strict=True)),
    ),
    "converted": Entry(
        lambda c: lambda s, b, h, q, k: s + c.narrow_bias[h, (q - k).abs() % 8].to(s.dtype),
        lambda s, r: {"narrow_bias": r.normal(s.heads, 8).bfloat16()}, ("narrow_bias",),
    ),
    "flipped": Entry(
        lambda c: lambda s, b, h, q, k: s + c.flip_bias[h].flip(0)[(q + k) % 4],
        lambda s, r: {"flip_bias": r.normal(s.heads, 4)}, ("flip_bias",),
    ),
    "largest_of": Entry(
        lambda c: lambda s, b, h, q, k: torch.stack([s, c.least[h], -s]).max(0).values,
        lambda s, r: {"least": r.normal(s.heads)}, ("least",),
    ),
    "nearest": Entry(
        lambda c: lambda s, b, h, q, k: s - (c.near_to[q] - c.near_at[k]).abs().min(-1)[0],
        lambda s, r: {"near_to": r.normal(s.q_len, 3), "near_at": r.normal(s.kv_len, 3)},
        ("near_to", "near_at"),
    ),
    "halved_by": Entry(lambda c: lambda s, b, h, q, k: torch.ldexp(s, -(q % 3))),
    "network": Entry(
        lambda c: lambda s, b, h, q, k: (
            s + (relu(c.hidden * ((q - k) * 0.1) + c.offset) * c.out_of[h]).sum(-1)
        ),
        lambda s, r: {
            "hidden": r.normal(6), "offset": r.normal(6), "out_of": r.normal(s.heads, 6)
        },
        ("hidden", "offset", "out_of"),
    ),
    "waves": Entry(
        lambda c: lambda s, b, h, q, k: s + (torch.cos((q - k) * c.rate) * c.height[h]).sum(),
        lambda s, r: {"rate": r.normal(4), "height": r.normal(s.heads, 4)}, ("rate", "height"),
    ),
    "log_kernel": Entry(
        lambda c: lambda s, b, h, q, k: (
            s
            - softplus(c.kernel_height[h])
            * torch.log1p(softplus(c.kernel_rate[h]) * (q - k).abs())
        ),
        lambda s, r: {"kernel_height": r.normal(s.heads), "kernel_rate": r.normal(s.heads)},
        ("kernel_height", "kernel_rate"),
    ),
    "between_entries": Entry(
        lambda c: lambda s, b, h, q, k: s + torch.lerp(
            c.knots[h, ((q - k).abs() // 4).clamp(max=8)],
            c.knots[h, ((q - k).abs() // 4).clamp(max=8) + 1],
            ((q - k).abs() % 4).to(c.knots.dtype) / 4,
        ),
        lambda s, r: {"knots": r.normal(s.heads, 10)}, ("knots",),
    ),
    "prelu": Entry(
        lambda c: lambda s, b, h, q, k: prelu(s.reshape(1), c.leak.to(s.dtype)).squeeze(0),
        lambda s, r: {"leak": r.normal(1)}, ("leak",),
    ),
    "selu": Entry(lambda c: lambda s, b, h, q, k: selu(s) + celu(s, 0.5)),
    "lerp": Entry(
        lambda c: lambda s, b, h, q, k: torch.lerp(s, -s, c.toward_less[h].to(s.dtype)),
        lambda s, r: {"toward_less": r.normal(s.heads)}, ("toward_less",),
    ),
    "gated": Entry(
        lambda c: lambda s, b, h, q, k: s * torch.sigmoid(c.query_gate[q] + c.key_gate[k]),
        lambda s, r: {"query_gate": r.normal(s.q_len), "key_gate": r.normal(s.kv_len)},
        ("query_gate", "key_gate"),
    ),
    "logits": Entry(lambda c: lambda s, b, h, q, k: torch.logit(torch.sigmoid(s) * 0.9 + 0.05)),
    "sinc": Entry(lambda c: lambda s, b, h, q, k: s * torch.sinc((q - k) * 0.1)),
    "longest": Entry(
        lambda c: lambda s, b, h, q, k: s + c.by_place[(q * 3 + k) % span(c.shape)],
        lambda s, r: {"by_place": r.normal(span(s))}, ("by_place",),
    ),
}  # fmt: skip
