"""Describe functions that read tensors, numbers and other such functions by name.

Two functions with equal descriptions compute the same once their tensors are exchanged. Most mods
are of this kind. Others, such as methods, have no description.
"""

from __future__ import annotations

import dis
import functools
import types
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["Described", "Places", "describe"]

# For each function and each of its captures: (True, index of a tensor) or (False, a number).
Places = tuple[tuple[tuple[bool, Any], ...], ...]
_VALUES = (int, float, bool, str, type(None), torch.dtype, torch.device)
_TENSORS = (Tensor, torch.nn.Parameter)


class _NotPlain(Exception):
    """A function reads something else."""


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
    """Describe functions; None if one of them reads something else."""
    tensors: list[Tensor] = []
    try:
        return Described(tuple([_describe(function, tensors) for function in functions]), tensors)
    except _NotPlain:
        return None


def _describe(value: Any, tensors: list[Tensor]) -> Hashable:
    kind = type(value)
    if kind is types.FunctionType:
        return _describe_function(value, tensors)
    if kind in _TENSORS:
        for number, known in enumerate(tensors):
            if known is value:
                return number
        tensors.append(value)
        return (value.shape, value.stride(), value.dtype, value.device, value.requires_grad)
    if kind in _VALUES:
        return kind, value
    if kind is tuple:
        return tuple([_describe(item, tensors) for item in value])
    if kind is functools.partial and not value.keywords:
        return (_describe(value.func, tensors), *[_describe(a, tensors) for a in value.args])
    raise _NotPlain


def _describe_function(value: Any, tensors: list[Tensor]) -> Hashable:
    code, names = value.__code__, value.__globals__
    if code not in _globals:
        _globals[code] = _globals_of(code)
    read = _globals[code]
    if read is None or value.__kwdefaults__:
        raise _NotPlain
    cells, defaults = value.__closure__, value.__defaults__
    try:
        held = [_describe(cell.cell_contents, tensors) for cell in cells] if cells else ()
    except ValueError:  # a name that is assigned later
        raise _NotPlain from None
    for name in read:
        if (found := names.get(name, torch)) is not torch:  # not a global: a builtin
            held = (*held, _describe(found, tensors))
    return (code, *held, _describe(defaults, tensors)) if defaults else (code, *held)


_globals: dict[types.CodeType, tuple[str, ...] | None] = {}


def _globals_of(code: types.CodeType) -> tuple[str, ...] | None:
    """Names of the globals and builtins that code reads; None if it does more than read them."""
    steps = list(dis.get_instructions(code))
    has_inner = any(isinstance(constant, types.CodeType) for constant in code.co_consts)
    if has_inner or any(step.opname.startswith("IMPORT") for step in steps):
        return None
    return tuple({step.argval for step in steps if step.opname in ("LOAD_GLOBAL", "LOAD_NAME")})
