"""Layouts: which rank owns which chunk of the sequence.

A layout is a function of the work per chunk. Every rank gets the same number of chunks, and so the
same number of tokens.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from typing import Literal

Layout = Literal["contiguous", "zigzag", "greedy"]


def contiguous(work: Sequence[float], ranks: int) -> list[int]:
    """Neighbouring chunks stay together: least traffic for windows and short documents."""
    per_rank = len(work) // ranks
    return [chunk // per_rank for chunk in range(len(work))]


def zigzag(work: Sequence[float], ranks: int) -> list[int]:
    """A chunk from the front and its mirror image from the back: balanced for one causal sequence.

    Requires an even number of chunks per rank.
    """
    half = len(work) // 2
    head = [chunk // (half // ranks) for chunk in range(half)]
    return [*head, *reversed(head)]


def greedy(work: Sequence[float], ranks: int) -> list[int]:
    """Assign the largest chunk first, to the least loaded rank that has room.

    Ties go to the lower index, so every rank computes the same layout.

    Source: Graham 1969, Bounds on Multiprocessing Timing Anomalies (longest processing time).
    """
    room = [len(work) // ranks] * ranks
    owner = [0] * len(work)
    idle = [(0.0, rank) for rank in range(ranks)]
    for chunk in sorted(range(len(work)), key=lambda c: (-work[c], c)):
        load, rank = heapq.heappop(idle)
        owner[chunk] = rank
        room[rank] -= 1
        if room[rank]:
            heapq.heappush(idle, (load + work[chunk], rank))
    return owner


LAYOUTS: dict[str, Callable[[Sequence[float], int], list[int]]] = {
    "contiguous": contiguous,
    "zigzag": zigzag,
    "greedy": greedy,
}
# Chunks per rank that "auto" tries.
CANDIDATES: tuple[tuple[Layout, int], ...] = (
    ("contiguous", 1), ("zigzag", 2), ("greedy", 2), ("greedy", 4), ("greedy", 8), ("greedy", 16),
)  # fmt: skip
