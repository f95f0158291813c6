"""Captured tensors that are read in rows: neighbouring keys are neighbours in memory.

A bias of pairs, `bias[b, h, q_idx, kv_idx]`, is the common case. A GPU copies such rows in pieces
of 16 bytes, ahead of their use, and adds four neighbours of a gradient at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from flexhop.analysis import Analysis
from flexhop.lowering.mods.analysed import SCORE, analysed, positions_of, reads_of
from flexhop.lowering.mods.captured import ends_in_key

_PIECE = 16  # bytes


def row_bytes(score: fx.GraphModule) -> int:
    """Bytes that a score_mod reads per score in rows of keys; 0 if it reads other pairs, too."""
    found = analysed(score, SCORE)
    pairs: list[Any] = [read for read, positions in reads_of(found) if all(positions)]
    if not all(_is_in_rows(found, read) for read in pairs):
        return 0
    return sum(read.meta["val"].dtype.itemsize for read in pairs)


def _is_in_rows(found: Analysis, read: Any) -> bool:
    """Whether one index is the key, whose neighbours are side by side in rows that are aligned.

    The key's dimension need not be the last one: a tensor may be a view of a transposed one.
    """
    source, indices = read.args[0].meta["val"], list(read.args[1])
    keys = [i for i, index in enumerate(indices) if positions_of(found, [index])[1]]
    if len(keys) != 1 or len(indices) != source.dim():
        return False
    strides = list(source.stride())
    strides.append(strides.pop(keys[0]))
    indices.append(indices.pop(keys[0]))
    return ends_in_key(found, indices) and _is_aligned(strides, source.dtype)


def _is_aligned(strides: Sequence[Any], dtype: torch.dtype) -> bool:
    """Whether rows start at multiples of 16 bytes; the last stride is that of a row's elements."""
    *others, last = strides
    piece = max(1, _PIECE // dtype.itemsize)
    return last == 1 and all(isinstance(n, int) and n % piece == 0 for n in others)
