"""The analysis of the user functions of a call, once for each graph."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

from torch import fx

from flexhop.analysis import INDICES, Analysis, analyse
from flexhop.lowering.mods.relative import graph_of

SCORE = ("score", *INDICES)
JOINT = (*SCORE, "grad")
# Kernels compute with positions in fp32, which holds every integer below this (strength.py).
_LENGTH = 2**24
_known: weakref.WeakKeyDictionary[fx.GraphModule, Analysis] = weakref.WeakKeyDictionary()


def analysed(mod: Any, inputs: tuple[str, ...]) -> Analysis:
    """The facts about a subgraph operand, for kernels.

    Args:
        mod: (*inputs, *captures) -> value or values.
        inputs: INDICES of a mask_mod, SCORE of a score_mod, JOINT of a joint graph.
    """
    graph = graph_of(mod)
    if graph not in _known:
        _known[graph] = analyse(graph, inputs, {"q": _LENGTH, "k": _LENGTH})
    return _known[graph]


def positions_of(found: Analysis, values: Iterable[Any]) -> tuple[bool, bool]:
    """Whether nodes of `found.mod` depend on q_idx, and on kv_idx; the score depends on both."""
    depends = found.forms.of_all(values)
    reads_score = "score" in depends
    return reads_score or "q" in depends, reads_score or "k" in depends
