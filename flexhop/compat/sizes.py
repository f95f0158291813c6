"""Sizes during tracing: whether they are symbols, and their bounds. torch 2.11 to 2.15.

Symbols need SymPy, which `import flexhop` does not import.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

__all__ = [
    "assert_all", "bound_of", "broadcast", "hint_of", "is_empty", "is_exporting", "is_flag",
    "is_known", "is_symbolic",
]  # fmt: skip

# Code recompiles if a size exceeds the first of these that bounded it.
_LIMITS = (2**17, 2**20, 2**24, 2**31 - 1)
_UNSEEN = 8192  # the hint of a size that data determine

LONGEST_ROW = 16  # elements of a row; what kernels compute with more becomes a table, if it can
LONGEST_SUM = 64  # most elements of a sum in a kernel, which adds them one by one


def bound_of(size: int | torch.SymInt) -> int | None:
    """An upper bound of a size's absolute value; None if there is none below 2^31.

    It comes from the symbol's range, or else from a guard. Exported programs get no guards: the
    user defines their valid inputs.
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


def hint_of(size: Any, known: Any = None) -> int:
    """The size at this compilation, without a guard: for choices, which hold for every size.

    2.11: size_hint; since 2.13: optimization_hint.

    known: who knows sizes. A SymInt knows itself.
    """
    if isinstance(size, int):
        return size
    if known is None:
        from torch.fx.experimental import symbolic_shapes as known
    find = getattr(known, "optimization_hint", None) or known.size_hint
    return int(find(size, fallback=_UNSEEN))


def is_empty(size: int | torch.SymInt) -> bool:
    """Whether a length is 0. If data determines it, the graph checks it at run time."""
    if isinstance(size, int):
        return size == 0
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    if not free_unbacked_symbols(size):
        return bool(size == 0)
    torch._check(size > 0, lambda: "Attention needs at least one token, but a length is 0.")
    return False


def is_known(relation: bool | torch.SymBool) -> bool:
    """Whether a relation of sizes holds for certain, without a guard."""
    if isinstance(relation, bool):
        return relation
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(relation)


def assert_all(flags: torch.Tensor, message: str) -> None:
    """Make a graph raise RuntimeError if a flag is False at run time."""
    torch._assert_async(flags.all(), message)


def broadcast(*shapes: Sequence[int]) -> Sequence[int]:
    """The shape that tensors have together, as torch.broadcast_shapes.

    That imports SymPy at its first call, a third of a second, also for plain numbers.
    """
    width = max(map(len, shapes))
    columns = list(zip(*[(*[1] * (width - len(s)), *s) for s in shapes], strict=True))
    if all(type(size) is int for column in columns for size in column):
        sizes = [set(column) - {1} or {1} for column in columns]
        if all(len(size) == 1 for size in sizes):
            return torch.Size(size.pop() for size in sizes)
    return torch.broadcast_shapes(*map(tuple, shapes))


def is_exporting() -> bool:
    """Whether torch.export is tracing; `torch.compiler.is_exporting` is constant in Dynamo's
    traces (2.11 to 2.13)."""
    return torch.compiler._is_exporting_flag


def is_flag(value: object) -> bool:
    """Whether an argument is a choice: a bool, also NumPy's or a symbol, 0 or 1, or None."""
    is_plain = value is None or isinstance(value, (bool, int, torch.SymBool))
    return is_plain or type(value).__name__ in ("bool", "bool_")  # NumPy 2, and 1


def is_symbolic(size: int) -> bool:
    """Whether a size is dynamic in the code being traced.

    Dynamo hides it: while it traces, a symbolic size is an instance of int.
    """
    if not torch.compiler.is_dynamo_compiling():
        return isinstance(size, torch.SymInt)
    from torch.fx.experimental.symbolic_shapes import has_static_value

    return not has_static_value(size)
