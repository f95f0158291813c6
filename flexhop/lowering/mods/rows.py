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
from flexhop.lowering.mods.analysed import INDICES, SCORE, analysed, positions_of, reads_of
from flexhop.lowering.mods.captured import ends_in, is_by_distance, is_one_to_one
from flexhop.lowering.problem import COPIED, Axis, PairRows

PIECE = 16  # bytes
_AXES: tuple[Axis, ...] = ("query", "key")


def row_bytes(score: fx.GraphModule) -> int:
    """Bytes that a score_mod reads per score in rows of keys; 0 if it reads other pairs, too."""
    found = analysed(score, SCORE)
    pairs: list[Any] = [read for read, positions in reads_of(found) if all(positions)]
    if not all(_is_in_rows(found, read) for read in pairs):
        return 0
    return sum(read.meta["val"].dtype.itemsize for read in pairs)


def head_row_bytes(mod: fx.GraphModule, roles: tuple[str, ...]) -> int:
    """Bytes that a mod reads per score in rows of pairs of each head that all batches share."""
    found = analysed(mod, roles)
    pairs: list[Any] = [read for read, positions in reads_of(found) if all(positions)]
    return sum(
        read.meta["val"].dtype.itemsize
        for read in pairs
        if {"query", "key"} == {axis for axis in _AXES if _rows_of(found, read, axis)}
        and found.forms.of_all(read.args[1]) >= {"h"}
        and "b" not in found.forms.of_all(read.args[1])
    )


def mask_rows(mask: fx.GraphModule) -> PairRows | None:
    """How neighbouring scores read what a mask_mod reads at both positions; None: in other ways.

    Triton copies elements of four bytes and more, and shorter ones in aligned rows.
    """
    found = analysed(mask, INDICES)
    pairs: list[Any] = [read for read, positions in reads_of(found) if all(positions)]
    ways: set[PairRows | None] = {_way(found, read) for read in pairs}
    if ways == {"keys", "short keys"}:
        return "short keys"
    return ways.pop() if len(ways) == 1 else None


def _way(found: Analysis, read: Any) -> PairRows | None:
    """How neighbouring scores read one tensor."""
    dtype = read.meta["val"].dtype
    if (rows := _rows_of(found, read, "key")) is not None and rows[-1] == 1:
        is_copied = dtype.itemsize >= COPIED or _is_aligned(rows, dtype)
        return "keys" if is_copied else "short keys"
    if (rows := _rows_of(found, read, "query")) is not None and rows[-1] == 1:
        return "queries"
    return "distances" if _is_on_diagonals(found, read) else None


def _is_on_diagonals(found: Analysis, read: Any) -> bool:
    """Whether neighbouring keys read neighbours in a table by distance."""
    strides = read.args[0].meta["val"].stride()
    indices = list(zip(read.args[1], strides, strict=False))
    own = [(i, stride) for i, stride in indices if any(positions_of(found, [i]))]
    if len(own) != 1 or own[0][1] != 1:
        return False
    return is_by_distance(found, own[0][0]) and is_one_to_one(found, own[0][0])


def _is_in_rows(found: Analysis, read: Any) -> bool:
    """Whether one index is the key, whose neighbours are side by side in rows that are aligned.

    The key's dimension need not be the last one: a tensor may be a view of a transposed one.
    """
    strides = _rows_of(found, read, "key")
    return strides is not None and _is_aligned(strides, read.meta["val"].dtype)


def _rows_of(found: Analysis, read: Any, axis: Axis) -> list[Any] | None:
    """The strides of what is read, that of keys (or queries) last; None if no index is a key."""
    source, indices = read.args[0].meta["val"], list(read.args[1])
    at = ("query", "key").index(axis)
    own = [i for i, index in enumerate(indices) if positions_of(found, [index])[at]]
    if len(own) != 1 or len(indices) != source.dim():
        return None
    strides = list(source.stride())
    strides.append(strides.pop(own[0]))
    indices.append(indices.pop(own[0]))
    return strides if ends_in(found, indices, axis) else None


def _is_aligned(strides: Sequence[Any], dtype: torch.dtype) -> bool:
    """Whether rows start at multiples of 16 bytes; the last stride is that of a row's elements."""
    *others, last = strides
    piece = max(1, PIECE // dtype.itemsize)
    return last == 1 and all(isinstance(n, int) and n % piece == 0 for n in others)
