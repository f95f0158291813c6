"""Describe functions by value: their code, and the numbers, tensors and functions that they read.

Two functions with equal descriptions compute the same once their tensors are exchanged. A function
that reads or does something else, such as a module's attribute, has no description.
"""

from __future__ import annotations

import dis
import functools
import math
import types
from collections.abc import Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["Described", "Places", "describe"]

# For each function and each of its captures: (True, index of a tensor) or (False, a number).
Places = tuple[tuple[tuple[bool, Any], ...], ...]
_VALUES = frozenset([int, bool, str, type(None), torch.dtype, torch.device])
_TENSORS = frozenset([Tensor, torch.nn.Parameter])
_KEPT = (torch, math)  # modules whose functions nobody replaces
_PLAIN_CLASS = {"__module__", "__qualname__", "__doc__", "__dict__", "__weakref__"} | {
    "__annotations__", "__firstlineno__", "__static_attributes__", "__annotate_func__",
    "__annotations_cache__",
}  # fmt: skip


class _NotPlain(Exception):
    """A function reads or does something else."""


class Described(NamedTuple):
    """What functions read: equal keys for equal functions, and the tensors."""

    key: Hashable
    tensors: list[Tensor]

    def places(self, captures: Sequence[Sequence[Any]]) -> Places | None:
        """The places of captures; None if one is not a tensor of the closures."""
        found = tuple(tuple(self._place(item) for item in items) for items in captures)
        return None if any(place is None for places in found for place in places) else found  # pyright: ignore

    def _place(self, item: Any) -> tuple[bool, Any] | None:
        if not isinstance(item, Tensor):
            return False, item
        return next(((True, i) for i, t in enumerate(self.tensors) if t is item), None)

    def at(self, places: Places) -> tuple[tuple[Any, ...], ...]:
        """The captures at these places."""
        tensors = self.tensors
        return tuple(
            tuple(tensors[at] if is_tensor else at for is_tensor, at in each) for each in places
        )


def describe(functions: Sequence[Any]) -> Described | None:
    """Describe functions; None if one of them reads or does something else."""
    reader = _Reader()
    try:
        return Described(tuple([reader.of(function) for function in functions]), reader.tensors)
    except _NotPlain:
        return None


class _Reader:
    """One traversal; notes the tensors, and the values that it is inside of."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self._inside: set[int] = set()

    def of(self, value: Any) -> Hashable:
        """The description of a value that a function reads."""
        kind = type(value)
        if kind in _VALUES:
            return kind, value
        if kind is float:
            return kind, value.hex()  # 0.0 and -0.0 are equal, but not the same
        if kind in _TENSORS:
            return self._tensor(value)
        if id(value) in self._inside:  # it holds itself
            raise _NotPlain
        self._inside.add(id(value))
        found = self._holder(kind, value)
        self._inside.discard(id(value))
        return found

    def _tensor(self, value: Tensor) -> Hashable:
        for number, known in enumerate(self.tensors):
            if known is value:
                return number
        self.tensors.append(value)
        return (value.shape, value.stride(), value.dtype, value.device, value.requires_grad)

    def _holder(self, kind: type, value: Any) -> Hashable:
        if kind is types.FunctionType:
            return self._function(value)
        if kind in (tuple, list):
            return kind, *[self.of(item) for item in value]
        if kind is dict:
            return kind, *[(self.of(name), self.of(item)) for name, item in value.items()]
        if kind is functools.partial:
            return kind, *[self.of(part) for part in (value.func, value.args, value.keywords)]
        if kind is types.MethodType:
            return kind, self.of(value.__func__), self.of(value.__self__)
        if isinstance(value, type) and value.__module__.split(".")[0] == "torch":
            return value
        return self._object(kind, value)

    def _object(self, kind: type, value: Any) -> Hashable:
        """An object of a class that defines `__call__` or other methods in Python."""
        is_foreign = isinstance(value, (type, types.ModuleType, torch.nn.Module))
        if is_foreign or "__dict__" not in dir(kind) or not hasattr(value, "__dict__"):
            raise _NotPlain
        parts = [self.of(vars(value))]
        for base in kind.__mro__[:-1]:
            for name, item in vars(base).items():
                if name not in _PLAIN_CLASS:
                    parts.append((name, self._member(item)))
        return kind, *parts

    def _member(self, item: Any) -> Hashable:
        if isinstance(item, (staticmethod, classmethod)):
            return type(item), self.of(item.__func__)
        if isinstance(item, property):
            return property, self.of(item.fget)
        return self.of(item)

    def _function(self, value: Any) -> Hashable:
        code, names = value.__code__, value.__globals__
        if code not in _globals:
            _globals[code] = _globals_of(code)
        read = _globals[code]
        if read is None:
            raise _NotPlain
        if not (read or value.__closure__ or value.__defaults__ or value.__kwdefaults__):
            return code
        held: list[Hashable] = [code]
        try:
            held += [self.of(cell.cell_contents) for cell in value.__closure__ or ()]
        except ValueError:  # a name that is assigned later
            raise _NotPlain from None
        for name in read:
            found = names.get(name, torch)  # not a global: a builtin
            if not any(found is module for module in _KEPT):
                held.append(self.of(found))
        for defaults in (value.__defaults__, value.__kwdefaults__):
            held.append(self.of(defaults) if defaults else None)
        return tuple(held)


_globals: dict[types.CodeType, tuple[str, ...] | None] = {}


def _globals_of(code: types.CodeType) -> tuple[str, ...] | None:
    """Names of the globals and builtins that code reads; None if it does more than read them."""
    names: dict[str, None] = {}
    for step in _steps(code):
        if step.opname.startswith(("IMPORT", "STORE_GLOBAL", "DELETE_GLOBAL", "STORE_ATTR")):
            return None
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            names[step.argval] = None
    return tuple(names)


def _steps(code: types.CodeType) -> Iterator[dis.Instruction]:
    """The instructions of code, and of the functions that it makes."""
    yield from dis.get_instructions(code)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _steps(constant)
