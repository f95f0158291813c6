"""Captured tensors that are read in rows: neighbouring keys are neighbours in memory.

A bias of pairs, `bias[b, h, q_idx, kv_idx]`, is the common case. A GPU copies such rows in pieces
of 16 bytes, ahead of their use, and adds four neighbours of a gradient at once.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from flexhop.lowering.mods.analysed import SCORE, analysed, reads_of
from flexhop.lowering.mods.captured import ends_in_key

_PIECE = 16  # bytes


def row_bytes(score: fx.GraphModule) -> int:
    """Bytes that a score_mod reads per score in rows of keys; 0 if it reads other pairs, too."""
    found = analysed(score, SCORE)
    pairs: list[Any] = [read for read, positions in reads_of(found) if all(positions)]
    if not all(_is_aligned(read.args[0]) and ends_in_key(found, read.args[1]) for read in pairs):
        return 0
    return sum(read.meta["val"].dtype.itemsize for read in pairs)


def _is_aligned(source: Any) -> bool:
    """Whether every row of a captured tensor starts at a multiple of 16 bytes."""
    value = source.meta["val"]
    *others, last = value.stride()
    piece = max(1, _PIECE // value.dtype.itemsize)
    return last == 1 and all(isinstance(n, int) and n % piece == 0 for n in others)
