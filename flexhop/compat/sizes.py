"""Sizes that are symbols while a graph is traced. torch 2.11 to 2.15.

What knows symbols imports SymPy, which `import flexhop` does without.
"""

from __future__ import annotations

import torch

__all__ = ["assert_all", "bound_of", "is_known"]

# Compiled code is made again if a size leaves the first of these that it was within.
_LIMITS = (2**17, 2**20, 2**24, 2**31 - 1)


def bound_of(size: int | torch.SymInt) -> int | None:
    """A number that the magnitude of a size does not exceed; None if there is none below 2^31.

    It is what is known of the symbol, or else a guard of the graph. Exported programs get no
    guards: what they may be called with is the user's to say.
    """
    if isinstance(size, int):
        return abs(size)
    from torch.fx.experimental.symbolic_shapes import guard_or_false, statically_known_true

    for limit in _LIMITS:
        if statically_known_true(size <= limit) and statically_known_true(size >= -limit):
            return limit
    if torch.compiler.is_exporting():
        return None
    for limit in _LIMITS:
        if guard_or_false(size <= limit) and guard_or_false(size >= -limit):
            return limit
    return None


def is_known(relation: bool | torch.SymBool) -> bool:
    """Whether a relation of sizes holds for certain, without a guard."""
    if isinstance(relation, bool):
        return relation
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(relation)


def assert_all(flags: torch.Tensor, message: str) -> None:
    """Let a graph raise RuntimeError if a flag is False when it runs."""
    torch._assert_async(flags.all(), message)
