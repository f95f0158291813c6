"""The analysis of a call's user functions, once per graph."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from flexhop.analysis import INDICES, Analysis, analyse, with_magnitudes
from flexhop.compat.compilation import forms_of, once
from flexhop.compat.kernels import inductor
from flexhop.lowering.mods.packed_distances import without_bounded
from flexhop.lowering.mods.single import in_single
from flexhop.ops.graphs.own_positions import read_at_own_positions

SCORE = ("score", *INDICES)
JOINT = (*SCORE, "grad")
# Decorator of functions of a graph that nobody changes any more: those of a few calls are cached.
per_graph = functools.lru_cache(maxsize=64)
# Bounds on indices: kernels compute with positions in fp32, which represents the sum of two below
# this (arithmetic.py).
SIZES: dict[str, int] = dict.fromkeys(INDICES, 2**23)
_BOUNDS = tuple(SIZES.items())


def kernel_graph(mod: Any, inputs: tuple[str, ...]) -> fx.GraphModule:
    """The graph of a subgraph operand, in the form that kernels compute: the same for all
    spellings, and one graph for all calls of a compilation that have an equal operand.

    Args:
        mod: (*inputs, *captures) -> value or values.
        inputs: INDICES of a mask_mod, SCORE of a score_mod, JOINT of a joint graph.
    """
    return _kernel_graph(inductor.graph_module(mod), inputs)


@per_graph
def _kernel_graph(graph: fx.GraphModule, inputs: tuple[str, ...]) -> fx.GraphModule:
    given = graph.graph.find_nodes(op="placeholder")
    key = (kernel_graph, inputs, forms_of(node.meta.get("val") for node in given))
    return once(key, graph, lambda: _in_form(graph, inputs))


def _in_form(graph: fx.GraphModule, inputs: tuple[str, ...]) -> fx.GraphModule:
    plain = in_single(without_bounded(read_at_own_positions(graph, inputs), inputs), inputs)
    return with_magnitudes(plain, analyse_kernel(plain, inputs))


def analysed(mod: Any, inputs: tuple[str, ...]) -> Analysis:
    """The facts about a subgraph operand, for kernels; args of `kernel_graph`."""
    return analyse_kernel(kernel_graph(mod, inputs), inputs)


@per_graph
def analyse_kernel(
    graph: fx.GraphModule, inputs: tuple[str, ...], bounds: tuple[tuple[str, int], ...] = _BOUNDS
) -> Analysis:
    """The facts about a graph as kernels compute it; args of `kernel_graph`.

    bounds: on indices, by name.
    """
    return analyse(graph, inputs, dict(bounds))


def positions_of(found: Analysis, values: Iterable[Any]) -> tuple[bool, bool]:
    """Whether nodes of `found.mod` depend on q_idx, and on kv_idx; the score depends on both."""
    depends = found.forms.of_all(values)
    reads_score = "score" in depends
    return reads_score or "q" in depends, reads_score or "k" in depends


def reads_of(found: Analysis) -> list[tuple[fx.Node, tuple[bool, bool]]]:
    """Reads of captured tensors; for each, `positions_of` its indices."""
    reads = found.mod.graph.find_nodes(op="call_function", target=torch.ops.aten.index.Tensor)
    indices: Any = (read.args[1] for read in reads)
    return [(read, positions_of(found, of)) for read, of in zip(reads, indices, strict=True)]
