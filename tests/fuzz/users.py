"""What users of this library wrote, for problems from FIRST on: others keep their functions.

Radial attention, coordinates of positions, masks in bits of words, blocks chosen by top-k, trees,
and rows that no kernel computes.
"""

from __future__ import annotations

import torch
from torch.nn.functional import embedding, pad

from tests.fuzz.functions import Entry, span

FIRST = 2 * 10**9  # the smallest number of a problem that may have these
BY_HEAD = frozenset({"best_blocks"})
_SIDE = 8  # of a grid of positions
_WORD = 32  # bits


def _radial(c):
    def mod(b, h, q, k):
        distance = (q // _SIDE - k // _SIDE).abs()
        return (q % _SIDE - k % _SIDE).abs() < _SIDE // (2**distance).clamp(min=1, max=_SIDE)

    return mod


def _coordinates(place):
    return torch.unravel_index(place, (2**12, _SIDE))


def _near_coordinates(c):
    def mod(b, h, q, k):
        (q_row, q_column), (k_row, k_column) = map(_coordinates, (q, k))
        return ((q_row - k_row).abs() <= 2) & ((q_column - k_column).abs() <= 3)

    return mod


def _ancestors(c):
    """Whether a key is the query, its parent, or the parent of that one."""

    def mod(b, h, q, k):
        parent = c.parents[q]
        return (k == q) | (k == parent) | (k == c.parents[parent])

    return mod


def _tree(s, r):
    """Parents of nodes, each before its child."""
    length = span(s)
    return {"parents": (r.uniform(length) * torch.arange(length)).to(torch.int32)}


def _words(s, r):
    return {"words": r.integers(2**31 - 1, s.q_len, s.kv_len // _WORD + 1)}


def _blocks(s, r):
    columns = s.kv_len // 16 + 1
    scores = r.uniform(s.heads, s.q_len // 16 + 1, columns)
    return {"best": scores.topk(min(3, columns), -1).indices.int()}


MASKS: dict[str, Entry] = {
    "radial": Entry(_radial),
    "near_coordinates": Entry(_near_coordinates),
    "ancestors": Entry(_ancestors, _tree),
    "words": Entry(
        lambda c: lambda b, h, q, k: ((c.words[q, k // _WORD] >> (k % _WORD)) & 1) == 1, _words
    ),
    "bytes_of_flags": Entry(
        lambda c: lambda b, h, q, k: ((c.flag_bytes[q, k >> 3] >> (k & 7)) & 1).bool(),
        lambda s, r: {
            "flag_bytes": r.integers(256, s.q_len, s.kv_len // 8 + 1).to(torch.uint8)
        },
    ),
    "best_blocks": Entry(
        lambda c: lambda b, h, q, k: (c.best[h, q // 16] == k // 16).any() | (q == k), _blocks
    ),
}  # fmt: skip

SCORES: dict[str, Entry] = {
    "halved": Entry(lambda c: lambda s, b, h, q, k: s / (2 ** ((q - k).abs() // 16).clamp(max=9))),
    "columns": Entry(
        lambda c: lambda s, b, h, q, k: (
            s + c.of_column[h, _coordinates(q)[1] - _coordinates(k)[1] + _SIDE - 1]
        ),
        lambda s, r: {"of_column": r.normal(s.heads, 2 * _SIDE - 1)},
        ("of_column",),
    ),
    "summed_steps": Entry(
        lambda c: lambda s, b, h, q, k: s + c.increments[h].cumsum(0)[(q - k).abs() % 6] * 0.3,
        lambda s, r: {"increments": r.normal(s.heads, 6)},
        ("increments",),
    ),
    "ordered": Entry(
        lambda c: lambda s, b, h, q, k: s + c.unordered[h].sort().values[(q * k) % 5],
        lambda s, r: {"unordered": r.normal(s.heads, 5)},
        ("unordered",),
    ),
    "shifted_row": Entry(
        lambda c: lambda s, b, h, q, k: s + pad(c.row[h], (1, 0))[(q + k) % 5],
        lambda s, r: {"row": r.normal(s.heads, 4)},
        ("row",),
    ),
    "padded_kinds": Entry(
        lambda c: lambda s, b, h, q, k: s + embedding(c.kind[k], c.of_kind, 0)[h],
        lambda s, r: {"kind": r.integers(4, s.kv_len), "of_kind": r.normal(4, s.heads)},
        ("of_kind",),
    ),
}  # fmt: skip
