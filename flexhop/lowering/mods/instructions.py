"""Instructions per score of a user function, from the analysis of its graph."""

from __future__ import annotations

from flexhop.analysis import FUNCTION, Analysis, instructions_of, name_of, rate

# For a mask, counted in masked steps of 128 x 128 scores: a comparison sets a predicate, two
# predicates are combined in registers, and reads wait for memory.
_IN_MASKS = {
    **dict.fromkeys(("eq", "ne", "lt", "le", "gt", "ge"), 1.5),
    **dict.fromkeys(("bitwise_and", "bitwise_or", "bitwise_not", "bitwise_xor"), 1.5),
    **dict.fromkeys(("logical_and", "logical_or", "logical_not", "logical_xor"), 1.5),
    "index": 6.0,
}
# Functions whose derivative follows from their value, without the score itself.
_KEPT = ("tanh", "tanh_approx")
_SELECT = 1.3  # instructions to mask a score


def instructions(found: Analysis) -> float:
    """Instructions per score of a score_mod, or of its joint graph."""
    nodes = found.mod.operators
    return sum(instructions_of(node) * rate(found.forms.depends_on(node)) for node in nodes)


def mask_instructions(found: Analysis) -> float:
    """Instructions per score of a mask_mod that a kernel evaluates."""
    total = sum(
        _IN_MASKS.get(name_of(node), instructions_of(node)) * rate(found.forms.depends_on(node))
        for node in found.mod.operators
    )
    return total + _SELECT if total else 0.0


def has_functions(found: Analysis) -> bool:
    """Whether a joint graph computes values that are better kept than recomputed from the
    score."""
    return any(
        name_of(node) in _KEPT or instructions_of(node) >= FUNCTION for node in found.mod.operators
    )
