"""Tiles for float32 operands on sm_90: data, measured on an H200 where noted."""

from __future__ import annotations

import torch

from flexhop.lowering.portable.rules import Rule, Tiles, is_sm90
from flexhop.lowering.problem import Problem
from flexhop.options import Tile


def _is_usual(problem: Problem) -> bool:
    """Whether nothing but mods needs registers beside the products."""
    has_tensors = problem.cache is None and not problem.tangents
    draws = problem.dropout_p > 0.0
    is_plain = has_tensors and not draws and not problem.has_captured_grads
    return is_sm90(problem) and problem.dtype == torch.float32 and is_plain


def _is_ieee(problem: Problem) -> bool:
    """Whether products are multiply-adds."""
    return _is_usual(problem) and not problem.is_tf32


def _reads_scores(problem: Problem) -> bool:
    """Whether something is read per score: it is held in another layout than the products."""
    return problem.mods.reads_per_element or problem.mods.mask_reads_per_element


def _are_multiples(problem: Problem) -> bool:
    """Whether no tile extends past the end."""
    return problem.is_query_multiple(64) and problem.is_key_multiple(64)


def _gradients(query: dict[int, Tile], key_value: dict[int, Tile]) -> Tiles:
    """Tiles of the kernels of gradients; those of one gradient have the tiles of both."""
    names = ("grad_key_value", "grad_key", "grad_value")
    return {"grad_query": query, **dict.fromkeys(names, key_value)}


FLOAT32: tuple[Rule, ...] = (
    # Tensor cores wait for loads: larger tiles reuse more of them.
    Rule(
        "TF32",
        lambda p: _is_usual(p) and p.is_tf32,
        {
            "forward": {64: Tile(128, 64, 8, 2)},
            **_gradients(
                {64: Tile(64, 32, 4, 2), 128: Tile(32, 32, 4, 1)},
                {64: Tile(32, 64, 4, 2), 128: Tile(32, 32, 4, 1)},
            ),
        },
    ),
    # Two accumulators of 256 columns. Chosen without spills.
    Rule(
        "TF32, tangents",
        lambda p: is_sm90(p) and p.dtype == torch.float32 and p.is_tf32,
        {"jvp_forward": {256: Tile(16, 32, 8, 1)}},
        measured=False,
    ),
    # Four warps had 1200 to 1400 accesses to local memory in a step. Chosen without spills.
    Rule(
        "exact float32, reads per score",
        lambda p: _is_ieee(p) and _reads_scores(p),
        {"forward": {64: Tile(64, 32, 8, 2), 128: Tile(32, 32, 8, 2)}},
        measured=False,
    ),
    # Longer steps spill. Chosen without spills.
    Rule(
        "exact float32, lengths between tiles",
        lambda p: _is_ieee(p) and not _reads_scores(p) and not _are_multiples(p),
        {"forward": {128: Tile(64, 32, 8, 2)}},
        measured=False,
    ),
    # Eight warps have the registers that four lack.
    Rule(
        "exact float32",
        lambda p: _is_ieee(p) and not _reads_scores(p),
        {"forward": {64: Tile(64, 64, 8, 2), 128: Tile(32, 64, 8, 2)}},
    ),
    Rule(
        "exact float32",
        _is_ieee,
        _gradients({128: Tile(32, 32, 8, 1)}, {128: Tile(32, 32, 8, 1)}),
    ),
)
