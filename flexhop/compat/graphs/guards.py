"""Guards on sizes: decisions from a symbol's current value that must hold in every later call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sympy
from torch._inductor.virtualized import V
from torch.utils._sympy.functions import Mod

from flexhop.compat.kernels import inductor

__all__ = ["guard_aligned_strides", "guard_at_most", "guard_not_negative"]


def guard_aligned_strides(tensors: Sequence[Any]) -> None:
    """Guard strides that are multiples of 16, so that kernels can rely on it.

    Inductor tells Triton only facts that are certain. A symbol of its own, such as the stride of a
    cache slice, is not, and rows would be read element by element. Strides that follow from
    lengths get no guard: they would recompile as lengths change.
    """
    for tensor in tensors:
        lengths = sympy.sympify(list(tensor.get_size()))
        known = {symbol for length in lengths for symbol in length.free_symbols}
        for stride in tensor.get_stride():
            if not inductor.is_constant(stride) and not stride.free_symbols & known:
                # ShapeEnv drops stale answers for the first form; the second is what is queried.
                for modulo in (Mod, sympy.Mod):
                    V.graph.sizevars.guard_or_false(sympy.Eq(modulo(stride, 16), 0))


def guard_at_most(value: Any, limit: int) -> bool:
    """Whether a size is at most `limit`, with a guard on the answer if it is symbolic.

    A data-dependent size has no answer yet and counts as larger.
    """
    return bool(V.graph.sizevars.guard_or_false(sympy.Le(value, limit)))


def guard_not_negative(values: Sequence[Any]) -> bool:
    """Whether values are at least 0 in every call, with guards if they are in this one.

    Code that is compiled ahead of time has no guards.
    """
    relations = [sympy.Ge(value, 0) for value in values]
    if all(map(inductor.is_known, relations)):
        return True
    if sympy.false in relations or min(map(inductor.hint, values)) < 0 or V.graph.aot_mode:
        return False
    return all(V.graph.sizevars.guard_or_false(relation) for relation in relations)
