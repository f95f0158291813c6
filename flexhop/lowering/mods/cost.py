"""How many instructions a user function takes for each score, from the analysis of its graph."""

from __future__ import annotations

from flexhop.analysis import FUNCTION, Analysis, instructions_of, rate


def instructions(found: Analysis) -> float:
    """Instructions per score of a score_mod, or of its joint graph."""
    nodes = found.mod.operators
    return sum(instructions_of(node) * rate(found.forms.depends_on(node)) for node in nodes)


def has_functions(found: Analysis) -> bool:
    """Whether a joint graph computes more than sums and products for each score."""
    return any(instructions_of(node) >= FUNCTION for node in found.mod.operators)
