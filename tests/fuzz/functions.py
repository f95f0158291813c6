"""What an entry of the vocabulary is, and how entries become one mod.

An entry is a factory, from the captured values `c` of a problem to a mod; what it captures, from a
shape and random numbers; and which of that may be learned. Captures of different entries have
different names, so that entries can be combined.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch


class Entry(NamedTuple):
    """One function of the vocabulary."""

    make: Callable[[Any], Callable[..., Any]]
    captures: Callable[[Any, Any], dict[str, Any]] = lambda s, r: {}
    learned: tuple[str, ...] = ()
    ignores_score: bool = False


def span(s: Any) -> int:
    """The larger one of both lengths of a shape."""
    return max(s.q_len, s.kv_len)


def combine_masks(entries: list[Entry], how: str) -> Callable[[Any], Callable[..., Any]]:
    """One mask_mod of several.

    Args:
        entries: the masks.
        how: "and", "or", "not" (of all), "where" (the first decides), "product" (of numbers).
    """

    def make(c: Any) -> Callable[..., Any]:
        mods = [entry.make(c) for entry in entries]

        def combined(b, h, q, k):
            first, *others = (mod(b, h, q, k) for mod in mods)
            for other in others:
                first = _COMBINED[how](first, other)
            return ~first if how == "not" else first

        return combined

    return make


_COMBINED: dict[str, Callable[[Any, Any], Any]] = {
    "and": lambda x, y: x & y,
    "or": lambda x, y: torch.logical_or(x, y),
    "not": lambda x, y: x | ~y,
    "where": lambda x, y: torch.where(x, y, ~y),
    "product": lambda x, y: x.to(torch.int32) * y.to(torch.int32) == 1,
}


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
