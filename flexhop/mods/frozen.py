"""A mod with the values that it reads now: a later run of it computes the same.

Without torch.compile, backward runs a mod again. By then, a loop may have given the names that the
mod reads other values: `for p in scales: x = flex_attention(..., lambda s, *_: s * p)`.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

from torch import nn

from flexhop.compat.mods.held import Held
from flexhop.mods.closures import steps_of

__all__ = ["frozen"]

_LARGEST = 100  # a container with more values is data, which nobody exchanges value by value
_LIBRARIES = ("torch", "math", "numpy", "functools", "itertools", "operator")


def frozen(mod: Callable[..., Any]) -> Callable[..., Any]:
    """A copy of a function that later assignments to what it reads do not change.

    These are names of its closure and its module, attributes of objects that it reads there, and
    elements of their lists and dictionaries. Tensors are the same. So are objects within objects.
    """
    return _Frozen().map(mod)


class _Frozen(Held):
    def __init__(self) -> None:
        super().__init__(lambda tensor: tensor, enters=_is_plain)
        self._is_inside = False  # of an object

    def is_same(self, values: Any, others: Any) -> bool:
        """Copies are there for assignments to come."""
        return False

    def globals_of(self, function: types.FunctionType) -> dict[str, Any]:
        """A copy of the module's names; those that the function reads are frozen."""
        known = function.__globals__
        if _package(function) == "flexhop":
            return known
        read = (name for name in _global_names(function.__code__) if name in known)
        return {**known, **{name: self._of_module(known, known[name]) for name in read}}

    def _of_module(self, known: dict[str, Any], value: Any) -> Any:
        """A value that a module names; functions of other modules stay as they are."""
        is_other = isinstance(value, types.FunctionType) and value.__globals__ is not known
        return value if is_other else self.map(value)

    def _map(self, value: Any) -> Any:
        if isinstance(value, types.FunctionType) and _package(value) in _LIBRARIES:
            return value
        if isinstance(value, (list, tuple, dict)) and len(value) > _LARGEST:
            return value
        return super()._map(value)

    def _map_object(self, value: Any) -> Any:
        if self._is_inside or not self._enters(value):
            return value
        self._is_inside = True
        try:
            held = {name: self.map(part) for name, part in value.__dict__.items()}
        finally:
            self._is_inside = False
        # A class may refuse to be copied, as modules that are spread over several GPUs do.
        made = object.__new__(type(value))
        made.__dict__.update(held)
        return made


def _package(function: types.FunctionType) -> str:
    return (function.__module__ or "").partition(".")[0]


def _is_plain(value: Any) -> bool:
    """Whether an object is made of its attributes alone."""
    kind = type(value)
    if not hasattr(value, "__dict__") or isinstance(value, (type, types.ModuleType)):
        return False
    has_slots = any(vars(base).get("__slots__") for base in kind.__mro__)
    return not has_slots and (kind.__new__ is object.__new__ or isinstance(value, nn.Module))


@functools.lru_cache(maxsize=4096)
def _global_names(code: types.CodeType) -> frozenset[str]:
    """Names of the module that a function reads, or functions inside of it."""
    return frozenset(step.argval for step in steps_of(code) if step.opname == "LOAD_GLOBAL")
