"""Values that a function holds, and copies of the function that hold others.

A function may hold values in its closure and defaults, in the arguments of functools.partial, in
the attributes of an object with `__call__`, or of the object that a method is bound to. So may the
functions that it holds. Globals are left alone.
"""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor, nn

__all__ = ["Held", "captured_tensors", "is_filled", "map_captured"]

M = TypeVar("M")


class Held:
    """One traversal; records visited values, because functions may hold themselves.

    Args:
        change: gives the image of a tensor, once for each place that holds it.
        enters: whether to map the attributes of an object.
    """

    def __init__(self, change: Callable[[Tensor], Tensor], enters: Callable[[Any], bool]) -> None:
        """Start with no known value."""
        self._change, self._enters = change, enters
        self._done: dict[int, tuple[Any, Any]] = {}  # by id: a value, kept alive, and its image

    def map(self, value: Any) -> Any:
        """A value with other tensors; the value itself if no tensor in it changes."""
        if isinstance(value, Tensor):
            return self._change(value)
        if id(value) not in self._done:
            self._done[id(value)] = (value, value)  # a value inside itself stays unchanged
            self._done[id(value)] = (value, self._map(value))
        return self._done[id(value)][1]

    def is_same(self, values: Any, others: Any) -> bool:
        """Whether a copy would hold the same values, so that none is needed."""
        return all(value is other for value, other in zip(values, others, strict=True))

    def globals_of(self, function: types.FunctionType) -> dict[str, Any]:
        """The globals of a copied function."""
        return function.__globals__

    def _map(self, value: Any) -> Any:
        if type(value) in (tuple, list):
            parts = [self.map(part) for part in value]
            return value if self.is_same(parts, value) else type(value)(parts)
        if type(value) is dict:
            parts = {key: self.map(part) for key, part in value.items()}
            return value if self.is_same(parts.values(), value.values()) else parts
        if isinstance(value, types.FunctionType):
            return self._map_function(value)
        if isinstance(value, types.MethodType):
            parts = (value.__func__, value.__self__)
            mapped = [self.map(part) for part in parts]
            return value if self.is_same(mapped, parts) else types.MethodType(*mapped)
        if isinstance(value, functools.partial):
            parts = (value.func, value.args, value.keywords)
            mapped = [self.map(part) for part in parts]
            return value if self.is_same(mapped, parts) else functools.partial(
                mapped[0], *mapped[1], **mapped[2]
            )  # fmt: skip
        return self._map_object(value)

    def _map_function(self, function: types.FunctionType) -> types.FunctionType:
        cells = function.__closure__ or ()
        filled = [cell.cell_contents for cell in cells if is_filled(cell)]
        held = (*filled, function.__defaults__, function.__kwdefaults__)
        mapped = [self.map(value) for value in held]
        if self.is_same(mapped, held):
            return function
        *values, defaults, keywords = mapped
        rest = iter(values)
        closure = tuple(types.CellType(next(rest)) if is_filled(cell) else cell for cell in cells)
        made = types.FunctionType(
            function.__code__, self.globals_of(function), function.__name__, defaults, closure
        )
        for name in functools.WRAPPER_ASSIGNMENTS:
            setattr(made, name, getattr(function, name))
        made.__dict__.update(function.__dict__)
        made.__kwdefaults__ = keywords
        return made

    def _map_object(self, value: Any) -> Any:
        held = getattr(value, "__dict__", None)
        if not held or isinstance(value, (type, types.ModuleType)) or not self._enters(value):
            return value
        mapped = {name: self.map(part) for name, part in held.items()}
        if self.is_same(mapped.values(), held.values()):
            return value
        made = copy.copy(value)
        made.__dict__.update(mapped)
        return made


def is_filled(cell: types.CellType) -> bool:
    """Whether a closure's cell has a value."""
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:  # a name that is assigned later
        return False
    return True


def captured_tensors(mod: Any) -> list[Tensor]:
    """The tensors that a mod has captured, in a fixed order, one entry per place."""
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    map_captured(mod, note)
    return found


def map_captured(mod: M, change: Callable[[Tensor], Tensor]) -> M:
    """The mod with `change` applied to each captured tensor; the mod itself if none changes."""
    return Held(change, _is_mod).map(mod)


def _is_mod(value: Any) -> bool:
    """Whether an object may be a mod. Modules are left alone: nn.Module.to moves them."""
    return callable(value) and not isinstance(value, nn.Module)
