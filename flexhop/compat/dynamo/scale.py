"""A scale that changes between calls: kernels read it, as a number that score_mod captures.

A scale is a constant of its kernel. Dynamo makes a float symbolic once it has changed, and one
that is computed from a symbolic length always is. The operator would guard on its value and
compile again for every value.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.functions import FunctoolsPartialVariable
from torch._dynamo.variables.lists import BaseListVariable, TupleVariable
from torch._dynamo.variables.tensor import SymNodeVariable

__all__ = ["with_scale_in_mod"]


def _scaled(mod: Callable[..., Tensor], scale: float, score: Tensor, *indices: Tensor) -> Tensor:
    """What score_mod computes from a score that lacks the scale."""
    return mod(score * scale, *indices)


def with_scale_in_mod(
    tx: Any, score_mod: VariableTracker, call: VariableTracker
) -> tuple[VariableTracker, VariableTracker]:
    """A score_mod and a call (ops/call.py, as a tuple), whose scale is 1 if it was symbolic."""
    call = call.realize()
    assert isinstance(call, BaseListVariable)
    scale, *others = call.items
    if not isinstance(scale.realize(), SymNodeVariable):
        return score_mod, call
    scaled = VariableTracker.build(tx, _scaled)
    one = VariableTracker.build(tx, 1.0)
    return FunctoolsPartialVariable(scaled, [score_mod, scale], {}), TupleVariable([one, *others])
