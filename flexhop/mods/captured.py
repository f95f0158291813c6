"""Find the tensors that a mod has captured, and replace them in a copy of the mod.

A mod may hold tensors in its closure, in the arguments of functools.partial, in the attributes of
an object with `__call__`, or of the object that a method is bound to. So may the functions that it
holds. Modules and globals are left alone.
"""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor, nn

M = TypeVar("M")


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
    return _Mapper(change).map(mod)


class _Mapper:
    """One traversal; records visited values, because functions may hold themselves."""

    def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
        self.change = change
        self.done: dict[int, tuple[Any, Any]] = {}  # by id: a value, kept alive, and its image

    def map(self, value: Any) -> Any:
        """A value in a place that a mod holds."""
        if isinstance(value, Tensor):
            return self.change(value)
        if id(value) not in self.done:
            self.done[id(value)] = (value, value)  # a value inside itself stays unchanged
            self.done[id(value)] = (value, self._map(value))
        return self.done[id(value)][1]

    def _map(self, value: Any) -> Any:
        if type(value) in (tuple, list):
            parts = [self.map(part) for part in value]
            return value if _same(parts, value) else type(value)(parts)
        if type(value) is dict:
            parts = {key: self.map(part) for key, part in value.items()}
            return value if _same(parts.values(), value.values()) else parts
        if isinstance(value, types.FunctionType):
            return self._map_function(value)
        if isinstance(value, types.MethodType):
            owner = self.map(value.__self__)
            return value if owner is value.__self__ else types.MethodType(value.__func__, owner)
        if isinstance(value, functools.partial):
            parts = (value.func, value.args, value.keywords)
            mapped = [self.map(part) for part in parts]
            return value if _same(mapped, parts) else functools.partial(
                mapped[0], *mapped[1], **mapped[2]
            )  # fmt: skip
        return self._map_object(value)

    def _map_function(self, function: types.FunctionType) -> types.FunctionType:
        cells = function.__closure__ or ()
        filled = [cell.cell_contents for cell in cells if _is_filled(cell)]
        held = (*filled, function.__defaults__, function.__kwdefaults__)
        mapped = [self.map(value) for value in held]
        if _same(mapped, held):
            return function
        *values, defaults, keywords = mapped
        rest = iter(values)
        closure = tuple(types.CellType(next(rest)) if _is_filled(cell) else cell for cell in cells)
        made = types.FunctionType(
            function.__code__, function.__globals__, function.__name__, defaults, closure
        )
        for name in functools.WRAPPER_ASSIGNMENTS:
            setattr(made, name, getattr(function, name))
        made.__dict__.update(function.__dict__)
        made.__kwdefaults__ = keywords
        return made

    def _map_object(self, value: Any) -> Any:
        if not callable(value) or isinstance(value, (type, nn.Module)):
            return value
        held = getattr(value, "__dict__", None)
        if not held:
            return value
        mapped = {name: self.map(part) for name, part in held.items()}
        if _same(mapped.values(), held.values()):
            return value
        made = copy.copy(value)
        made.__dict__.update(mapped)
        return made


def _is_filled(cell: types.CellType) -> bool:
    """Whether the name has been assigned."""
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def _same(values: Any, others: Any) -> bool:
    return all(value is other for value, other in zip(values, others, strict=True))
