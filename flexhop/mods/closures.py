"""Describe functions by value: their code, and the numbers, tensors and functions that they read.

Two functions with equal descriptions compute the same once their tensors are exchanged. A function
that reads or does something else, such as a module's attribute, has no description.
"""

from __future__ import annotations

import dis
import functools
import math
import types
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["Described", "Places", "describe", "steps_of"]

# For each function and each of its captures: (True, index of a tensor) or (False, a number).
Places = tuple[tuple[tuple[bool, Any], ...], ...]
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
        read = _READERS.get(type(value))
        return self._other(value) if read is None else read(self, value)

    def read_tensor(self, value: Tensor) -> Hashable:
        for number, known in enumerate(self.tensors):
            if known is value:
                return number
        self.tensors.append(value)
        return (value.shape, value.stride(), value.dtype, value.device, value.requires_grad)

    def read_value(self, value: Any) -> Hashable:
        return type(value), value

    def read_float(self, value: float) -> Hashable:
        return float, value.hex()  # 0.0 and -0.0 are equal, but not the same

    def read_tuple(self, value: tuple[Any, ...]) -> Hashable:
        return tuple, *[self.of(item) for item in value]

    def read_list(self, value: list[Any]) -> Hashable:
        self._enter(value)
        found = (list, *[self.of(item) for item in value])
        self._inside.discard(id(value))
        return found

    def read_dict(self, value: dict[Any, Any]) -> Hashable:
        if not value:
            return dict
        self._enter(value)
        found = (dict, *[(self.of(name), self.of(item)) for name, item in value.items()])
        self._inside.discard(id(value))
        return found

    def read_partial(self, value: functools.partial[Any]) -> Hashable:
        of = self.of
        return functools.partial, of(value.func), of(value.args), of(value.keywords)

    def read_method(self, value: types.MethodType) -> Hashable:
        return types.MethodType, self.of(value.__func__), self.of(value.__self__)

    def _other(self, value: Any) -> Hashable:
        if isinstance(value, type) and value.__module__.split(".")[0] == "torch":
            return value
        self._enter(value)
        found = self._object(type(value), value)
        self._inside.discard(id(value))
        return found

    def _enter(self, value: Any) -> None:
        """Enter a value that may hold itself."""
        if id(value) in self._inside:
            raise _NotPlain
        self._inside.add(id(value))

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

    def read_function(self, value: types.FunctionType) -> Hashable:
        read = _read_by(value.__code__)
        cells, defaults, more = value.__closure__, value.__defaults__, value.__kwdefaults__
        if read.is_nothing and not (cells or defaults or more):
            return read
        if read.names is None:
            raise _NotPlain
        names, held = value.__globals__, [read]
        self._enter(value)
        try:
            held += [self.of(cell.cell_contents) for cell in cells or ()]
        except ValueError:  # a name that is assigned later
            raise _NotPlain from None
        for name in read.names:
            found = names.get(name, torch)  # not a global: a builtin
            if not any([found is module for module in _KEPT]):
                held.append(self.of(found))
        for given in (defaults, more):
            held.append(self.of(given) if given else None)
        self._inside.discard(id(value))
        return tuple(held)


_READERS: dict[type, Callable[[_Reader, Any], Hashable]] = {
    Tensor: _Reader.read_tensor, torch.nn.Parameter: _Reader.read_tensor,
    types.FunctionType: _Reader.read_function, types.MethodType: _Reader.read_method,
    functools.partial: _Reader.read_partial, tuple: _Reader.read_tuple, list: _Reader.read_list,
    dict: _Reader.read_dict, float: _Reader.read_float,
    **dict.fromkeys((int, bool, str, type(None), torch.dtype, torch.device), _Reader.read_value),
}  # fmt: skip


class _Read:
    """What code reads; equal code has the same. Its hash is faster than that of code."""

    __slots__ = ("is_nothing", "names")

    def __init__(self, code: types.CodeType) -> None:
        self.names = _globals_of(code)
        self.is_nothing = self.names == ()


_reads: dict[types.CodeType, _Read] = {}
_reads_by_id: dict[int, tuple[types.CodeType, _Read]] = {}  # keeps code, so that ids stay unique


def _read_by(code: types.CodeType) -> _Read:
    found = _reads_by_id.get(id(code))
    if found is None:
        read = _reads.get(code)
        if read is None:
            read = _reads[code] = _Read(code)
        found = _reads_by_id[id(code)] = (code, read)
    return found[1]


def _globals_of(code: types.CodeType) -> tuple[str, ...] | None:
    """Names of the globals and builtins that code reads; None if it does more than read them."""
    names: dict[str, None] = {}
    for step in steps_of(code):
        if step.opname.startswith(("IMPORT", "STORE_GLOBAL", "DELETE_GLOBAL", "STORE_ATTR")):
            return None
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            names[step.argval] = None
    return tuple(names)


def steps_of(code: types.CodeType) -> Iterator[dis.Instruction]:
    """The instructions of code, and of the functions that it makes."""
    yield from dis.get_instructions(code)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from steps_of(constant)
