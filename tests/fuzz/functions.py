"""The vocabulary of random functions: what users write, with the tensors that it captures.

An entry is a factory, from the captured values `c` of a case to a mod; what it captures, from a
shape and random numbers; and which of that may be learned. Captures of different entries have
different names, so that entries can be combined.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

import flexhop


class Entry(NamedTuple):
    """One function of the vocabulary."""

    make: Callable[[Any], Callable[..., Any]]
    captures: Callable[[Any, Any], dict[str, Any]] = lambda s, r: {}
    learned: tuple[str, ...] = ()
    ignores_score: bool = False


MASKS: dict[str, Entry] = {
    "causal": Entry(lambda c: lambda b, h, q, k: q >= k),
    "anticausal": Entry(lambda c: lambda b, h, q, k: k > q),
    "window": Entry(lambda c: lambda b, h, q, k: (q - k).abs() <= 19),
    "band": Entry(lambda c: lambda b, h, q, k: (k - q > 3) & (k - q < 60)),
    "dilated": Entry(lambda c: lambda b, h, q, k: (q - k) % 5 == 0),
    "blocked": Entry(lambda c: lambda b, h, q, k: q // 11 >= k // 11),
    "bitwise": Entry(lambda c: lambda b, h, q, k: ((q ^ k) & 4) == 0),
    "quotient": Entry(lambda c: lambda b, h, q, k: (q - k).abs() / 7 < 3.1),
    "heads": Entry(lambda c: lambda b, h, q, k: (h % 2 == 0) | (k % 3 == 0)),
    "rows": Entry(lambda c: lambda b, h, q, k: q % 3 != 1),
    "nothing": Entry(lambda c: lambda b, h, q, k: q < 0),
    "documents": Entry(
        lambda c: lambda b, h, q, k: c.rows_of[b, q] == c.keys_of[b, k],
        lambda s, r: {
            "rows_of": r.documents(4, s.batch, s.q_len),
            "keys_of": r.documents(4, s.batch, s.kv_len),
        },
    ),
    "prefix": Entry(
        lambda c: lambda b, h, q, k: k < c.prefix[b],
        lambda s, r: {"prefix": r.integers(s.kv_len + 1, s.batch)},
    ),
    "table": Entry(
        lambda c: lambda b, h, q, k: c.kept[k, q],
        lambda s, r: {"kept": r.flags(s.kv_len, s.q_len)},
    ),
    "offset": Entry(lambda c: lambda b, h, q, k: q + c.shift >= k, lambda s, r: {"shift": 7}),
}

SCORES: dict[str, Entry] = {
    "alibi": Entry(
        lambda c: lambda s, b, h, q, k: s + c.slopes[h] * (k - q),
        lambda s, r: {"slopes": r.uniform(s.heads) * 0.1},
        ("slopes",),
    ),
    "relative": Entry(
        lambda c: lambda s, b, h, q, k: s + c.distance[h, q - k + c.shape.kv_len - 1],
        lambda s, r: {"distance": r.normal(s.heads, s.q_len + s.kv_len - 1)},
        ("distance",),
    ),
    "clamped": Entry(
        lambda c: lambda s, b, h, q, k: s + c.near[torch.clamp(q - k, -9, 9) + 9],
        lambda s, r: {"near": r.normal(19)},
        ("near",),
    ),
    "pair": Entry(
        lambda c: lambda s, b, h, q, k: s + c.pair[h, q, k],
        lambda s, r: {"pair": r.normal(s.heads, s.q_len, s.kv_len)},
        ("pair",),
    ),
    "key": Entry(
        lambda c: lambda s, b, h, q, k: s * c.by_key[k],
        lambda s, r: {"by_key": 0.5 + r.uniform(s.kv_len)},
        ("by_key",),
    ),
    "gate": Entry(
        lambda c: lambda s, b, h, q, k: s * torch.sigmoid(c.gate[b, h]),
        lambda s, r: {"gate": r.normal(s.batch, s.heads)},
        ("gate",),
    ),
    "cap": Entry(lambda c: lambda s, b, h, q, k: 5.0 * torch.tanh(s / 5.0)),
    "clamp": Entry(lambda c: lambda s, b, h, q, k: torch.clamp(s, -2.0, 2.0)),
    "silu": Entry(lambda c: lambda s, b, h, q, k: torch.nn.functional.silu(s)),
    "square": Entry(lambda c: lambda s, b, h, q, k: s * s * 0.1),
    "hidden": Entry(lambda c: lambda s, b, h, q, k: s.masked_fill(q + 40 < k, -math.inf)),
    "branch": Entry(lambda c: lambda s, b, h, q, k: torch.where(q >= k, s + 0.7, s * 0.5)),
    "zeros": Entry(lambda c: lambda s, b, h, q, k: torch.zeros_like(s), ignores_score=True),
    "keys": Entry(lambda c: lambda s, b, h, q, k: (k % 7) * 0.3, ignores_score=True),
    "alone": Entry(
        lambda c: lambda s, b, h, q, k: c.alone[h, (q - k).abs()],
        lambda s, r: {"alone": r.normal(s.heads, max(s.q_len, s.kv_len))},
        ("alone",),
        True,
    ),
}


def combine_masks(entries: list[Entry], how: str) -> Callable[[Any], Callable[..., Any]]:
    """One mask_mod of several: "and" or "or"."""
    combine = flexhop.and_masks if how == "and" else flexhop.or_masks
    return lambda c: combine(*(entry.make(c) for entry in entries))


def chain_scores(entries: list[Entry]) -> Callable[[Any], Callable[..., Any]]:
    """One score_mod that applies several, one after the other."""

    def make(c: Any) -> Callable[..., Any]:
        mods = [entry.make(c) for entry in entries]

        def chained(s, b, h, q, k):
            for mod in mods:
                s = mod(s, b, h, q, k)
            return s

        return chained

    return make
