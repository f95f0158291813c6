"""Captured tensors that are read in rows: neighbouring keys are neighbours in memory.

A bias of pairs, `bias[b, h, q_idx, kv_idx]`, is the common case. A GPU copies such rows in pieces
of 16 bytes, ahead of their use, and adds four neighbours of a gradient at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import sympy
from torch import fx

from flexhop.analysis import INDICES, Analysis
from flexhop.compat.kernels import inductor
from flexhop.lowering.mods.analysed import JOINT, SCORE, analysed, positions_of, reads_of
from flexhop.ops.args import Site

_PIECE = 16  # bytes


def row_bytes(score: fx.GraphModule) -> int:
    """Bytes that a score_mod reads per score in rows of keys; 0 if it reads other pairs, too."""
    found = analysed(score, SCORE)
    pairs: list[Any] = [read for read, positions in reads_of(found) if all(positions)]
    if not all(_is_aligned(read.args[0]) and _ends_in_key(found, read.args[1]) for read in pairs):
        return 0
    return sum(read.meta["val"].dtype.itemsize for read in pairs)


def adds_rows(joint: Any, site: Site) -> bool:
    """Whether pairs have entries, those of neighbouring keys side by side."""
    found = analysed(joint, JOINT)
    indices = [found.mod.results[i] for i in site.indices]
    return all(positions_of(found, indices)) and _ends_in_key(found, indices)


def own_entries(joint: Any, sites: Sequence[Site], sizes: Sequence[Any]) -> frozenset[int]:
    """Captured tensors in which each score has an entry of its own, and pairs have entries.

    Args:
        joint, sites: of the gradient.
        sizes: [B, Hq, M, N].
    """
    named = zip(INDICES, sizes, strict=True)
    needed = {name for name, size in named if not inductor.is_known(sympy.Eq(size, 1))}
    needed |= {"q", "k"}
    counts = Counter(site.capture for site in sites)
    found = analysed(joint, JOINT)
    return frozenset(
        site.capture
        for site in sites
        if counts[site.capture] == 1 and needed <= _indices_of_score(found, site)
    )


def adds_captured(joint: Any, sites: Sequence[Site], sizes: Sequence[Any]) -> bool:
    """Whether the gradient of any captured tensor is a sum; args of `own_entries`."""
    return {site.capture for site in sites} != own_entries(joint, sites, sizes)


def _indices_of_score(found: Analysis, site: Site) -> set[str]:
    """The score's indices among those of a site, if all others are constants; else none."""
    names = {node: name for name, node in found.mod.inputs.items()}
    seen: set[str] = set()
    for i in site.indices:
        index = found.mod.results[i]
        form = found.forms.form(index) if isinstance(index, fx.Node) else None
        if form is None:
            return set()
        if not form.terms:
            continue
        ((atom, factor), *more) = form.terms.items()
        if more or factor != 1 or form.offset or atom not in names:
            return set()
        seen.add(names[atom])
    return seen


def _ends_in_key(found: Analysis, indices: Sequence[Any]) -> bool:
    """Whether the last index is the key, and no other depends on it."""
    *others, last = indices
    form = found.forms.form(last) if isinstance(last, fx.Node) else None
    if form is None or form.offset or dict(form.terms) != {found.mod.inputs["k"]: 1}:
        return False
    return not positions_of(found, others)[1]


def _is_aligned(source: Any) -> bool:
    """Whether every row of a captured tensor starts at a multiple of 16 bytes."""
    value = source.meta["val"]
    *others, last = value.stride()
    piece = max(1, _PIECE // value.dtype.itemsize)
    return last == 1 and all(isinstance(n, int) and n % piece == 0 for n in others)
